"""Which tokens of a plan are computed, and which are shared with other requests."""

import pytest

from jaxkv.control.executor import ExecutorLimits
from jaxkv.control.scheduler import Scheduler
from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.request import FinishReason
from tests.support.scheduling import add, chunks, make, run


def test_requests_of_one_step_share_their_common_prefix():
    """12 requests at once with one 500-token system prompt compute it once."""
    scheduler = Scheduler(ExecutorLimits(1000, 16, 16, 2048, 16, 2048, 8))
    system = list(range(500))
    for number in range(12):
        add(scheduler, str(number), system + [5000 + 100 * number + place for place in range(32)])
    plan, outputs = run(scheduler)
    assert [chunk.start for chunk in plan.prefill] == [0] + [496] * 11
    assert scheduler.stats.computed_tokens == 532 + 11 * 36
    assert scheduler.stats.cached_tokens == 11 * 496
    assert [output.num_cached_tokens for output in outputs] == [0] + [496] * 11


def test_long_shared_prefix_is_computed_once_though_it_takes_several_steps():
    scheduler = make(num_blocks=1000, max_num_batched_tokens=16)
    for number in range(4):
        add(scheduler, str(number), list(range(44)) + [100 + number] * 3)  # 44: whole blocks
    while any(not state.is_decoding for state in scheduler.running) or scheduler.waiting:
        run(scheduler)
    assert scheduler.stats.computed_tokens == 47 + 3 * 3


def test_the_last_token_of_a_cached_prompt_is_computed():
    scheduler = make()
    add(scheduler, "a", list(range(8)))
    run(scheduler, stop=["a"])
    add(scheduler, "b", list(range(8)))
    plan, _ = run(scheduler)
    assert chunks(plan) == [("b", 7, 1, True)]
    (copy,) = plan.block_copies
    assert (copy.src, copy.dst, copy.num_tokens) == (2, plan.updates[0].blocks[1], 3) and copy.dst != 2


def test_generated_tokens_are_shared_too():
    scheduler = make()
    add(scheduler, "a", [1, 2, 3])
    run(scheduler)
    run(scheduler)  # tokens 1 2 3 5 | 5 5 5 5 | 5 5 5 (5): 11 of the 12 have KV
    scheduler.finish("a", FinishReason.STOP)
    add(scheduler, "b", [1, 2, 3] + [5] * 9)
    plan, _ = run(scheduler)
    assert chunks(plan) == [("b", 8, 4, True)]


@pytest.mark.parametrize(("caching", "salts"), [(False, (None, None)), (True, ("x", "y")), (True, ("x", None))])
def test_nothing_is_shared_without_caching_or_across_salts(caching, salts):
    scheduler = make(SchedulerConfig(enable_prefix_caching=caching))
    for name, salt in zip("ab", salts, strict=True):
        add(scheduler, name, list(range(8)), cache_salt=salt)
    plan, _ = run(scheduler)
    assert chunks(plan) == [("a", 0, 8, True), ("b", 0, 8, True)]
