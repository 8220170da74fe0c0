"""Requests whose tokens the host must choose among, in the scheduler alone."""

import pytest

from jaxkv.control.decode_steps import HOST_CALL_SECONDS, adaptive_decode_steps
from jaxkv.core.errors import RequestError
from jaxkv.core.plan import Masking
from jaxkv.core.request import FinishReason, Request, SamplingParams, StructuredOutputs
from tests.support.constraints import OutputDependent, constraint_for
from tests.support.scheduling import add, decoded, make, result_of, run

VOCAB = 2**15
EACH = SamplingParams(max_tokens=20, bad_words=("x",))


class Anything(OutputDependent):
    """No id is forbidden, but the host wants to be asked."""

    def __init__(self):
        super().__init__(VOCAB)

    def mask(self):
        return b"\xff" * (VOCAB // 8)

    def copy(self):
        return Anything()


def limited(scheduler, request_id, prompt=(1, 2, 3), params=EACH, **fields):
    scheduler.add(Request(request_id, tuple(prompt), params, constraint=Anything(), **fields))


def test_a_row_waits_for_its_own_token_only():
    scheduler = make()
    limited(scheduler, "limited")
    add(scheduler, "free", 3)
    first = scheduler.schedule()
    assert [mask.row for mask in first.token_masks] == [scheduler.running[0].row]
    assert first.updates[0].admission.masking is Masking.EACH_TOKEN
    second = scheduler.schedule()  # the first is not read
    assert decoded(second) == ["free"] and not second.token_masks
    scheduler.update(result_of(first))
    third = scheduler.schedule()
    assert set(decoded(third)) == {"limited", "free"} and len(third.token_masks) == 1


def test_alone_nothing_is_planned_before_the_token_is_read():
    scheduler = make()
    limited(scheduler, "limited")
    plan = scheduler.schedule()
    assert scheduler.schedule() is None
    scheduler.update(result_of(plan))
    assert decoded(scheduler.schedule()) == ["limited"]


def test_a_fixed_mask_is_told_once_and_again_after_a_preemption():
    scheduler = make()
    params = SamplingParams(max_tokens=20, allowed_token_ids=(5, 7))
    scheduler.add(Request("a", (1, 2, 3), params, constraint=constraint_for(params, 64)))
    plan, _ = run(scheduler)
    assert len(plan.token_masks) == 1 and plan.updates[0].admission.masking is Masking.FIXED
    plan, _ = run(scheduler)
    assert not plan.token_masks and decoded(plan) == ["a"] and plan.num_steps > 1
    scheduler.preempt("a")
    plan, _ = run(scheduler)
    assert len(plan.token_masks) == 1


def test_min_tokens_are_the_hosts_affair():
    scheduler = make()
    params = SamplingParams(max_tokens=20, min_tokens=3, stop_token_ids=(5,), allowed_token_ids=(5, 7))
    scheduler.add(Request("a", (1, 2, 3), params, constraint=constraint_for(params, 64)))
    plan = scheduler.schedule()
    (update,) = plan.updates
    assert (update.admission.masking, update.admission.min_new_tokens) == (Masking.EACH_TOKEN, 0)
    assert plan.token_masks[0].mask == constraint_for(SamplingParams(allowed_token_ids=(7,)), 64).mask()


def test_parameters_without_their_constraint_are_refused():
    scheduler = make()
    for params in (EACH, SamplingParams(structured_outputs=StructuredOutputs(json_object=True))):
        with pytest.raises(RequestError, match="ConstraintCompiler"):
            scheduler.add(Request("a", (1, 2, 3), params))
    assert not scheduler.has_requests


def test_a_constraint_that_allows_nothing_is_refused():
    scheduler = make()
    with pytest.raises(RequestError, match="nowhere to go"):
        scheduler.add(Request("a", (1, 2, 3), EACH, constraint=OutputDependent(64, longest=0)))
    assert not scheduler.has_requests


def test_a_fork_keeps_its_parents_constraint_or_has_none():
    scheduler = make()
    limited(scheduler, "a")
    run(scheduler)
    other = SamplingParams(max_tokens=20, bad_words=("another",))
    with pytest.raises(RequestError, match="parent's allowed_token_ids"):
        scheduler.fork("a", "b", other)
    scheduler.fork("a", "same", EACH)
    scheduler.fork("a", "free", SamplingParams(max_tokens=20))
    masking = {state.request_id: state.choice and state.choice.masking for state in scheduler.waiting}
    assert masking == {"same": Masking.EACH_TOKEN, "free": None}


def test_the_end_by_a_stop_id_asks_no_constraint():
    scheduler = make()
    scheduler.add(Request("a", (1, 2, 3), EACH, constraint=OutputDependent(VOCAB, longest=1)))
    _, (output,) = run(scheduler, stop=("a",))
    assert output.finish_reason is FinishReason.STOP and output.error is None


@pytest.mark.parametrize("step_seconds, expected", [(0.0, 8), (HOST_CALL_SECONDS / 3, 2), (0.05, 1)])
def test_calls_are_short_where_the_host_chooses(step_seconds, expected):
    c = adaptive_decode_steps(
        8, least_remaining=1, most_remaining=100, waiting=False, num_rows=3,
        step_seconds=step_seconds, host_chooses=True,
    )  # fmt: skip
    assert c == expected
