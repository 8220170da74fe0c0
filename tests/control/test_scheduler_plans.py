"""What plans hold, one behaviour at a time. Token values never matter here; exactness has its own file."""

import dataclasses

import pytest

from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.plan import DecodeRow, RowResult, StepResult, StepTiming
from jaxkv.core.request import FinishReason, Request, SamplingParams, TokenLogprobs
from tests.support.scheduling import add, chunks, decoded, make, result_of, run


def test_nothing_to_do_is_no_plan():
    assert make().schedule() is None


def test_prompts_are_prefilled_in_chunks_beside_decodes():
    scheduler = make()
    add(scheduler, "a", 6)
    add(scheduler, "b", 20)
    plan, outputs = run(scheduler)
    assert chunks(plan) == [("a", 0, 6, True), ("b", 0, 10, False)]
    assert plan.decode == () and plan.num_steps == 0
    assert [(output.request_id, output.token_ids) for output in outputs] == [("a", (5,))]
    # The decode row costs one token of the budget of 16; b's last 10 fit beside it.
    plan, outputs = run(scheduler)
    assert chunks(plan) == [("b", 10, 10, True)] and decoded(plan) == ["a"] and plan.num_steps == 1
    assert plan.decode_kv_tokens == 7
    assert [output.request_id for output in outputs] == ["b", "a"]
    plan, _ = run(scheduler)
    assert chunks(plan) == [] and decoded(plan) == ["a", "b"] and plan.num_steps == 8
    assert plan.decode_kv_tokens == 8 + 21
    assert plan.shape() == dataclasses.replace(plan.shape(), prefill_tokens=0, decode_rows=2, decode_kv_tokens=29)


def test_tables_are_sent_at_admission_and_then_only_what_is_new():
    scheduler = make()
    add(scheduler, "a", 6, stop_token_ids=(9,), min_tokens=3)
    plan, _ = run(scheduler)
    (update,) = plan.updates
    assert (update.row, update.first_column, update.blocks) == (0, 0, (1, 2))
    assert (update.admission.max_new_tokens, update.admission.min_new_tokens) == (20, 3)
    assert update.admission.stop_ids == (9,)
    plan, _ = run(scheduler)  # 8 steps: positions 6 to 13
    (update,) = plan.updates
    assert (update.row, update.first_column, update.blocks, update.admission) == (0, 2, (3, 4), None)


def test_next_step_is_planned_before_the_last_is_read():
    scheduler = make()
    add(scheduler, "a", 6, max_tokens=12)
    plans = [scheduler.schedule() for _ in range(3)]
    assert chunks(plans[0]) == [("a", 0, 6, True)]
    assert decoded(plans[1]) == ["a"] and plans[1].num_steps == 8 and plans[1].decode_kv_tokens == 7
    # 1 + 8 of 12 tokens are in flight: 3 are left, so no more than 4 steps are of use.
    assert decoded(plans[2]) == ["a"] and plans[2].num_steps == 4 and plans[2].decode_kv_tokens == 15
    assert scheduler.schedule() is None
    scheduler.check()
    assert [len(scheduler.update(result_of(plan))[0].token_ids) for plan in plans[:2]] == [1, 8]
    last = StepResult(2, (RowResult("a", (5, 5, 5), exhausted=True),), StepTiming(0.0, 0.0))
    (output,) = scheduler.update(last)
    assert output.finish_reason is FinishReason.LENGTH and len(output.token_ids) == 3
    assert not scheduler.has_requests


def test_a_row_that_stopped_in_flight_gives_nothing_to_later_steps():
    scheduler = make()
    add(scheduler, "a", 6)
    first, second = scheduler.schedule(), scheduler.schedule()
    (output,) = scheduler.update(result_of(first, stop=["a"]))
    assert (output.finish_reason, output.stop_token_id) == (FinishReason.STOP, 7)
    # The same id may come back, and an old result must not reach it.
    add(scheduler, "a", 6)
    assert scheduler.update(StepResult(second.step_id, (RowResult("a", ()),), StepTiming(0.0, 0.0))) == []
    plan, _ = run(scheduler)
    assert chunks(plan) == [("a", 5, 1, True)]  # and its blocks are still cached


def test_rows_are_reused_lowest_first():
    scheduler = make(max_num_batched_tokens=64)
    for name in "abcd":
        add(scheduler, name, 3)
    plan, _ = run(scheduler, stop=["c", "a"])
    assert [update.row for update in plan.updates] == [0, 1, 2, 3]
    add(scheduler, "e", 3)
    plan, _ = run(scheduler)
    assert [chunk.row for chunk in plan.prefill] == [0]
    assert plan.decode == (DecodeRow("b", 1), DecodeRow("d", 3))


def test_lookahead_is_lowered_before_anyone_is_preempted():
    # 7 blocks, 4 of them for the prompts: 8 steps (tokens 7 to 14) need 2 more a row, 4 steps (7 to 10) need 1.
    scheduler = make(SchedulerConfig(decode_steps=8), num_blocks=8, max_model_len=25)
    add(scheduler, "a", 7, max_tokens=18)
    add(scheduler, "b", 7, max_tokens=18)
    run(scheduler)
    plan, _ = run(scheduler)
    assert decoded(plan) == ["a", "b"] and plan.num_steps == 4
    assert scheduler.stats.preemptions == 0
    assert scheduler.stats.loop_steps == {4: 1}


def test_calls_are_short_while_a_waiting_request_is_about_to_get_a_row():
    scheduler = make(max_num_seqs=2)
    add(scheduler, "a", 3, max_tokens=3)
    add(scheduler, "b", 3, max_tokens=20)
    add(scheduler, "c", 3)
    run(scheduler)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert decoded(first) == ["a", "b"] and first.num_steps == 2  # ends with a
    assert decoded(second) == ["b"] and second.num_steps == 1  # c can start when the first is read
    scheduler.update(result_of(first))
    plan = scheduler.schedule()
    assert chunks(plan) == [("c", 0, 3, True)] and decoded(plan) == ["b"]
    scheduler.check()


@pytest.mark.parametrize("moment", ["waiting", "prefilling", "in flight", "decoding", "preempted"])
def test_abort_at_any_moment_frees_everything(moment):
    scheduler = make()
    add(scheduler, "a", 20)
    plan = None
    if moment != "waiting":
        run(scheduler)
    if moment in ("decoding", "preempted", "in flight"):
        run(scheduler)
    if moment == "in flight":
        plan = scheduler.schedule()
    if moment == "preempted":
        scheduler.preempt("a")
    output = scheduler.finish("a", FinishReason.ABORT)
    assert (output.finish_reason, output.token_ids) == (FinishReason.ABORT, ())
    scheduler.check()
    if plan is not None:
        assert scheduler.update(result_of(plan)) == []
    assert scheduler.blocks.num_free == 100 and not scheduler.has_requests
    assert scheduler.schedule() is None
    assert scheduler.finish("a", FinishReason.ABORT) is None
    assert scheduler.stats.num_finished == {FinishReason.ABORT: 1}


def test_unseeded_requests_get_seeds_from_engine_seed_and_arrival():
    def seeds(engine_seed):
        scheduler = make(SchedulerConfig(seed=engine_seed))
        add(scheduler, "a", 3)
        add(scheduler, "b", 3, seed=42)
        add(scheduler, "c", 3)
        plan, _ = run(scheduler)
        return [update.admission.sampling.seed for update in plan.updates]

    assert seeds(0) == seeds(0)
    assert len({*seeds(0), *seeds(1)}) == 5 and seeds(0)[1] == 42
    assert all(0 <= seed < 2**31 for seed in seeds(0))


def test_eos_ends_a_request_unless_ignored():
    scheduler = make(SchedulerConfig(eos_token_ids=(2, 3)))
    add(scheduler, "a", 3, stop_token_ids=(3, 9))
    add(scheduler, "b", 3, stop_token_ids=(9,), ignore_eos=True)
    plan, _ = run(scheduler)
    assert [update.admission.stop_ids for update in plan.updates] == [(2, 3, 9), (9,)]


def test_max_tokens_none_ends_at_max_model_len_or_the_pool():
    for num_blocks, longest in ((101, 64), (5, 17)):
        scheduler = make(num_blocks=num_blocks)
        add(scheduler, "a", 3, max_tokens=None)
        plan, _ = run(scheduler)
        assert plan.updates[0].admission.max_new_tokens == longest - 3
    scheduler = make()
    add(scheduler, "a", 60, max_tokens=1000)
    assert run(scheduler)[0].updates[0].admission.max_new_tokens == 4


def test_times_and_counters():
    scheduler = make()
    scheduler.add(Request("a", (1, 2, 3), SamplingParams(max_tokens=9), arrival_time=1.0), now=1.5)
    plan = scheduler.schedule(now=2.0)
    scheduler.update(result_of(plan, finished=5.0))
    plan = scheduler.schedule(now=5.0)
    (output,) = scheduler.update(result_of(plan, finished=8.0))
    assert output.finish_reason is FinishReason.LENGTH
    (metrics,) = scheduler.stats.requests
    assert (metrics.queue_time, metrics.ttft, metrics.e2e, metrics.tpot) == (1.0, 4.0, 7.0, 3.0 / 8)
    stats = scheduler.stats
    assert (stats.prompt_tokens, stats.cached_tokens, stats.computed_tokens, stats.generated_tokens) == (3, 0, 3, 9)
    assert (stats.steps, stats.decode_calls, dict(stats.loop_steps)) == (2, 1, {8: 1})
    assert list(stats.itl.latest) == [3.0]


def test_only_prompt_logprobs_that_are_missing_are_computed_again():
    """A prompt of 10 in chunks of 4, preempted after the first was read: the second admission starts at token 0, but
    asks from entry 4 on."""
    scheduler = make(max_num_batched_tokens=4)
    scheduler.add(Request("a", tuple(range(10, 20)), SamplingParams(prompt_logprobs=0, max_tokens=5)))
    seen = []
    for step in range(4):
        plan = scheduler.schedule()
        (chunk,) = plan.prefill
        seen.append((chunk.start, chunk.is_last, chunk.first_target, chunk.targets))
        told = tuple(TokenLogprobs(token, -1.0, 1) for token in chunk.targets)
        rows = (RowResult("a", (5,) * chunk.is_last, prompt_logprobs=told),) if chunk.has_result else ()
        outputs = scheduler.update(StepResult(plan.step_id, rows, StepTiming(0.0, 0.0)))
        scheduler.check()
        if step == 0:
            scheduler.preempt("a")
    assert seen == [
        (0, False, 0, (11, 12, 13, 14)),
        (0, False, 4, ()),
        (4, False, 0, (15, 16, 17, 18)),
        (8, True, 0, (19,)),
    ]
    assert [entry and entry.token_id for entry in outputs[0].prompt_logprobs] == [None, *range(11, 20)]
