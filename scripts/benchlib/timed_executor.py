"""An executor that notes when each call was submitted and read, so that the host's share of a step can be told."""

import dataclasses
import time
from typing import TYPE_CHECKING

from jaxkv.control.executor import Executor, ExecutorLimits
from jaxkv.core.plan import StepPlan, StepResult

if TYPE_CHECKING:
    from jaxkv.execution.jax_executor import JaxStepHandle  # brings jax


@dataclasses.dataclass
class Call:
    """One submitted plan; seconds of time.perf_counter, those of `_cpu` of the host thread's own CPU time.

    Attributes:
      read_before: when the latest result before this call was on the host; None for the first calls.
      submitted: when `submit` returned. From read_before to here the host works: update, schedule, pack, dispatch.
      device_was_idle: whether the call before had already ended when this one was in the queue.
      read: when this call's own result was on the host.
    """

    num_steps: int
    decode_rows: int
    prefill_tokens: int
    read_before: float | None
    read_before_cpu: float | None
    submitted: float
    submitted_cpu: float
    device_was_idle: bool
    read: float | None = None

    @property
    def host_seconds(self) -> float | None:
        """Wall time of the host between the latest results and this call; None for the first calls."""
        return None if self.read_before is None else self.submitted - self.read_before

    @property
    def host_cpu_seconds(self) -> float | None:
        """CPU time of the same: less than `host_seconds` where others had the core, XLA's threads too."""
        return None if self.read_before_cpu is None else self.submitted_cpu - self.read_before_cpu


class TimedExecutor:
    """Around another executor; `calls` holds every call since the start, in order."""

    def __init__(self, executor: Executor):
        self.limits: ExecutorLimits = executor.limits
        self.calls: list[Call] = []
        self._executor = executor
        self._last: JaxStepHandle | None = None
        self._read: tuple[float, float] | None = None

    def submit(self, plan: StepPlan) -> "TimedHandle":
        handle = self._executor.submit(plan)
        now, now_cpu = time.perf_counter(), time.thread_time()
        before, before_cpu = self._read or (None, None)
        idle = self._last is None or _has_ended(self._last)
        prefill_tokens = sum(len(chunk.token_ids) for chunk in plan.prefill)
        call = Call(
            plan.num_steps, len(plan.decode), prefill_tokens, before, before_cpu, now, now_cpu, device_was_idle=idle
        )
        self.calls.append(call)
        self._last = handle
        return TimedHandle(self, handle, call)

    def note_read(self, call: Call) -> None:
        call.read = time.perf_counter()
        self._read = (call.read, time.thread_time())

    def steady_calls(self) -> list[tuple[Call, float]]:
        """Decode-only calls between two like them, each with the seconds between the two reads that it was submitted
        between: its host time lies within them, with one call in flight or two."""
        steady = []
        for before, call, after in zip(self.calls, self.calls[1:], self.calls[2:], strict=False):
            shapes = {(c.num_steps, c.decode_rows, c.prefill_tokens) for c in (before, call, after)}
            if len(shapes) == 1 and call.num_steps and call.host_seconds is not None:
                next_read = before.read if before.read > call.submitted else call.read
                steady.append((call, next_read - call.read_before))
        return steady


class TimedHandle:
    def __init__(self, executor: TimedExecutor, handle: "JaxStepHandle", call: Call):
        self._executor, self._handle, self._call = executor, handle, call

    def result(self) -> StepResult:
        result = self._handle.result()
        self._executor.note_read(self._call)
        return result


def _has_ended(handle: "JaxStepHandle") -> bool:
    return all(output.packed.is_ready() for output, _ in handle.parts)
