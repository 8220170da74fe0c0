"""The loop around the scheduler: pipelining, ends, failure. The executor is simulated."""

import dataclasses

import pytest

from jaxkv.control.engine import Engine
from jaxkv.control.executor import ExecutorLimits
from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.clock import SimulatedClock
from jaxkv.core.errors import RequestError
from jaxkv.core.request import FinishReason, Request, SamplingParams
from jaxkv.simulation.cost_model import ConstantCostModel
from jaxkv.simulation.sim_executor import SimExecutor

LIMITS = ExecutorLimits(
    num_blocks=65,
    block_size=4,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    max_prefill_seqs=4,
    max_model_len=64,
    max_decode_steps=4,
    max_stop_ids=2000,
)


class RecordingExecutor(SimExecutor):
    """Notes the order of submits and reads, and fails when told to."""

    def __init__(self, clock):
        super().__init__(LIMITS, ConstantCostModel(), clock)
        self.events = []
        self.fail_submit = self.fail_result = self.lose_rows = None

    def submit(self, plan):
        if self.fail_submit == plan.step_id:
            raise MemoryError("no memory for the step")
        self.events.append(f"submit {plan.step_id}")
        return RecordingHandle(self, super().submit(plan))


@dataclasses.dataclass
class RecordingHandle:
    executor: RecordingExecutor
    handle: object

    def result(self):
        result = self.handle.result()
        if self.executor.fail_result == result.step_id:
            raise RuntimeError("the device is lost")
        self.executor.events.append(f"read {result.step_id}")
        return dataclasses.replace(result, rows=()) if self.executor.lose_rows == result.step_id else result


def make(config=SchedulerConfig(), **options):
    clock = SimulatedClock()
    return Engine(RecordingExecutor(clock), config, clock=clock, **options)


def request(request_id, prompt_len=5, max_tokens=12, **sampling):
    return Request(request_id, tuple(range(prompt_len)), SamplingParams(max_tokens=max_tokens, **sampling))


def run(engine, limit=100):
    """All news until nothing is left, by request."""
    news = {}
    for _ in range(limit):
        if not engine.has_work():
            return news
        for output in engine.step():
            news.setdefault(output.request_id, []).append(output)
    raise AssertionError("the engine did not come to an end")


def tokens(outputs):
    return sum((output.token_ids for output in outputs), ())


def test_generates_what_was_asked_and_ends_once():
    engine = make()
    engine.add(request("a", seed=1))
    engine.add(request("b", max_tokens=3, seed=1))
    news = run(engine)
    assert {name: len(tokens(outputs)) for name, outputs in news.items()} == {"a": 12, "b": 3}
    for outputs in news.values():
        assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
        assert outputs[-1].finish_reason is FinishReason.LENGTH
        assert outputs[-1].num_prompt_tokens == 5
    assert tokens(news["a"])[:3] == tokens(news["b"])  # same prompt, same seed
    assert engine.stats.num_finished == {FinishReason.LENGTH: 2} and engine.kv_cache_usage == 0
    assert engine.step() == [] and not engine.has_work()


def test_the_next_step_is_submitted_before_the_last_is_read():
    engine = make()
    engine.add(request("a"))
    run(engine)
    assert engine.executor.events[:5] == ["submit 0", "submit 1", "read 0", "submit 2", "read 1"]
    engine = make(max_in_flight=1)
    engine.add(request("a"))
    run(engine)
    assert engine.executor.events[:4] == ["submit 0", "read 0", "submit 1", "read 1"]
    with pytest.raises(ValueError, match="max_in_flight=0"):
        make(max_in_flight=0)


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_outputs_do_not_depend_on_steps_in_flight(max_in_flight):
    def generate(depth):
        engine = make(SchedulerConfig(eos_token_ids=tuple(range(1500))), max_in_flight=depth)
        for number in range(9):
            engine.add(request(str(number), prompt_len=3 + number, max_tokens=20))
        return {name: (tokens(outputs), outputs[-1].finish_reason) for name, outputs in run(engine).items()}

    assert generate(max_in_flight) == generate(1)
    assert {reason for _, reason in generate(1).values()} == {FinishReason.STOP, FinishReason.LENGTH}


def test_stop_id_ends_a_request_and_is_reported():
    engine = make()
    engine.add(request("probe", seed=3, max_tokens=6))
    third = tokens(run(engine)["probe"])[2]
    engine.add(request("a", seed=3, stop_token_ids=(third,)))
    outputs = run(engine)["a"]
    assert tokens(outputs)[-1] == third and len(tokens(outputs)) == 3
    assert (outputs[-1].finish_reason, outputs[-1].stop_token_id) == (FinishReason.STOP, third)


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_abort_and_finish_end_a_request_in_the_next_news(steps):
    for end, reason in ((Engine.abort, FinishReason.ABORT), (Engine.finish, FinishReason.STOP)):
        engine = make()
        engine.add(request("a"))
        engine.add(request("b"))
        for _ in range(steps):
            engine.step()
        assert end(engine, "a")
        assert not end(engine, "a") and not end(engine, "unknown")
        assert engine.has_work()
        news = run(engine)
        assert [(output.token_ids, output.finish_reason) for output in news["a"]] == [((), reason)]
        assert news["b"][-1].finish_reason is FinishReason.LENGTH
        assert engine.scheduler.blocks.num_free == 64


def test_steps_in_flight_are_read_after_their_requests_are_gone():
    engine = make()
    engine.add(request("a"))
    engine.step()
    engine.abort("a")
    news = run(engine)
    assert [output.finish_reason for output in news["a"]] == [FinishReason.ABORT]
    assert engine.executor.events.count("read 1") == 1
    engine.add(request("a"))
    assert len(tokens(run(engine)["a"])) == 12


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("fail_submit", "MemoryError: no memory for the step"),
        ("fail_result", "RuntimeError: the device is lost"),
        ("lose_rows", "RuntimeError: Expected 4 rows from step 2, got 0"),
    ],
)
def test_failure_ends_every_request_and_refuses_new_ones(where, message):
    engine = make()
    setattr(engine.executor, where, 2)
    for name in "abcdef":  # four rows: e and f still wait
        engine.add(request(name, max_tokens=30))
    news = run(engine)
    assert sorted(news) == list("abcdef")
    for outputs in news.values():
        assert (outputs[-1].finish_reason, outputs[-1].error) == (FinishReason.ERROR, message)
    assert engine.failed == message and not engine.has_work() and engine.step() == []
    assert engine.stats.num_finished == {FinishReason.ERROR: 6}
    with pytest.raises(RequestError, match="has failed") as caught:
        engine.add(request("g"))
    assert caught.value.status == 503


def test_news_gathered_before_a_failure_is_not_lost():
    engine = make()
    engine.executor.fail_submit = 0
    engine.add(request("a"))
    engine.add(request("b"))
    engine.abort("a")
    assert [(output.request_id, output.finish_reason) for output in engine.step()] == [
        ("a", FinishReason.ABORT),
        ("b", FinishReason.ERROR),
    ]


def test_idle_engine_with_one_request_runs_the_largest_number_of_steps():
    engine = make()
    engine.add(request("a", max_tokens=33))
    run(engine)
    assert engine.stats.loop_steps == {4: 8}
    engine = make(SchedulerConfig(decode_steps=2))
    engine.add(request("a", max_tokens=33))
    run(engine)
    assert engine.stats.loop_steps == {2: 16}


def test_refused_requests_leave_no_trace():
    engine = make()
    engine.add(request("a"))
    for wrong in (request("a"), request("b", prompt_len=64), request("c", prompt_len=0)):
        with pytest.raises(RequestError):
            engine.add(wrong)
    assert sorted(run(engine)) == ["a"] and engine.stats.num_requests == 1


def test_gauges():
    engine = make()
    for number in range(6):
        engine.add(request(str(number), prompt_len=5, max_tokens=30))
    engine.step()
    assert (engine.num_running, engine.num_waiting) == (4, 2)
    assert engine.kv_cache_usage == pytest.approx(1 - engine.scheduler.blocks.num_free / 64)
    assert 0 < engine.kv_cache_usage < 1
