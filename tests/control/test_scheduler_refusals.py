"""Requests, settings and results that cannot be are refused, with the numbers."""

import dataclasses

import pytest

from jaxkv.control.scheduler import Scheduler
from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.errors import ConfigError, RequestError
from jaxkv.core.plan import RowResult
from jaxkv.core.request import Request, SamplingParams
from tests.support.scheduling import LIMITS, add, make, result_of, run


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "param", "numbers"),
    [
        (0, 5, "prompt", ["prompt is empty"]),
        (3, 0, "max_tokens", ["max_tokens is 0"]),
        (64, 5, "input_tokens", ["64 input tokens", "context length is 64"]),
        (10, 12, "max_tokens", ["10 prompt tokens and 12", "6 KV blocks of 4", "has 5", "num_gpu_blocks_override"]),
        (21, None, "prompt", ["21 prompt tokens and 1", "6 KV blocks of 4", "has 5"]),
        ([1, 2, -1], 5, "prompt", ["token id -1", "0 to 49151"]),
        ([1, 49152], 5, "prompt", ["token id 49152"]),
    ],
)
def test_requests_that_can_never_run_are_refused_with_numbers(prompt, max_tokens, param, numbers):
    scheduler = make(SchedulerConfig(vocab_size=49152), num_blocks=6)
    with pytest.raises(RequestError) as caught:
        add(scheduler, "a", prompt if isinstance(prompt, list) else [0] * prompt, max_tokens)
    assert caught.value.param == param and caught.value.status == 400
    for text in numbers:
        assert text in str(caught.value)
    assert not scheduler.has_requests and scheduler.stats.num_requests == 0
    add(scheduler, "a", [0] * 10, 11)  # exactly what the pool holds
    assert scheduler.has_requests


def test_live_ids_are_unique():
    scheduler = make()
    add(scheduler, "a", 3)
    with pytest.raises(RequestError, match="'a' is already in use"):
        add(scheduler, "a", 3)
    run(scheduler, stop=["a"])
    add(scheduler, "a", 3)


def test_more_stop_ids_than_the_device_holds_are_refused():
    limits = dataclasses.replace(LIMITS, max_stop_ids=3)
    scheduler = Scheduler(limits, SchedulerConfig(eos_token_ids=(1, 2)))
    scheduler.add(Request("fits", (5,), SamplingParams(stop_token_ids=(2, 3))))  # 2 is one of the model's own
    with pytest.raises(RequestError, match="4 ids would end the request.*at most 3"):
        scheduler.add(Request("does not", (5,), SamplingParams(stop_token_ids=(3, 4))))
    scheduler.add(Request("ignores", (5,), SamplingParams(stop_token_ids=(3, 4), ignore_eos=True)))


@pytest.mark.parametrize(
    ("config", "limits", "message"),
    [
        (SchedulerConfig(), {"max_num_batched_tokens": 3}, "raise max_num_batched_tokens to 4"),
        (SchedulerConfig(), {"num_blocks": 1}, "num_blocks is 1"),
        (SchedulerConfig(decode_steps=9), {}, "decode_steps is 9; it must be 0 .* to 8"),
        (SchedulerConfig(policy="lifo"), {}, "'lifo'"),
    ],
)
def test_settings_that_cannot_work_are_refused(config, limits, message):
    with pytest.raises(ConfigError, match=message):
        make(config, **limits)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step_id": 7}, "step 0, got result.step_id=7"),
        ({"rows": ()}, "Expected 1 rows from step 0, got 0"),
        ({"rows": (RowResult("x", (1,)),)}, "for request a, got one for x"),
        ({"rows": (RowResult("a", (1, 2)),)}, "was to get 1 tokens in step 0, got 2"),
        ({"rows": (RowResult("a", (), stopped=True),)}, "was to get 1 tokens in step 0, got 0"),
    ],
)
def test_results_that_do_not_fit_their_plan_are_refused(change, message):
    scheduler = make()
    add(scheduler, "a", 3)
    plan = scheduler.schedule()
    with pytest.raises(RuntimeError, match=message):
        scheduler.update(dataclasses.replace(result_of(plan), **change))


def test_prompt_logprobs_that_were_planned_must_come():
    scheduler = make()
    scheduler.add(Request("a", (1, 2, 3), SamplingParams(prompt_logprobs=0)))
    plan = scheduler.schedule()
    assert plan.prefill[0].targets == (2, 3) and plan.prefill[0].first_target == 0
    with pytest.raises(RuntimeError, match="was to get 2 prompt logprobs in step 0, got 0"):
        scheduler.update(result_of(plan))


def test_a_fork_has_no_prompt_logprobs_of_its_own():
    scheduler = make()
    scheduler.add(Request("a", (1, 2, 3), SamplingParams(prompt_logprobs=0, n=1)))
    with pytest.raises(RequestError, match="ask its parent") as error:
        scheduler.fork("a", "b", SamplingParams(prompt_logprobs=0))
    assert error.value.param == "prompt_logprobs" and scheduler.live_ids == ("a",)
    first, second = Request("c", (1, 2), SamplingParams(prompt_logprobs=1, n=2)).sequences()
    assert (first.sampling.prompt_logprobs, second.sampling.prompt_logprobs) == (1, None)
