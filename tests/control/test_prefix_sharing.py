"""What is found, what is copied, and why the rest was missed."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.control.executor import ExecutorLimits
from jaxkv.control.scheduler import Scheduler
from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.metrics import MissReason
from jaxkv.core.plan import BlockCopy, RowResult, StepResult, StepTiming
from jaxkv.core.request import FinishReason, Request, SamplingParams

LIMITS = ExecutorLimits(101, 4, 4, 64, 4, 64, 8)


def make(config=SchedulerConfig(), **limits):
    return Scheduler(dataclasses.replace(LIMITS, **limits), config)


def serve(scheduler, prompt, salt=None, request_id="a", ends=True):
    """Admit one request, read its first token and end it; returns (plan, cached tokens)."""
    scheduler.add(Request(request_id, tuple(prompt), SamplingParams(max_tokens=20), cache_salt=salt))
    plan = scheduler.schedule()
    rows = tuple(RowResult(chunk.request_id, (5,)) for chunk in plan.prefill if chunk.is_last)
    rows += tuple(RowResult(entry.request_id, (5,) * plan.num_steps) for entry in plan.decode)
    outputs = scheduler.update(StepResult(plan.step_id, rows, StepTiming(0.0, 0.0)))
    scheduler.check()
    if ends:
        scheduler.finish(request_id, FinishReason.STOP)
    return plan, next(output.num_cached_tokens for output in outputs if output.request_id == request_id)


def missed(scheduler):
    """The non-zero reasons since the last call, and tokens hit by (full, partial) block."""
    stats = scheduler.stats.prefix_cache
    assert stats.hit + stats.num_missed == stats.queried
    result = {reason.value: count for reason, count in stats.missed.items() if count}
    hits = stats.hit_full_block, stats.hit_partial_block
    stats.__init__()
    return hits, result


@pytest.mark.parametrize("share_partial, reasons", [
    (True, {"first_seen": 10}), (False, {"first_seen": 8, "shorter_than_block": 2})
])  # fmt: skip
def test_first_seen_and_shorter_than_a_block(share_partial, reasons):
    scheduler = make(SchedulerConfig(share_partial_blocks=share_partial))
    assert serve(scheduler, range(10))[1] == 0
    assert missed(scheduler) == ((0, 0), reasons)


def test_a_tail_is_copied_from_while_its_request_runs_and_afterwards():
    scheduler = make()
    first, _ = serve(scheduler, range(6), ends=False)
    tail = first.updates[0].blocks[1]
    plan, cached = serve(scheduler, range(9), request_id="b")  # in "a"'s block stand generated tokens too by now
    assert cached == 6 and plan.block_copies == (BlockCopy(tail, plan.updates[0].blocks[1], 2),)
    scheduler.finish("a", FinishReason.STOP)
    plan, cached = serve(scheduler, [0, 1, 2, 3, 50, 51, 52], request_id="c")
    assert cached == 4 and plan.block_copies == ()
    tail = plan.updates[0].blocks[1]
    plan, cached = serve(scheduler, [0, 1, 2, 3, 50, 51, 52, 53, 54], request_id="d")
    assert cached == 7 and plan.block_copies == (BlockCopy(tail, plan.updates[0].blocks[1], 3),)
    assert [chunk.start for chunk in plan.prefill] == [7]


def test_a_tail_of_which_a_part_is_found_is_copied():
    scheduler = make()
    first, _ = serve(scheduler, range(7))
    plan, cached = serve(scheduler, [*range(6), 50, 51])
    assert cached == 6 and plan.block_copies == (BlockCopy(first.updates[0].blocks[1], plan.updates[0].blocks[1], 2),)


def test_turns_of_a_conversation_find_all_that_was_computed():
    scheduler = make()
    tokens = list(range(6))
    for turn in range(5):
        assert serve(scheduler, tokens)[1] == (len(tokens) - 5 if turn else 0)  # but not the token sampled at its end
        tokens += [5, *range(100 * turn, 100 * turn + 4)]


def test_tails_go_before_any_full_block():
    scheduler = make(num_blocks=8, max_model_len=28, max_num_seqs=1)
    serve(scheduler, range(12))
    serve(scheduler, range(100, 107))
    assert serve(scheduler, range(200, 212))[1] == 0  # takes the two free blocks, and the tail
    assert scheduler.blocks.num_evictions == 0
    assert serve(scheduler, range(100, 107))[1] == 4 and serve(scheduler, range(12))[1] == 8


def test_an_equal_or_shorter_tail_is_not_kept_twice():
    scheduler = make()
    serve(scheduler, range(7), ends=False)
    serve(scheduler, range(7), request_id="b", ends=False)
    serve(scheduler, range(6), request_id="c")
    assert len(scheduler.blocks.index) == 2
    for name in "ab":
        scheduler.finish(name, FinishReason.STOP)
    scheduler.check()
    assert len(scheduler.blocks.index) == scheduler.blocks.num_cached


def test_sequences_that_start_after_the_first_has_ended_compute_one_token_each():
    scheduler = make(max_num_seqs=1)
    scheduler.add(Request("a", tuple(range(7)), SamplingParams(max_tokens=1, n=3)))
    starts = []
    while (plan := scheduler.schedule()) is not None:
        starts += [chunk.start for chunk in plan.prefill]
        rows = tuple(RowResult(chunk.request_id, (5,)) for chunk in plan.prefill)
        scheduler.update(StepResult(plan.step_id, rows, StepTiming(0.0, 0.0)))
        scheduler.check()
    assert starts == [0, 6, 6]


def test_an_evicted_tail_is_told_from_an_unknown_one():
    scheduler = make(num_blocks=5, max_model_len=16, max_num_seqs=1)
    serve(scheduler, range(6))
    serve(scheduler, range(100, 115))
    missed(scheduler)
    serve(scheduler, range(6))
    assert missed(scheduler) == ((0, 0), {"evicted": 6})


def test_the_head_of_a_block_is_copied_and_the_rest_computed():
    scheduler = make()
    first, _ = serve(scheduler, range(12))
    missed(scheduler)
    plan, cached = serve(scheduler, [*range(7), 50, 51, 52])
    assert cached == 7 and plan.prefill[0].start == 7 and len(plan.prefill[0].token_ids) == 3
    blocks = plan.updates[0].blocks
    assert plan.block_copies == (BlockCopy(first.updates[0].blocks[1], blocks[1], 3),)
    assert blocks[0] == first.updates[0].blocks[0]
    assert missed(scheduler) == ((4, 3), {"first_seen": 3})


def test_the_first_block_can_be_shared_in_part_too():
    scheduler = make()
    serve(scheduler, range(12))
    plan, cached = serve(scheduler, [0, 1, 70])
    assert cached == 2 and plan.block_copies[0].num_tokens == 2


@pytest.mark.parametrize("length, full", [(12, 8), (11, 8), (9, 8), (8, 4)])
def test_of_a_cached_prompt_only_the_last_token_is_computed(length, full):
    scheduler = make()
    serve(scheduler, range(12))
    missed(scheduler)
    plan, cached = serve(scheduler, range(length))
    assert cached == length - 1 and len(plan.prefill[0].token_ids) == 1
    assert missed(scheduler) == ((full, length - 1 - full), {"last_token": 1})


def test_whole_blocks_only_when_asked():
    scheduler = make(SchedulerConfig(share_partial_blocks=False))
    serve(scheduler, range(12))
    missed(scheduler)
    assert serve(scheduler, [*range(7), 50])[1] == 4
    assert missed(scheduler) == ((4, 0), {"first_seen": 4})
    plan, cached = serve(scheduler, range(12))
    assert cached == 8 and plan.block_copies == ()
    assert missed(scheduler) == ((8, 0), {"last_token": 1, "shorter_than_block": 3})


@pytest.mark.parametrize("salts", [("x", None), (None, "x"), ("x", "y")])
def test_cached_under_another_salt(salts):
    scheduler = make()
    serve(scheduler, range(10), salts[0])
    missed(scheduler)
    plan, cached = serve(scheduler, range(10), salts[1])
    assert cached == 0 and plan.block_copies == ()
    assert missed(scheduler) == ((0, 0), {"salt": 10})
    assert serve(scheduler, range(10), salts[0])[1] == 9


@pytest.mark.parametrize("ghosts, reason", [(None, "evicted"), (3, "evicted"), (0, "first_seen")])
def test_evicted_is_told_from_first_seen_as_far_as_ghosts_go(ghosts, reason):
    scheduler = make(SchedulerConfig(ghost_blocks=ghosts), num_blocks=5, max_model_len=16, max_num_seqs=1)
    serve(scheduler, range(12))
    serve(scheduler, range(100, 115))
    missed(scheduler)
    assert serve(scheduler, range(12))[1] == 0
    assert missed(scheduler) == ((0, 0), {reason: 12})


def test_what_is_computed_again_after_a_preemption_is_no_hit():
    scheduler = make()
    serve(scheduler, range(10), ends=False)
    missed(scheduler)
    scheduler.preempt("a")
    plan = scheduler.schedule()
    assert plan.prefill[0].start == 10 and scheduler.stats.cached_tokens == 0
    assert missed(scheduler) == ((0, 0), {"recomputed": 1})  # the one generated


@pytest.mark.parametrize("end", ["finish", "preempt"])
def test_generated_blocks_are_published_four_at_a_time_and_at_the_end(end):
    scheduler = make(SchedulerConfig(decode_steps=4))
    scheduler.add(Request("a", tuple(range(6)), SamplingParams(max_tokens=40)))
    findable = {}
    for _ in range(7):
        plan = scheduler.schedule()
        row = RowResult("a", (5,) * max(plan.num_steps, 1))
        scheduler.update(StepResult(plan.step_id, (row,), StepTiming(0.0, 0.0)))
        scheduler.check()
        findable[scheduler.running[0].num_computed] = len(scheduler.blocks.index)
    # Tokens with K/V: blocks that are found. The second, as the prompt's tail, until it gets its own name.
    assert findable == {6: 2, 10: 2, 14: 2, 18: 2, 22: 5, 26: 5, 30: 5}
    if end == "finish":
        scheduler.finish("a", FinishReason.STOP)
    else:
        scheduler.preempt("a")
    scheduler.check()
    assert len(scheduler.blocks.index) == 8


def test_a_block_is_not_copied_from_in_the_plan_that_writes_it():
    scheduler = make(block_size=8)
    for name, tail in (("a", [6, 7]), ("b", [60])):
        scheduler.add(Request(name, (*range(6), *tail), SamplingParams(max_tokens=4)))
    scheduler.add(Request("c", (0, 70, 71, 72, 73), SamplingParams(max_tokens=4)))
    plan = scheduler.schedule()
    # "b" waits for 6 tokens, "c" does not for one.
    assert [(chunk.request_id, chunk.start) for chunk in plan.prefill] == [("a", 0), ("c", 0)]
    assert plan.block_copies == ()
    # The next plan runs later, though the first is not read yet.
    plan = scheduler.schedule()
    assert plan.prefill[0].start == 6 and plan.block_copies[0].num_tokens == 6
    scheduler.check()


def test_a_tail_that_is_just_being_written_is_missed_for_the_block_it_stands_in():
    scheduler = make(block_size=16)
    for name in "ab":
        scheduler.add(Request(name, tuple(range(19)), SamplingParams(max_tokens=4)))
    plan = scheduler.schedule()
    assert [chunk.start for chunk in plan.prefill] == [0, 16]  # two tokens are not worth a wait
    hits, reasons = missed(scheduler)
    assert hits == (16, 0) and reasons == {"first_seen": 19, "shorter_than_block": 2, "last_token": 1}
    scheduler.check()


def test_a_head_that_there_is_no_block_to_copy_to_is_missed_for_that():
    scheduler = make(block_size=8, num_blocks=3, max_model_len=16, max_num_seqs=1)
    serve(scheduler, range(15))
    missed(scheduler)
    serve(scheduler, [*range(10), 50])
    assert missed(scheduler) == ((8, 0), {"first_seen": 1, "shorter_than_block": 2})


def test_prompt_logprobs_beside_the_same_prompt_need_its_logits():
    scheduler = make(block_size=16)
    for name, logprobs in (("a", None), ("b", 1)):
        scheduler.add(Request(name, tuple(range(20)), SamplingParams(max_tokens=4, prompt_logprobs=logprobs)))
    scheduler.schedule()
    assert missed(scheduler) == ((0, 0), {"first_seen": 20, "needs_logits": 19, "last_token": 1})


def test_unfilled_blocks_take_no_place_of_full_ones_among_the_ghosts():
    scheduler = make(num_blocks=21, max_num_seqs=1)
    serve(scheduler, range(40))
    serve(scheduler, range(1000, 1063))
    for number in range(25):
        serve(scheduler, [2000 + 10 * number + place for place in range(3)])
    missed(scheduler)
    serve(scheduler, range(40))
    assert missed(scheduler) == ((16, 0), {"evicted": 24})


def test_a_head_is_not_worth_a_block_that_is_missing():
    """Four blocks, all needed: the one to copy from must be overwritten, so the request starts without it."""
    scheduler = make(num_blocks=5, max_model_len=16, max_num_seqs=1)
    serve(scheduler, range(8))
    plan, cached = serve(scheduler, [0, 1, *range(50, 63)])
    assert cached == 0 and plan.block_copies == ()
    serve(scheduler, range(8))
    plan, cached = serve(scheduler, [0, 1, *range(70, 80)])
    assert cached == 2 and plan.block_copies[0].num_tokens == 2


def test_the_source_is_not_handed_out_before_the_plan_is_complete():
    scheduler = make(num_blocks=8, max_model_len=16, max_num_seqs=3)
    serve(scheduler, range(4))
    scheduler.add(Request("b", (0, 1, 2, 90), SamplingParams(max_tokens=1)))
    scheduler.add(Request("c", tuple(range(200, 212)), SamplingParams(max_tokens=1)))
    plan = scheduler.schedule()
    ((copy,), given) = plan.block_copies, [block for update in plan.updates for block in update.blocks]
    assert copy.src not in given and copy.dst in given
    scheduler.check()


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=2, max_size=6))
def test_hits_are_the_longest_common_head_with_anything_before(prompts):
    """With room for all and nothing in flight, `block_size` costs nothing."""
    scheduler = make()
    for number, prompt in enumerate(prompts):
        common = 0
        for earlier in prompts[:number]:
            same = next((i for i, (x, y) in enumerate(zip(earlier, prompt)) if x != y), min(len(earlier), len(prompt)))
            common = max(common, same)
        _, cached = serve(scheduler, prompt)
        assert cached == min(common, len(prompt) - 1)
    stats = scheduler.stats.prefix_cache
    assert stats.hit == scheduler.stats.cached_tokens and stats.queried == scheduler.stats.prompt_tokens
    assert stats.hit + stats.num_missed == stats.queried
    assert stats.hit_rate == pytest.approx(stats.hit / stats.queried)
    assert stats.missed[MissReason.NEEDS_LOGITS] == 0


@pytest.mark.parametrize("preempt", [False, True])
def test_a_reset_makes_prompts_first_seen(preempt):
    scheduler = make()
    serve(scheduler, range(12))
    serve(scheduler, range(100, 112), request_id="b", ends=False)
    missed(scheduler)
    assert scheduler.reset_prefix_cache(preempt_running=preempt) is preempt
    scheduler.check()
    assert serve(scheduler, range(13), request_id="c")[1] == 0
    # The running request's own blocks stay findable, unless it gave them back.
    assert serve(scheduler, range(100, 113), request_id="d")[1] == 12
    hits, reasons = missed(scheduler)
    again = {"recomputed": 13} if preempt else {}  # the prompt and the token that it had generated
    assert hits == (12, 0) and reasons == {"first_seen": 14} | again
    assert scheduler.reset_prefix_cache() is False  # b still runs
    scheduler.finish("b", FinishReason.STOP)
    assert scheduler.reset_prefix_cache() is True and scheduler.blocks.num_free == 100
