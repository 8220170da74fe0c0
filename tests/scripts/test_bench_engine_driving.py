"""How the benchmark programs drive an engine and a bare executor, on stand-ins for both."""

import dataclasses
from types import SimpleNamespace

import pytest
from benchlib.engine_runs import greedy_request, run_requests
from benchlib.step_probe import StepProbe
from benchlib.timed_executor import TimedExecutor

from jaxkv.control.executor import ExecutorLimits
from jaxkv.core.clock import MonotonicClock
from jaxkv.core.plan import DecodeRow, StepPlan, StepResult, StepTiming
from jaxkv.core.request import RequestOutput

LIMITS = ExecutorLimits(
    num_blocks=33,
    block_size=16,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_prefill_seqs=2,
    max_model_len=256,
    max_decode_steps=8,
)


@dataclasses.dataclass
class Handle:
    step_id: int
    ended: bool = False

    @property
    def parts(self):
        return [(SimpleNamespace(packed=SimpleNamespace(is_ready=lambda: self.ended)), [])]

    def result(self):
        self.ended = True
        return StepResult(self.step_id, (), StepTiming(0.0, 0.0))


class Recorder:
    """An executor that keeps the plans."""

    limits = LIMITS

    def __init__(self):
        self.plans = []

    def submit(self, plan):
        self.plans.append(plan)
        return Handle(plan.step_id)


def test_probe_decodes_rows_that_stand_at_the_context():
    executor = Recorder()
    seconds = StepProbe(executor).decode_seconds(rows=3, context_len=60, num_steps=2, repeats=4)
    assert len(seconds) == 4 and min(seconds) > 0
    admit, *rest = executor.plans
    assert [plan.step_id for plan in executor.plans] == list(range(len(executor.plans)))
    # 60 in cache, one that is computed, five calls of two steps: 71 tokens in five blocks of its own each.
    tables = [update.blocks for update in admit.updates]
    assert [len(table) for table in tables] == [5, 5, 5]
    assert len({block for table in tables for block in table} - {0}) == 15
    prefills = [chunk for plan in rest for chunk in plan.prefill]
    assert [(chunk.row, chunk.start, chunk.is_last) for chunk in prefills] == [(row, 60, True) for row in range(3)]
    assert max(len(plan.prefill) for plan in rest) <= LIMITS.max_prefill_seqs
    decodes = [plan for plan in rest if plan.decode]
    assert [(len(plan.decode), plan.num_steps) for plan in decodes] == [(3, 2)] * 5


def test_probe_prefills_after_the_context():
    executor = Recorder()
    assert len(StepProbe(executor).prefill_seconds(tokens=32, context_len=100, repeats=2)) == 2
    chunks = [chunk for plan in executor.plans for chunk in plan.prefill]
    assert [(len(chunk.token_ids), chunk.start, chunk.is_last) for chunk in chunks] == [(32, 100, True)] * 3
    assert all(chunk.has_result for chunk in chunks), "there would be nothing to wait for"


def test_probe_knows_what_fits():
    probe = StepProbe(Recorder())
    assert probe.holds(4, 128) and probe.holds(2, 256)
    assert not probe.holds(4, 129) and not probe.holds(5, 16) and not probe.holds(1, 257)
    with pytest.raises(ValueError, match="4 rows of 131 tokens do not fit"):
        probe.decode_seconds(rows=4, context_len=128, repeats=1)


def test_calls_are_noted_with_what_the_host_did_before():
    executor = TimedExecutor(Recorder())
    plans = [StepPlan(i, decode=(DecodeRow("a", 0),), num_steps=4) for i in range(5)]
    first, second = executor.submit(plans[0]), executor.submit(plans[1])
    first.result()
    third = executor.submit(plans[2])
    second.result()
    third.result()
    executor.submit(plans[3]).result()
    executor.submit(plans[4])
    calls = executor.calls
    assert [call.device_was_idle for call in calls] == [True, False, False, True, True]
    assert [call.host_seconds is None for call in calls] == [True, True, False, False, False]
    assert calls[2].read_before == calls[0].read and calls[3].read_before == calls[2].read
    assert 0 <= calls[3].host_cpu_seconds and 0 < calls[3].host_seconds
    steady = executor.steady_calls()
    assert [call for call, _ in steady] == calls[2:4]
    # The third was submitted with the second in flight, between the reads of the first and the second.
    assert [seconds for _, seconds in steady] == [calls[1].read - calls[0].read, calls[3].read - calls[2].read]
    assert all(0 < call.host_seconds < seconds for call, seconds in steady)


class Engine:
    """One token a step for each request."""

    def __init__(self):
        self.clock, self.failed, self.live, self.added = MonotonicClock(), None, {}, []

    def add(self, request):
        self.added.append((request.request_id, self.clock.now()))
        self.live[request.request_id] = request.sampling.max_tokens

    def has_work(self):
        return bool(self.live)

    def step(self):
        outputs = [RequestOutput(request_id, (left,)) for request_id, left in self.live.items()]
        self.live = {request_id: left - 1 for request_id, left in self.live.items() if left > 1}
        return outputs


def test_requests_come_when_their_time_has_come():
    engine = Engine()
    now = engine.clock.now()
    late = greedy_request("late", (1, 2), 2, arrival_time=now + 0.05)
    run = run_requests(engine, [late, greedy_request("a", (1,), 3), greedy_request("b", (1,), 1)])
    assert run.tokens == {"a": (3, 2, 1), "b": (1,), "late": (2, 1)}
    assert [name for name, _ in engine.added] == ["a", "b", "late"]
    assert engine.added[1][1] < now + 0.05 <= engine.added[2][1]
    assert run.seconds >= 0.05 - (engine.added[0][1] - now)
    engine.failed = "out of order"
    with pytest.raises(RuntimeError, match="the engine failed: out of order"):
        run_requests(engine, [])
