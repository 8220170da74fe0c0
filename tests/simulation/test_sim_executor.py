"""The simulated device: same stops and budgets as a real one, time from the cost model alone."""

import dataclasses
import math

import pytest

from jaxkv.control.executor import ExecutorLimits
from jaxkv.core.clock import SimulatedClock
from jaxkv.core.plan import Admission, BlockCopy, DecodeRow, PlanShape, PrefillChunk, RowUpdate, StepPlan
from jaxkv.core.request import SamplingParams
from jaxkv.simulation.cost_model import ConstantCostModel
from jaxkv.simulation.sim_executor import SimExecutor

LIMITS = ExecutorLimits(64, 4, 4, 64, 4, 128, 8)


@dataclasses.dataclass
class RecordingCostModel:
    shapes: list = dataclasses.field(default_factory=list)

    def seconds(self, shape):
        self.shapes.append(shape)
        return 2.0


def make():
    clock, cost_model = SimulatedClock(10.0), RecordingCostModel()
    return SimExecutor(LIMITS, cost_model, clock), cost_model, clock


def admit(step_id, seed=1, max_new=5, min_new=0, stop_ids=(), prompt=3):
    admission = Admission(SamplingParams(seed=seed), max_new, min_new, stop_ids)
    chunk = PrefillChunk("a", 0, 0, tuple(range(prompt)), True)
    return StepPlan(step_id, updates=(RowUpdate(0, 0, (1, 2), admission),), prefill=(chunk,))


def decode(step_id, num_steps):
    return StepPlan(step_id, decode=(DecodeRow("a", 0),), num_steps=num_steps, decode_kv_tokens=4)


def generate(executor, num_steps=8, **admission):
    first = executor.submit(admit(0, **admission)).result().rows[0]
    rest = executor.submit(decode(1, num_steps)).result().rows[0]
    return first, rest


def test_budget_ends_a_row_and_then_it_emits_nothing():
    executor, cost_model, _ = make()
    first, rest = generate(executor)
    assert (len(first.token_ids), first.exhausted, first.stopped) == (1, False, False)
    assert (len(rest.token_ids), rest.exhausted, rest.stopped) == (4, True, False)
    after = executor.submit(decode(2, 8)).result().rows[0]
    assert (after.token_ids, after.exhausted, after.stopped) == ((), False, False)
    # The loop is left as soon as no row is active: 4 of 8 steps, then none.
    assert [shape.num_steps for shape in cost_model.shapes] == [0, 4, 0]


def test_prompt_logprobs_are_those_of_a_model_that_knows_nothing():
    """Also in chunks that do not end the prompt."""
    executor, _, _ = make()
    updates = admit(0).updates
    chunks = (PrefillChunk("a", 0, 0, (1, 2, 3), False, (3, 4), 1), PrefillChunk("b", 1, 0, (1, 2), False))
    first = executor.submit(StepPlan(0, updates=(*updates, updates[0]._replace(row=1)), prefill=chunks)).result()
    assert [(row.request_id, row.token_ids) for row in first.rows] == [("a", ())]
    assert [entry.token_id for entry in first.rows[0].prompt_logprobs] == [3, 4]
    assert {(entry.logprob, entry.rank) for entry in first.rows[0].prompt_logprobs} == {(-math.log(32_000), 1)}
    chunk = PrefillChunk("a", 0, 3, (4, 5), True, (5,))
    (row,) = executor.submit(StepPlan(1, prefill=(chunk,))).result().rows
    assert len(row.token_ids) == 1 and [entry.token_id for entry in row.prompt_logprobs] == [5]


def test_stop_id_is_emitted_and_ends_the_row_but_not_before_min_tokens():
    executor, _, _ = make()
    first, rest = generate(executor)
    tokens = first.token_ids + rest.token_ids
    first, rest = generate(make()[0], stop_ids=(tokens[2],))
    assert first.token_ids + rest.token_ids == tokens[:3]
    assert rest.stopped and not rest.exhausted
    first, rest = generate(make()[0], stop_ids=(tokens[2],), min_new=3)
    later = first.token_ids + rest.token_ids
    assert later[:2] == tokens[:2] and later[2] != tokens[2] and len(later) == 5


def test_tokens_follow_seed_and_position_only():
    def tokens(**admission):
        first, rest = generate(make()[0], **admission)
        return first.token_ids + rest.token_ids

    assert tokens() == tokens()
    assert tokens(seed=2) != tokens()
    assert tokens(prompt=4)[:4] == tokens(prompt=3)[1:]  # as after a preemption, with one token more known
    assert all(0 <= token < 32_000 for token in tokens())


def test_a_chunk_that_is_not_the_last_samples_nothing():
    executor, cost_model, _ = make()
    plan = admit(0)
    plan = dataclasses.replace(plan, prefill=(dataclasses.replace(plan.prefill[0], is_last=False),))
    assert executor.submit(plan).result().rows == ()
    assert executor.submit(decode(1, 4)).result().rows[0].token_ids == ()
    assert cost_model.shapes[0] == PlanShape(3, 0, 0, 0, 0, prefill_pairs=1 + 2 + 3)


def test_steps_run_one_after_another_and_reading_moves_the_clock():
    executor, _, clock = make()
    first, second = executor.submit(admit(0)), executor.submit(decode(1, 2))
    assert clock.now() == 10.0
    assert (first.result().timing.submitted, first.result().timing.finished) == (10.0, 12.0)
    assert clock.now() == 12.0
    assert (second.result().timing.submitted, second.result().timing.finished) == (10.0, 14.0)
    clock.advance_to(20.0)
    third = executor.submit(decode(2, 2))  # an idle device starts at once
    assert second.result().timing.finished == 14.0 and clock.now() == 20.0  # reading late does not go back
    assert third.result().timing.finished == 22.0


def test_constant_cost_model_adds_up():
    model = ConstantCostModel(
        call_seconds=1,
        prefill_token_seconds=10,
        decode_step_seconds=100,
        decode_row_seconds=1000,
        copied_token_seconds=10_000,
    )
    assert model.seconds(PlanShape(0, 0, 0, 0, 0)) == 1
    assert model.seconds(PlanShape(3, 99, 0, 0, 0)) == 31
    assert model.seconds(PlanShape(2, 0, 4, 99, 5)) == pytest.approx(1 + 20 + 5 * (100 + 4000))
    assert model.seconds(PlanShape(0, 0, 0, 0, 0, copied_tokens=7)) == 70_001
    plan = StepPlan(0, block_copies=(BlockCopy(1, 2, 3), BlockCopy(1, 3, 4)))
    assert plan.shape().copied_tokens == 7
