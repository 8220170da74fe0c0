"""The rows about time, measured on engines of this machine: A2, A3, B1, B8, B9, B10's throughput, B13.

Settings that are compared take turns, so that a noisy minute hurts them alike. Those of B1, B9 and A3 run in a simulated
world too.
"""

import dataclasses
import itertools
import statistics
import time
from typing import Any

from articlelib.driver import Served, Tokens, at_once
from articlelib.lab import FULL, Lab, Sizes
from articlelib.workloads import Words, about_documents, behind_prefix
from articlelib.worlds import Setting, World
from jaxkv.execution.kv_cache import kv_bytes_per_token


def _sizes(lab: Lab, world: World) -> Sizes:
    return FULL if world.is_simulated and not lab.quick else lab.sizes


def without_cache(lab: Lab, world: World) -> dict[str, Any]:
    """B1: generating as one does without a cache: every token by computing all before it again.

    That is a request of one token for each, with the prefix cache off, on the same engine and step functions. Only every
    uncached_step-th is measured; those between cost as much as the one before.
    """
    sizes = _sizes(lab, world)
    words, off = Words(world.vocab_size), Setting(enable_prefix_caching=False, decode_steps=0)
    prompt, lengths = words.take(sizes.prompt_len), sizes.generated
    firsts: dict[str, list[float]] = {"cached": [], "uncached": []}
    world.serve(at_once([prompt], 4), off)  # touches memory for the first time
    for _ in range(1 if world.is_simulated else 3 * lab.runs):
        firsts["cached"].append(world.serve(at_once([prompt], 2), off).mean("ttft"))
        firsts["uncached"].append(world.serve(at_once([prompt], 1), off).mean("ttft"))
    lab.tick()
    cached = [world.serve(at_once([prompt], length), off).seconds for length in lengths]
    lab.tick()
    known, uncached, total = prompt + words.take(max(lengths)), [], 0.0
    for start in range(0, max(lengths), sizes.uncached_step):
        if start in lengths:
            uncached.append(total)
        seconds = world.serve(at_once([known[: sizes.prompt_len + start]], 1), off).mean("ttft")
        total += sizes.uncached_step * seconds
    lab.tick()
    return {
        "lengths": list(lengths),
        "cached": cached,
        "uncached": [*uncached, total][: len(lengths)],
        "ttft_cached": statistics.median(firsts["cached"]),
        "ttft_uncached": statistics.median(firsts["uncached"]),
    }


def shared_prefix(lab: Lab, world: World) -> dict[str, Any]:
    """B9: all at once behind one prefix: cache off, cold (empty) and warm (the prefix is in it)."""
    sizes, ttft = _sizes(lab, world), {"off": [], "cold": [], "warm": []}
    for run in range(1 if world.is_simulated else lab.runs):
        prompts = behind_prefix(world.vocab_size, sizes.shared_len, sizes.own_len, seed=run)
        first = list(itertools.islice(prompts, sizes.concurrent))
        prefix = first[0][: sizes.shared_len]
        for name in ttft:
            setting = Setting(enable_prefix_caching=name != "off", max_num_seqs=sizes.concurrent, decode_steps=0)
            sessions = at_once(first, sizes.output_len)
            if name == "warm":
                sessions = _after(world, [prefix], first, sizes.output_len, setting)
            ttft[name].append(_asked(world.serve(sessions, setting))[0])
            lab.tick()
    return {"concurrent": sizes.concurrent, "shared_len": sizes.shared_len} | {
        name: statistics.median(values) for name, values in ttft.items()
    }


def _after(world: World, prefixes: list[Tokens], prompts: list[Tokens], output_len: int, setting: Setting) -> list:
    """The prompts, when requests that bring the prefixes into the cache are over for sure."""
    warming = at_once(prefixes, 1, caller="warms")
    later = 2 * world.serve(warming, setting).seconds + 0.5
    return warming + [dataclasses.replace(session, arrival=later) for session in at_once(prompts, output_len, "asks")]


def _asked(served: Served) -> tuple[float, float]:
    """Mean TTFT and hit rate of those who ask."""
    found = [one.metrics for one in served.asked if one.caller != "warms"]
    cached, prompt = (sum(getattr(one, name) for one in found) for name in ("num_cached_tokens", "num_prompt_tokens"))
    return sum(one.ttft for one in found) / len(found), cached / prompt


def documents(lab: Lab, world: World) -> dict[str, Any]:
    """A3: questions about the same documents at once, as in B9: cache off, cold and warm, and warm with the documents in any
    order."""
    sizes, found = _sizes(lab, world), {}
    shape = {
        "num_documents": 8,
        "document_len": sizes.shared_len // 4,
        "a_prompt": 4,
        "question_len": sizes.own_len,
    }
    ordered, shuffled = (
        list(itertools.islice(about_documents(world.vocab_size, sorts=sorts, **shape), sizes.concurrent))
        for sorts in (True, False)
    )
    known = sorted({prompt[: 4 * shape["document_len"]] for prompt in ordered})
    for name, prompts in (("off", ordered), ("cold", ordered), ("warm", ordered), ("any order", shuffled)):
        setting = Setting(enable_prefix_caching=name != "off", max_num_seqs=sizes.concurrent, decode_steps=0)
        sessions = at_once(prompts, sizes.output_len)
        if name in ("warm", "any order"):
            sessions = _after(world, known, prompts, sizes.output_len, setting)
        ttft, hit_rate = _asked(world.serve(sessions, setting))
        found[name] = {"ttft": ttft, "hit_rate": hit_rate}
        lab.tick()
    return {"runs": found}


def unique_prompts(lab: Lab, world: World) -> dict[str, Any]:
    """A2: prompts that share nothing, cache on and off in turn; each pair's quotient of throughput.

    On a CPU other load changes seconds by more than is asked for, so the process's CPU seconds are compared there. In a
    simulated world the host's seconds are added to the device's, as if nothing hid them.
    """
    sizes, ratios = _sizes(lab, world), []
    how = "host's time added to the device's" if world.is_simulated else "a CPU second" if lab.on_cpu else "a second"
    for run in range((3 if world.is_simulated else 3 * lab.runs) + 1):  # the first is not counted
        words = Words(world.vocab_size, run)
        prompts = [words.take(4 * sizes.own_len) for _ in range((1 if lab.on_cpu else 4) * sizes.concurrent)]
        host, wall = {}, {}
        for caching in (True, False) if run % 2 else (False, True):
            setting = Setting(enable_prefix_caching=caching, max_num_seqs=sizes.concurrent, decode_steps=0)
            begin = time.process_time()
            wall[caching] = world.serve(at_once(prompts, 2 * sizes.output_len), setting).seconds
            host[caching] = time.process_time() - begin
        if run:
            spent = wall
            if world.is_simulated:
                spent = {caching: wall[caching] + host[caching] for caching in wall}
            elif lab.on_cpu:
                spent = host
            ratios.append(spent[False] / spent[True])
        lab.tick()
    return {"ratios": ratios, "how": how}


def block_sizes(lab: Lab, world: World) -> dict[str, Any]:
    """B8: throughput of decoding by block size, and what the last blocks of requests leave empty."""
    sizes, rates = lab.sizes, {size: [] for size in lab.sizes.block_sizes}
    words = Words(world.vocab_size)
    # As long as the article's shares of waste fit to: some 150 tokens.
    lengths = [words.between(90, 210) for _ in range(2 * sizes.concurrent)]
    outputs = 16 if lab.quick else 64
    prompts = [words.take(max(8, length - outputs)) for length in lengths]
    waste = {}
    for run in range(1 + lab.runs):
        for size in sizes.block_sizes:
            setting = Setting(block_size=size, enable_prefix_caching=False, decode_steps=0)
            served = world.serve(at_once(prompts, outputs), setting)
            if run:
                rates[size].append(served.tokens_per_second)
            waste[size] = _waste(served, size)
            lab.tick()
    return {
        "block_sizes": list(sizes.block_sizes),
        "tokens_per_second": [statistics.median(rates[size]) for size in sizes.block_sizes],
        "waste_tokens": [waste[size][0] for size in sizes.block_sizes],
        "waste_share": [waste[size][1] for size in sizes.block_sizes],
    }


def _waste(served: Served, block_size: int) -> tuple[float, float]:
    """Empty places a request when it ends, and their share of its blocks. The last token's K/V are never written."""
    used = [len(served.outputs[one.metrics.request_id]) + one.metrics.num_prompt_tokens - 1 for one in served.asked]
    taken = [-(-count // block_size) * block_size for count in used]
    return (sum(taken) - sum(used)) / len(used), 1 - sum(used) / sum(taken)


def eager(lab: Lab, world: World) -> dict[str, Any]:
    """B13: un-jitted steps against compiled ones, one step a call and many."""
    few, many = 1, lab.sizes.concurrent
    found: dict[str, dict[str, float]] = {}
    for rows in (few, many):
        words = Words(world.vocab_size)
        prompts, output_len = [words.take(32) for _ in range(rows)], 4 if lab.quick else 12
        runs: dict[str, list[float]] = {"eager": [], "compiled, C = 1": [], "compiled, C = 8": []}
        for run in range(1 + lab.runs):
            for name, setting in (
                ("eager", Setting(enforce_eager=True, enable_prefix_caching=False)),
                ("compiled, C = 1", Setting(enable_prefix_caching=False)),
                ("compiled, C = 8", Setting(enable_prefix_caching=False, decode_steps=8)),
            ):
                rate = 1 / world.serve(at_once(prompts, output_len), setting).mean("tpot")
                if run:  # the first compiles what single operations need
                    runs[name].append(rate * rows)
                lab.tick()
        found[str(rows)] = {name: statistics.median(values) for name, values in runs.items()}
    return {"tokens_per_second": found}


def full_pool(lab: Lab, world: World) -> dict[str, Any]:
    """B10: throughput when the pool limits how many run: as many bytes for each format, the first of 16 bits."""
    if world.is_simulated:
        base, model, blocks = world.dtype, world.model, None
        prompt_len, output_len, count = 512, 512, 60 if lab.quick else 240
    else:
        base, model = "bfloat16", world.started().model_config
        prompt_len, output_len, count = 64, 16 if lab.quick else 64, 32
        blocks = 4 * -(-(prompt_len + output_len) // Setting.block_size)  # room for four requests in 16 bits
    words = Words(world.vocab_size)
    prompts = [words.take(prompt_len) for _ in range(count)]
    rates: dict[str, list[float]] = {base: [], "int8": [], "fp8_e4m3": []}
    for run in range(1 if world.is_simulated else 1 + lab.runs):
        for name, found in rates.items():
            gain = kv_bytes_per_token(model, base) / kv_bytes_per_token(model, name)
            room = None if blocks is None else int(blocks * gain)
            setting = Setting(num_blocks=room, kv_cache_dtype=name, enable_prefix_caching=False, decode_steps=0)
            served = world.serve(at_once(prompts, output_len), setting)
            if run or world.is_simulated:
                found.append(served.tokens_per_second)
            lab.tick()
    return {"base": base, "tokens_per_second": {name: statistics.median(values) for name, values in rates.items()}}
