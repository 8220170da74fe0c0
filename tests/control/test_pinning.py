"""Pinned prefixes outlive bursts, stay within their bound, and never get in a request's way."""

import pytest

from jaxkv.control.executor import ExecutorLimits
from jaxkv.control.prefix_index import hash_blocks, root_hash
from jaxkv.control.scheduler import Scheduler
from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.errors import ConfigError, RequestError
from jaxkv.core.plan import RowResult, StepResult, StepTiming
from jaxkv.core.request import Request, SamplingParams

LIMITS = ExecutorLimits(21, 4, 2, 64, 2, 64, 8)


def make(max_pinned_blocks=6):
    return Scheduler(LIMITS, SchedulerConfig(max_pinned_blocks=max_pinned_blocks))


def serve(scheduler, prompt, salt=None):
    """Serve one request that produces one token; returns how much of it was cached."""
    scheduler.add(Request("a", tuple(prompt), SamplingParams(max_tokens=1), cache_salt=salt))
    plan = scheduler.schedule()
    result = StepResult(plan.step_id, (RowResult("a", (5,), exhausted=True),), StepTiming(0.0, 0.0))
    (output,) = scheduler.update(result)
    scheduler.check()
    return output.num_cached_tokens


def burst(scheduler):
    for number in range(10):
        serve(scheduler, range(1000 + 100 * number, 1040 + 100 * number))


@pytest.mark.parametrize("before", [True, False])
def test_a_pinned_salt_survives_a_burst(before):
    scheduler = make()
    if before:
        assert scheduler.prefixes.pins.pin_salt("keep") == 0
    serve(scheduler, range(16), "keep")
    serve(scheduler, range(16), "drop")
    assert scheduler.prefixes.pins.pin_salt("keep") == 4
    burst(scheduler)
    assert serve(scheduler, range(18), "keep") == 16 and serve(scheduler, range(18), "drop") == 0
    scheduler.prefixes.pins.unpin_salt("keep")
    scheduler.check()
    burst(scheduler)
    assert serve(scheduler, range(18), "keep") == 0 and scheduler.blocks.num_free == 20


def test_a_pinned_block_keeps_what_leads_to_it():
    scheduler = make()
    serve(scheduler, range(20))
    hashes = hash_blocks(root_hash(b"", None), range(20), 4)
    assert scheduler.prefixes.pins.pin_block(hashes[2]) == 3 == scheduler.prefixes.pins.pin_block(hashes[2])
    burst(scheduler)
    assert serve(scheduler, range(20)) == 12
    scheduler.prefixes.pins.unpin_block(hashes[2])
    scheduler.prefixes.pins.unpin_block(hashes[2])
    assert scheduler.prefixes.pins.num_blocks == 0
    burst(scheduler)
    assert serve(scheduler, range(20)) == 0
    assert scheduler.prefixes.pins.pin_block(b"unknown") == 0


def test_a_block_whose_beginning_is_gone_is_not_pinned():
    """Plain FIFO evicts a prompt's first blocks first."""
    scheduler = Scheduler(LIMITS, SchedulerConfig(max_pinned_blocks=6, eviction_policy="fifo"))
    serve(scheduler, range(20))
    serve(scheduler, range(100, 155))
    serve(scheduler, range(300, 312))
    hashes = hash_blocks(root_hash(b"", None), range(20), 4)
    assert scheduler.blocks.index.find(hashes[0]) is None and scheduler.blocks.index.find(hashes[4]) is not None
    assert scheduler.prefixes.pins.pin_block(hashes[4]) == 0 == scheduler.prefixes.pins.num_blocks


def test_unfilled_blocks_use_up_no_pins():
    scheduler = make(max_pinned_blocks=4)
    scheduler.prefixes.pins.pin_salt("s")
    for number in range(4):
        serve(scheduler, range(500 + 100 * number, 503 + 100 * number), "s")
    serve(scheduler, range(16), "s")
    scheduler.prefixes.pins.unpin_salt("s")
    assert scheduler.prefixes.pins.pin_salt("s") == 4
    burst(scheduler)
    assert serve(scheduler, range(17), "s") == 16


def test_full_blocks_are_pinned_and_unfilled_ones_when_they_fill():
    scheduler = make()
    serve(scheduler, range(100, 103), "s")
    scheduler.prefixes.pins.pin_salt("s")
    scheduler.add(Request("b", tuple(range(6)), SamplingParams(max_tokens=30), cache_salt="s"))
    for pinned in (1, 1, 5):
        plan = scheduler.schedule()
        result = StepResult(plan.step_id, (RowResult("b", (5,) * max(1, plan.num_steps)),), StepTiming(0.0, 0.0))
        scheduler.update(result)
        scheduler.check()
        assert scheduler.prefixes.pins.num_blocks == pinned


def test_pins_are_bounded():
    scheduler = make(max_pinned_blocks=3)
    pins = scheduler.prefixes.pins
    serve(scheduler, range(20), "s")
    assert pins.pin_salt("s") == 3 == pins.num_blocks  # the beginning
    serve(scheduler, range(100, 120), "s")
    assert pins.num_blocks == 3
    assert pins.pin_block(hash_blocks(root_hash(b"", "s"), range(20), 4)[0]) == 0
    burst(scheduler)
    assert serve(scheduler, range(20), "s") == 12
    assert make(max_pinned_blocks=0).prefixes.pins.pin_salt("s") == 0


def test_the_largest_request_fits_beside_all_pins():
    scheduler = make(max_pinned_blocks=6)  # 14 blocks are left: 56 tokens with K/V
    scheduler.prefixes.pins.pin_salt("s")
    serve(scheduler, range(28), "s")
    assert scheduler.prefixes.pins.num_blocks == 6
    assert serve(scheduler, range(200, 256)) == 0
    with pytest.raises(RequestError, match="need 15 KV blocks.*the pool has 14 beside 6 that may be pinned"):
        scheduler.add(Request("b", tuple(range(57)), SamplingParams(max_tokens=1)))


@pytest.mark.parametrize("blocks", [-1, 20])
def test_impossible_bounds_are_refused(blocks):
    with pytest.raises(ConfigError, match="max_pinned_blocks"):
        make(max_pinned_blocks=blocks)


def test_pins_survive_a_reset_and_nothing_else_does():
    scheduler = make()
    scheduler.prefixes.pins.pin_salt("keep")
    serve(scheduler, range(18), "keep")
    serve(scheduler, range(18), "drop")
    assert scheduler.reset_prefix_cache() is True
    scheduler.check()
    assert scheduler.blocks.num_cached == 0 and scheduler.prefixes.pins.num_blocks == 4
    assert serve(scheduler, range(18), "keep") == 16 and serve(scheduler, range(18), "drop") == 0
