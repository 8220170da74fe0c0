"""How long cached blocks lie unused: until they are found again, until they are evicted."""

import dataclasses

from jaxkv.control.block_manager import BlockManager
from jaxkv.control.engine import Engine
from jaxkv.control.executor import ExecutorLimits
from jaxkv.core.clock import SimulatedClock
from jaxkv.core.metrics import BLOCK_SECONDS_BOUNDS, EngineStats
from jaxkv.core.request import Request, SamplingParams
from jaxkv.simulation.cost_model import ConstantCostModel
from jaxkv.simulation.sim_executor import SimExecutor

LIMITS = ExecutorLimits(
    num_blocks=5, block_size=4, max_num_seqs=4, max_num_batched_tokens=64, max_prefill_seqs=4, max_model_len=64,
    max_decode_steps=1,
)  # fmt: skip


def test_ages_of_one_block():
    stats = EngineStats()
    manager = BlockManager(2, 4, stats=stats)
    manager.now = 10.0
    (block,) = manager.allocate(1)
    manager.register(block, b"a", b"root")
    assert manager.idle_seconds([block]) == []  # somebody uses it
    manager.now = 15.0
    manager.free([block])
    manager.now = 18.0
    assert manager.idle_seconds([block]) == [3.0]
    manager.share([block])
    manager.now = 20.0
    manager.free([block])
    manager.now = 27.0
    assert manager.allocate(1) == [block]
    assert (stats.block_age.count, stats.block_age.total) == (1, 17.0)
    assert (stats.block_idle.count, stats.block_idle.total) == (1, 7.0)


def test_what_was_dropped_was_not_evicted():
    stats = EngineStats()
    manager = BlockManager(3, 4, stats=stats)
    (block,) = manager.allocate(1)
    manager.register(block, b"a", b"root")
    manager.free([block])
    manager.drop_cached()
    manager.allocate(2)
    assert manager.num_evictions == stats.block_age.count == stats.block_idle.count == 0


def engine_with(**limits):
    clock = SimulatedClock(100.0)
    engine = Engine(
        SimExecutor(dataclasses.replace(LIMITS, **limits), ConstantCostModel(0, 0, 0, 0, 0), clock), clock=clock
    )

    def serve(name, prompt, when):
        clock.advance_to(when)
        engine.add(Request(name, tuple(prompt), SamplingParams(max_tokens=1)))
        while engine.has_work():
            engine.step()
            engine.scheduler.check()

    return engine, serve


def test_a_request_that_finds_blocks_tells_how_long_they_lay():
    engine, serve = engine_with()
    serve("a", range(8), 100.0)
    serve("b", [*range(8), 9], 130.0)  # both blocks
    gaps = engine.stats.block_reuse_gap
    assert (gaps.count, gaps.total) == (2, 60.0)
    serve("c", [0, 1, 2, 3, 50], 140.0)  # the first, idle for 10 s
    assert (gaps.count, gaps.total) == (3, 70.0) and engine.stats.block_age.count == 0
    bounds, buckets, _ = engine.snapshot().histograms["block_reuse_gap"]
    assert bounds == BLOCK_SECONDS_BOUNDS and dict(zip(bounds, buckets, strict=False))[30] == 2


def test_every_eviction_has_an_age():
    engine, serve = engine_with()
    for number in range(10):
        serve(str(number), range(100 * number, 100 * number + 12), 100.0 + 5 * number)  # three of the four blocks
    stats = engine.stats
    assert engine.scheduler.blocks.num_evictions == stats.block_age.count == stats.block_idle.count > 20
    # The last three were written at 145 s; what is gone was idle for 5 s, or 10 s where a fourth block was left.
    assert stats.block_idle.total == stats.block_age.total and 5.0 <= stats.block_idle.mean <= 10.0
