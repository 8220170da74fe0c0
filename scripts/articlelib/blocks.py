"""The rows that the block manager alone decides: A12, A14, B7, B12's memory, B14."""

import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from articlelib.driver import Session, Turn, at_once
from articlelib.lab import Lab
from articlelib.workloads import Words, behind_prefix
from articlelib.worlds import Setting, SimulatedWorld, World
from jaxkv.capacity import plan_capacity, shard
from jaxkv.control.block_manager import BlockManager
from jaxkv.control.prefix_index import BlockHash
from jaxkv.core.config import EngineConfig
from jaxkv.core.request import Request, SamplingParams
from jaxkv.execution.kv_cache import kv_bytes_per_token
from jaxkv.simulation.block_replay import ROOT, serve

_BLOCK_SIZE = 16


def a_million_allocations(lab: Lab) -> dict[str, Any]:
    """A12: requests of all sizes take and give back blocks in random order, some of which stay cached.

    At every moment all free blocks must serve: a request is refused only when fewer are free than it needs. What does
    decay is what is cached: of a warm prefix that nobody asks for, so much is left after the others' traffic.
    """
    total, pool = (20_000 if lab.quick else 1_000_000), 4096
    rng = random.Random(0)
    manager, live = BlockManager(pool + 1, _BLOCK_SIZE), []
    allocated = failures = name = 0
    seconds, largest = [], 0
    checkpoint, begin = total // 10, time.process_time()
    while allocated < total:
        want = rng.randint(1, 40)
        if want > manager.num_free:
            manager.free(live.pop(rng.randrange(len(live))))
            continue
        blocks = manager.allocate(want)
        failures += len(set(blocks)) != want
        if rng.random() < 0.5:
            parent = ROOT
            for block in blocks:
                block_hash = BlockHash(b"%d" % name)
                manager.register(block, block_hash, parent)
                parent, name = block_hash, name + 1
        live.append(blocks)
        allocated += want
        if allocated >= checkpoint:
            seconds.append(time.process_time() - begin)
            checkpoint, begin = checkpoint + total // 10, time.process_time()
            lab.tick()
    manager.check(live)
    for blocks in live:
        manager.free(blocks)
    # One request for everything: it needs no two blocks that are neighbours.
    largest = len(manager.allocate(manager.num_free))
    return {
        "allocations": allocated,
        "pool": pool,
        "failures": failures,
        "largest_after": largest,
        "slowest_tenth": max(seconds) / statistics.median(seconds) if seconds else 1.0,
        "warm_prefix_left": _warm_prefix(),
    }


def _warm_prefix() -> dict[str, float]:
    """Share of a prefix of 64 blocks that is still found after others have asked for so many parts of the pool."""
    pool, found = 1024, {}
    for passed in (0.5, 0.9, 1.1, 2.0):
        manager = BlockManager(pool + 1, _BLOCK_SIZE)
        prefix = [BlockHash(b"warm %d" % i) for i in range(64)]
        serve(manager, prefix)
        for request in range(int(passed * pool) // 16):
            serve(manager, [BlockHash(b"%d %d" % (request, i)) for i in range(16)])
        found[f"{passed:g}"] = len(manager.match(prefix).blocks) / len(prefix)
    return found


def far_too_many_rows(lab: Lab, world: World) -> dict[str, Any]:
    """B7: all requests at once, max_num_seqs an order above what the pool holds."""
    count, own, output_len = (60, 100, 100) if world.is_simulated and lab.quick else (600, 200, 200)
    if not world.is_simulated:
        count, own, output_len = 24, 30, 12
    holds = 4 if not world.is_simulated else 20
    rows = min(10 * holds, 16) if not world.is_simulated else 10 * holds
    blocks = holds * -(-(own + output_len) // _BLOCK_SIZE)
    words = Words(world.vocab_size)
    prompts = [words.take(own) for _ in range(count)]
    served = world.serve(at_once(prompts, output_len), Setting(num_blocks=blocks, max_num_seqs=rows))
    lab.tick()
    short = sum(len(tokens) != output_len for tokens in served.outputs.values())
    return {
        "requests": count,
        "finished": len(served.asked),
        "cut_short": short,
        "refused": len(served.refused),
        "preemptions": served.preemptions,
        "pool_holds": holds,
        "max_num_seqs": rows,
    }


def memory_by_length(lab: Lab, world: SimulatedWorld) -> dict[str, Any]:
    """B12's first half: KV bytes that a growing request holds, with and without a window."""
    length = 2048 if lab.quick else 12_288
    every, curves = length // 12, {}
    per_token = kv_bytes_per_token(world.model, world.dtype)
    longer = SimulatedWorld(
        world.model_name, world.model, world.device, world.cost_model_of, max_num_batched_tokens=256,
        max_model_len=length + 64,
    )  # fmt: skip
    for name, window in (("full", None), ("window", 1024)):
        setting = Setting(num_blocks=2 * length // _BLOCK_SIZE, max_num_seqs=1, decode_steps=0, kv_window=window)
        engine, _ = longer.engine(setting)
        sampling = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        engine.add(Request("grows", Words(world.vocab_size).take(16), sampling))
        blocks, curve, next_at, tokens = engine.scheduler.blocks, {}, every, 16
        while engine.has_work() and next_at <= length:
            tokens += sum(len(output.token_ids) for output in engine.step())
            if tokens >= next_at:
                owned = blocks.num_usable - blocks.num_free
                curve[str(next_at)] = owned * _BLOCK_SIZE * per_token
                next_at += every
        curves[name] = curve
        lab.tick()
    return {"window": 1024, "curves": curves}


def replicas(lab: Lab, world: SimulatedWorld) -> dict[str, Any]:
    """B14: how full the caches of four GPUs are, as shards of one engine and as four engines."""
    gpus = 4
    whole = kv_bytes_per_token(world.model, world.dtype)
    shards = [kv_bytes_per_token(shard(world.model, gpus), world.dtype)] * gpus
    count, groups = (120, 8) if lab.quick else (480, 16)
    prompts = [behind_prefix(world.vocab_size, 500, 60, seed) for seed in range(groups)]
    rng, asked = random.Random(0), []
    popularity = [1 / (i + 1) for i in range(groups)]
    for i in range(count):
        group = rng.choices(range(groups), popularity)[0]
        asked.append((group, Session(0.1 * i, (Turn(next(prompts[group]), 40),))))
    found = {}
    for name, choose in (
        ("in turn", lambda i, group: i % gpus),
        ("by prefix", lambda i, group: group % gpus),
    ):
        for caching in (False, True):
            parts: list[list[Session]] = [[] for _ in range(gpus)]
            for i, (group, session) in enumerate(asked):
                parts[choose(i, group)].append(session)
            label = f"{name}, {'with' if caching else 'without'} prefix cache"
            found[label] = _fill(world, parts, Setting(enable_prefix_caching=caching))
            lab.tick()
    return {"gpus": gpus, "kv_bytes_per_token": whole, "shard_bytes": shards, "replicas": found}


def _fill(world: SimulatedWorld, parts: Sequence[list[Session]], setting: Setting) -> dict[str, Any]:
    """`load`: KV tokens that each replica's requests ask for; `hit_rate` of all of them."""
    served = [world.serve(part, setting) for part in parts]
    loads = [one.prompt_tokens + one.generated_tokens for one in served]
    cached = sum(one.cached_tokens for one in served) / sum(one.prompt_tokens for one in served)
    return {"tokens": loads, "spread": max(loads) / min(loads), "hit_rate": cached}


def start_lines(lab: Lab, world: SimulatedWorld) -> dict[str, Any]:
    """A14: the concurrency told at start, and whether so many requests of that length, and one more, run at once."""
    length = 1024 if lab.quick else 2048
    config = EngineConfig(dtype=world.dtype, max_model_len=length, block_size=_BLOCK_SIZE, max_num_seqs=256)
    memory = plan_capacity(config, world.model, world.device).memory
    told = int(memory.max_concurrency)
    ran = {}
    for name, count, tokens in (
        ("told", told, length),
        ("one_more", told + 1, length),
        ("half_as_long", 2 * told, length // 2),
    ):
        ran[name] = _run_at_once(world, count, tokens, memory.num_blocks)
        lab.tick()
    return {"length": length, "lines": memory.lines()[-2:], "told": told, "ran": ran}


def _run_at_once(world: SimulatedWorld, count: int, length: int, num_blocks: int) -> bool:
    """Whether so many requests get to their full length together, and none gives its blocks back meanwhile."""
    output_len = min(8 * count, length // 2)  # long enough that the first still run when the last come
    setting = Setting(num_blocks=num_blocks, max_num_seqs=256, enable_prefix_caching=False)
    engine, _ = world.engine(setting)
    sampling = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    words, most = Words(world.vocab_size), 0
    for i in range(count):
        engine.add(Request(str(i), words.take(length - output_len), sampling))
    while engine.has_work():
        engine.step()
        most = max(most, engine.num_running)
    return most == count and engine.stats.preemptions == 0
