"""Which tokens of a plan are computed, and which are shared with other requests."""

import pytest

from jaxkv.control.executor import ExecutorLimits
from jaxkv.control.scheduler import Scheduler
from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.request import FinishReason
from tests.support.scheduling import add, chunks, make, run


@pytest.mark.parametrize("budget", [560, 2048, 8192])
@pytest.mark.parametrize("own", [10, 32])  # with 10 tokens none of them fills a block beyond the common ones
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
def test_requests_of_one_step_share_their_common_prefix(block_size, own, budget):
    """12 requests at once with one 500-token system prompt compute it once, whatever the block size."""
    scheduler = Scheduler(ExecutorLimits(1000, block_size, 16, budget, 16, 2048, 8))
    system = list(range(500))
    for number in range(12):
        add(scheduler, str(number), system + [5000 + 100 * number + place for place in range(own)])
    plan, _ = run(scheduler)
    assert block_size == 8 or [chunk.start for chunk in plan.prefill] == [0], "the others could copy the head of a block that it writes"
    cached = {}
    while scheduler.waiting or any(not state.is_decoding for state in scheduler.running):
        cached |= {output.request_id: output.num_cached_tokens for output in run(scheduler)[1]}
    assert scheduler.stats.computed_tokens == 500 + 12 * own
    assert set(cached.values()) <= {0, 500} and scheduler.stats.cached_tokens == 11 * 500


def test_a_request_waits_for_a_copy_once_and_nobody_for_a_trifle():
    """Blocks of 16: a wait saves "b" 5 tokens, "c" 3."""
    scheduler = make(block_size=16, num_blocks=100, max_num_seqs=8, max_prefill_seqs=8, max_num_batched_tokens=512)
    first = list(range(40))
    add(scheduler, "a", first)
    add(scheduler, "b", first[:21] + [100] * 20)
    add(scheduler, "c", first[:19] + [200] * 20)
    plan, _ = run(scheduler)
    assert chunks(plan) == [("a", 0, 40, True), ("c", 16, 23, True)]
    add(scheduler, "d", first[:21] + [100] * 5 + [300] * 9)  # 5 tokens more with "b" than with "a"
    plan, _ = run(scheduler)
    assert chunks(plan) == [("b", 21, 20, True)]
    plan, _ = run(scheduler)
    assert chunks(plan) == [("d", 26, 9, True)]


def test_a_request_that_may_copy_nothing_does_not_wait():
    """Prompt log-probabilities need the whole prompt computed."""
    scheduler = make(block_size=16, num_blocks=100, max_num_batched_tokens=512)
    add(scheduler, "a", list(range(40)))
    add(scheduler, "b", [*range(10), *[100] * 30], prompt_logprobs=1)
    assert chunks(scheduler.schedule()) == [("a", 0, 40, True), ("b", 0, 40, True)]


def test_an_early_request_keeps_its_row_and_its_blocks():
    """16 usable blocks of 4: "a" takes 6, "b" waits and needs 5 of its own, so there is no room for "c" beside them."""
    limits = dict(num_blocks=17, block_size=4, max_num_seqs=3, max_prefill_seqs=3, max_num_batched_tokens=64)
    for others, admitted in (("bc", ["a"]), ("c", ["a", "c"])):
        scheduler = make(max_model_len=64, **limits)
        add(scheduler, "a", list(range(24)), 2)
        if "b" in others:
            add(scheduler, "b", list(range(7)) + [100] * 14, 2)
        add(scheduler, "c", [200] * 20, 2)
        plan, _ = run(scheduler)
        assert [chunk.request_id for chunk in plan.prefill] == admitted
        plan, _ = run(scheduler)
        assert ("b" in others) == ("b" in [chunk.request_id for chunk in plan.prefill])


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
    assert chunks(plan) == [("b", 11, 1, True)]


@pytest.mark.parametrize(("caching", "salts"), [(False, (None, None)), (True, ("x", "y")), (True, ("x", None))])
def test_nothing_is_shared_without_caching_or_across_salts(caching, salts):
    scheduler = make(SchedulerConfig(enable_prefix_caching=caching))
    for name, salt in zip("ab", salts, strict=True):
        add(scheduler, name, list(range(8)), cache_salt=salt)
    plan, _ = run(scheduler)
    assert chunks(plan) == [("a", 0, 8, True), ("b", 0, 8, True)]
