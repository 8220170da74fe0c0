"""The rows about load and latency, which a simulated engine measures: A5, A9, A10, A11."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from articlelib.driver import Served, Session, Tokens, Turn
from articlelib.lab import FULL, Lab
from articlelib.workloads import Words, behind_prefix, single
from articlelib.worlds import Setting, World
from jaxkv.control.prefix_index import token_bytes
from jaxkv.core.metrics import percentile
from jaxkv.insight.diagnosis import compare
from jaxkv.insight.prompt_log import LoggedRequest, token_log
from jaxkv.insight.proposals import find_faults

TTFT_LIMIT, TPOT_LIMIT, KEPT = 1.0, 0.05, 0.9
"""Goodput: the highest rate at which so many of the requests meet both limits (seconds)."""


def goodput_by_hit_rate(lab: Lab, world: World) -> dict[str, Any]:
    """A5: prompts of one length, of which a growing part is common to all."""
    length, output_len, seconds = 800, 60, 3 if lab.quick else 15
    shares, rates, running, found = (0.0, 0.3, 0.6, 0.9), [], [], []
    for share in shares:
        shared = round(length * share)

        def run(rate: float) -> Served:
            prompts = behind_prefix(world.vocab_size, shared, length - shared)
            return world.serve(single(prompts, int(rate * seconds), rate, output_len), Setting())

        rate = highest(lambda rate: _meets_limits(run(rate)), 4.0, 4)
        served = run(rate)
        rates.append(rate)
        running.append(rate * served.mean("e2e"))
        found.append(served.hit_rate)
        lab.tick()
    return {"shares": list(shares), "hit_rates": found, "goodput": rates, "running": running}


def highest(holds: Callable[[float], bool], low: float, steps: int) -> float:
    """The highest value that holds, found by doubling and then by halving the gap `steps` times; `low` must hold."""
    high = 2 * low
    while holds(high):
        low, high = high, 2 * high
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _meets_limits(served: Served) -> bool:
    good = sum(asked.metrics.ttft <= TTFT_LIMIT and (asked.metrics.tpot or 0) <= TPOT_LIMIT for asked in served.asked)
    return good >= KEPT * len(served.asked)


def hidden_tail(lab: Lab, world: World) -> dict[str, Any]:
    """A9: nine of ten requests are short and hit; the tenth is long, another caller's, and shares nothing."""
    count = 200 if lab.quick else 1000
    words = Words(world.vocab_size, 1)
    chats = single(behind_prefix(world.vocab_size, 500, 60), count, 9.0, 60, caller="chat")
    reports = single((words.take(2500) for _ in itertools.count()), count // 9, 1.0, 60, caller="reports", seed=1)
    served = world.serve(sorted(chats + reports, key=lambda session: session.arrival), Setting(max_num_seqs=64))
    lab.tick()
    end = max(session.arrival for session in chats)
    buckets: dict[str, Callable[[Any], str]] = {
        "caller": lambda asked: asked.caller,
        "prompt length": lambda asked: "to 1,024" if asked.metrics.num_prompt_tokens <= 1024 else "longer",
        "interval": lambda asked: f"quarter {min(3, int(4 * (asked.metrics.arrival - served.start) / end)) + 1}",
    }
    values = {"all": _bucket(served.asked)}
    for name, key in buckets.items():
        groups: dict[str, list] = {}
        for asked in served.asked:
            groups.setdefault(key(asked), []).append(asked)
        values[name] = {label: _bucket(group) for label, group in sorted(groups.items())}
    return values


def _bucket(group: Any) -> dict[str, float]:
    """`hit_rate` is the mean of the requests' own, as a dashboard shows it."""
    metrics = [asked.metrics for asked in group]
    ttft = [one.ttft for one in metrics]
    return {
        "requests": len(metrics),
        "hit_rate": sum(one.num_cached_tokens / one.num_prompt_tokens for one in metrics) / len(metrics),
        "ttft_mean": sum(ttft) / len(ttft),
        "ttft_p50": percentile(ttft, 50),
        "ttft_p99": percentile(ttft, 99),
    }


def queueing(lab: Lab, world: World) -> dict[str, Any]:
    """A10: one load at a high hit rate, under every max_num_seqs; where the time to the first token goes."""
    count = 150 if lab.quick else 800
    prompts = lambda: behind_prefix(world.vocab_size, 500, 60)  # noqa: E731 (a fresh one each time)
    most = world.serve(single(prompts(), count, 1000.0, 100), Setting(max_num_seqs=256)).requests_per_second
    load, found = 0.5 * most, {}
    for rows in (4, 8, 16, 32, 64, 128, 256):
        served = world.serve(single(prompts(), count, load, 100), Setting(max_num_seqs=rows))
        found[str(rows)] = {
            "hit_rate": served.hit_rate,
            "ttft": served.mean("ttft"),
            "queue": served.mean("queue_time"),
            "prefill": served.mean("prefill_time"),
            "decode": served.mean("decode_time"),
            "preemptions": served.preemptions,
        }
        lab.tick()
    return {"load": load, "most": most, "runs": found}


def changing_front(lab: Lab, world: World) -> dict[str, Any]:
    """A11: a template in which something changes with every request, near the front or behind the instructions; and what
    the diagnosis of the first one's prompts finds and computes."""
    opening, changing, instructions, own, count = 6, 12, 500, 60, 60 if lab.quick else 300
    found: dict[str, Any] = {}
    for name, in_front in (("in front", True), ("behind", False)):
        lengths = opening, changing, instructions, own
        prompts = list(itertools.islice(template(world.vocab_size, *lengths, in_front=in_front), count))
        served = world.serve(single(iter(prompts), count, 5.0, 30), Setting())
        found[name] = {
            "hit_rate": served.hit_rate,
            "ttft": served.mean("ttft"),
            "computed_tokens": served.computed_per_request,
        }
        if in_front:
            diagnosed = _diagnosed(prompts)
        lab.tick()
    return {"runs": found, "planted_at": opening, **diagnosed}


def template(
    vocab_size: int, opening: int, changing: int, instructions: int, own: int, *, in_front: bool
) -> Iterator[Tokens]:
    words = Words(vocab_size)
    start, fixed = words.take(opening), words.take(instructions)
    while True:
        stamp, question = words.take(changing), words.take(own)
        yield start + (stamp + fixed if in_front else fixed + stamp) + question


def _diagnosed(prompts: list[Tokens]) -> dict[str, Any]:
    """Where the diagnosis says that prompts part, and hit rates as they are and if that were moved, by replay."""
    requests = [LoggedRequest(str(i), float(i), len(prompt), token_bytes(prompt)) for i, prompt in enumerate(prompts)]
    diagnosis = find_faults(compare(token_log(requests, Setting.block_size)))
    changed = [one for one in diagnosis.findings if one.cause == "changed_text" and one.gain is not None]
    if not changed:
        return {"found_at": None, "computed_before": diagnosis.hit_rate, "computed_after": diagnosis.hit_rate}
    first = changed[0]
    return {
        "found_at": first.position,
        "computed_before": first.gain.before,
        "computed_after": first.gain.after,
    }


def restart(lab: Lab, world: World) -> dict[str, Any]:
    """A13: the first requests after a start, with their system prompts sent once before or not."""
    sizes = FULL if world.is_simulated and not lab.quick else lab.sizes
    words, count, setting = Words(world.vocab_size), 4, Setting(decode_steps=0)
    systems = [words.take(sizes.shared_len) for _ in range(count)]
    first = [systems[i % count] + words.take(sizes.own_len) for i in range(2 * count)]
    warming = [Session(0.0, (Turn(system, 1),), "warms") for system in systems]
    takes = world.serve(warming, setting).seconds
    found = {}
    for name in ("cold", "warm"):
        # When the warming is over for sure.
        begin, before = (0.0, []) if name == "cold" else (2 * takes + 0.5, warming)
        asks = [Session(begin, (Turn(prompt, sizes.output_len),), "asks") for prompt in first]
        served = world.serve([*before, *asks], setting)
        asked = [one.metrics for one in served.asked if one.caller == "asks"]
        ttft = [one.ttft for one in asked]
        found[name] = {
            "ttft": sum(ttft) / len(ttft),
            "ttft_max": max(ttft),
            "cached_tokens": sum(one.num_cached_tokens for one in asked),
        }
        lab.tick()
    return found | {"warming_seconds": takes}
