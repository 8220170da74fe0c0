"""The rows about load and latency, which a simulated engine measures: A5, A9, A10, A11."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from articlelib.driver import Served, Session, Tokens, Turn
from articlelib.lab import Lab
from articlelib.workloads import Words, behind_prefix, single
from articlelib.worlds import Setting, World
from jaxkv.core.metrics import percentile

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

        rate = highest(lambda rate: _meets_limits(run(rate)), 4.0, 3)
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
    good = sum(
        asked.metrics.ttft <= TTFT_LIMIT and (asked.metrics.tpot or 0) <= TPOT_LIMIT for asked in served.asked
    )
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
    """A11: a template whose first words change with every request, and the same with these behind the instructions."""
    changing, instructions, own, count = 12, 500, 60, 60 if lab.quick else 300
    found = {}
    for name, in_front in (("in front", True), ("behind", False)):
        prompts = template(world.vocab_size, changing, instructions, own, in_front)
        served = world.serve(single(prompts, count, 5.0, 30), Setting())
        found[name] = {
            "hit_rate": served.hit_rate,
            "ttft": served.mean("ttft"),
            "computed_tokens": served.computed_per_request,
        }
        lab.tick()
    return {"runs": found}


def template(vocab_size: int, changing: int, instructions: int, own: int, in_front: bool) -> Iterator[Tokens]:
    words = Words(vocab_size)
    fixed = words.take(instructions)
    while True:
        stamp, question = words.take(changing), words.take(own)
        yield (stamp + fixed if in_front else fixed + stamp) + question


def restart(lab: Lab, world: World) -> dict[str, Any]:
    """A13, simulated: the first requests after a start with five system prompts, which are sent once before or not."""
    words, prompts, output_len = Words(world.vocab_size), 5, 30
    systems = [words.take(500) for _ in range(prompts)]
    first = [systems[i % prompts] + words.take(40) for i in range(20)]
    found = {}
    for name, warmed in (("cold", False), ("warm", True)):
        warming = [(0.0, system, 1) for system in systems] if warmed else []
        begin = 60.0  # long after the warming
        asked = [(begin + 0.05 * i, prompt, output_len) for i, prompt in enumerate(first)]
        served = world.serve([_single(*one) for one in warming + asked], Setting())
        ttft = [one.metrics.ttft for one in served.asked if one.metrics.num_generated_tokens > 1]
        cached = [one.metrics.num_cached_tokens for one in served.asked if one.metrics.num_generated_tokens > 1]
        found[name] = {"ttft": sum(ttft) / len(ttft), "ttft_max": max(ttft), "cached_tokens": sum(cached)}
        lab.tick()
    return found


def _single(arrival: float, prompt: Tokens, output_len: int) -> Session:
    return Session(arrival, (Turn(prompt, output_len),))
