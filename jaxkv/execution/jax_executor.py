"""JaxExecutor: runs StepPlans on the device. It owns the only references to the cache and the decode state."""

import dataclasses

import jax
import numpy as np

from jaxkv.control.executor import ExecutorLimits
from jaxkv.core.clock import Clock
from jaxkv.core.plan import StepPlan, StepResult, StepTiming
from jaxkv.execution import compile_watch
from jaxkv.execution.programs import Programs, bucket_for
from jaxkv.execution.step_output import StepOutput, read_rows


@dataclasses.dataclass
class JaxStepHandle:
    """A step that runs or has run. `parts` pairs each device output with the (request id, logprobs wanted) of its rows;
    a None entry is a row that emits nothing (a chunk that does not end its prompt)."""

    step_id: int
    parts: list[tuple[StepOutput, list[tuple[str, int | None] | None]]]
    clock: Clock
    submitted: float

    def result(self) -> StepResult:
        rows = []
        for output, owners in self.parts:
            packed = np.asarray(output.packed)
            wants_logprobs = any(owner is not None and owner[1] is not None for owner in owners)
            logprobs = jax.device_get(output.logprobs) if wants_logprobs else None
            ids = [owner[0] if owner else "" for owner in owners]
            tops = [owner[1] if owner else None for owner in owners]
            results = read_rows(packed, ids, logprobs, tops)
            rows += [result for result, owner in zip(results, owners, strict=True) if owner]
        return StepResult(self.step_id, tuple(rows), StepTiming(self.submitted, self.clock.now()))


class JaxExecutor:
    """Implements control.executor.Executor. Calls are enqueued and return at once; JAX runs them in order, because each
    takes the cache that the one before gives back. An exception in a call is fatal: the donated cache is gone."""

    def __init__(
        self, programs: Programs, weights: tuple[jax.Array, ...], clock: Clock, *, fail_on_recompile: bool = False
    ):
        """`fail_on_recompile`: a step that makes JAX compile anything raises."""
        shapes = programs.shapes
        self.limits: ExecutorLimits = shapes.limits
        self._programs = programs
        self._weights = weights
        self._clock = clock
        self._cache = shapes.empty_cache()
        self._state = shapes.empty_state()
        self._logprobs_of_row: dict[int, int | None] = {}
        self._fail_on_recompile = fail_on_recompile

    def submit(self, plan: StepPlan) -> JaxStepHandle:
        compiled = compile_watch.compiled_here()
        handle = self._submit(plan)
        if self._fail_on_recompile and compile_watch.compiled_here() != compiled:
            raise RuntimeError(
                f"step {plan.step_id} compiled {compile_watch.compiled_here() - compiled} executables after the warm-up "
                f"(fail_on_recompile is set); its shape: {plan.shape()}"
            )
        return handle

    def _submit(self, plan: StepPlan) -> JaxStepHandle:
        programs, shapes = self._programs, self._programs.shapes
        submitted = self._clock.now()
        parts = []
        for copies in programs.pack_copies(plan.block_copies) if plan.block_copies else ():
            self._cache = programs.copy_blocks(self._cache, *copies)
        if plan.updates:
            self._note_owners(plan)
            for batch in programs.pack_updates(plan.updates):
                self._state = programs.apply_updates(self._state, batch)
        if plan.prefill:
            bucket = bucket_for(shapes.prefill_buckets, sum(len(chunk.token_ids) for chunk in plan.prefill))
            batch = programs.pack_prefill(plan.prefill, bucket)
            self._cache, self._state, output = programs.prefill[bucket](self._weights, self._cache, self._state, batch)
            owners = [(c.request_id, self._logprobs_of_row[c.row]) if c.is_last else None for c in plan.prefill]
            parts.append((output, owners))
        if plan.decode:
            bucket = bucket_for(shapes.decode_buckets, len(plan.decode))
            rows = np.full((bucket,), self.limits.max_num_seqs, np.int32)
            rows[: len(plan.decode)] = [d.row for d in plan.decode]
            self._cache, self._state, output = programs.decode[bucket](
                self._weights, self._cache, self._state, rows, np.int32(plan.num_steps)
            )
            parts.append((output, [(d.request_id, self._logprobs_of_row[d.row]) for d in plan.decode]))
        return JaxStepHandle(plan.step_id, parts, self._clock, submitted)

    def _note_owners(self, plan: StepPlan) -> None:
        for update in plan.updates:
            if update.admission is not None:
                self._logprobs_of_row[update.row] = update.admission.sampling.logprobs
