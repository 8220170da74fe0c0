"""JaxExecutor: runs StepPlans on the device. It owns the only references to the cache and the decode state."""

import dataclasses

import jax

from jaxkv.control.executor import ExecutorLimits
from jaxkv.core.clock import Clock
from jaxkv.core.plan import Admission, PrefillChunk, StepPlan, StepResult, StepTiming
from jaxkv.core.request import SamplingParams
from jaxkv.execution import compile_watch
from jaxkv.execution.logit_adjustments import pack_adjustments
from jaxkv.execution.programs import Programs, ProgramShapes
from jaxkv.execution.step_output import Owner, StepOutput, read_rows


@dataclasses.dataclass
class JaxStepHandle:
    """A step that runs or has run. `parts` pairs each device output with the owners of its rows; a None entry is a row
    that tells nothing (a chunk that neither ends its prompt nor has targets)."""

    step_id: int
    parts: list[tuple[StepOutput, list[Owner | None]]]
    clock: Clock
    submitted: float
    num_compiled: int = 0

    def result(self) -> StepResult:
        # A chunk that ends nothing has nothing to read, but must have run: or all chunks of a long prompt would be
        # enqueued at once, and newcomers wait behind them.
        jax.block_until_ready([output for output, _ in self.parts])
        rows = []
        for output, owners in self.parts:
            rows += read_rows(output, owners)
        return StepResult(self.step_id, tuple(rows), StepTiming(self.submitted, self.clock.now()), self.num_compiled)


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
        self._sampling_of_row: dict[int, SamplingParams] = {}
        self._fail_on_recompile = fail_on_recompile

    @property
    def shapes(self) -> ProgramShapes:
        """What the step functions were compiled for, their buckets above all."""
        return self._programs.shapes

    def submit(self, plan: StepPlan) -> JaxStepHandle:
        compiled = compile_watch.compiled_here()
        handle = self._submit(plan)
        handle.num_compiled = compile_watch.compiled_here() - compiled
        if self._fail_on_recompile and handle.num_compiled:
            raise RuntimeError(
                f"step {plan.step_id} compiled {handle.num_compiled} executables after the warm-up "
                f"(fail_on_recompile is set); its shape: {plan.shape()}"
            )
        return handle

    def _submit(self, plan: StepPlan) -> JaxStepHandle:
        programs = self._programs
        submitted = self._clock.now()
        parts = []
        for copies in programs.pack_copies(plan.block_copies) if plan.block_copies else ():
            self._cache = programs.copy_blocks(self._cache, *copies)
        if plan.updates:
            for batch in programs.pack_updates(plan.updates):
                self._state = programs.apply_updates(self._state, batch)
            for update in plan.updates:
                if update.admission is not None:
                    self._admit(update.row, update.admission)
        if plan.token_masks:
            for masks in programs.pack_masks(plan.token_masks):
                self._state = programs.apply_masks(self._state, masks)
        if plan.prefill:
            self._cache, self._state, output = programs.run_prefill(
                self._weights, self._cache, self._state, plan.prefill
            )
            parts.append((output, self._chunk_owners(plan.prefill)))
        if plan.decode:
            self._cache, self._state, output = programs.run_decode(self._weights, self._cache, self._state, plan)
            parts.append((output, [Owner(d.request_id, self._sampling_of_row[d.row].logprobs) for d in plan.decode]))
        return JaxStepHandle(plan.step_id, parts, self._clock, submitted)

    def _admit(self, row: int, admission: Admission) -> None:
        self._sampling_of_row[row] = admission.sampling
        for part in pack_adjustments(row, admission):
            self._state = self._programs.apply_adjustments(self._state, part)

    def _chunk_owners(self, chunks: tuple[PrefillChunk, ...]) -> list[Owner | None]:
        owners, start = [], 0
        for chunk in chunks:
            sampling, owner = self._sampling_of_row[chunk.row], None
            if chunk.has_result:
                first = start + chunk.first_target
                owner = Owner(chunk.request_id, sampling.logprobs, chunk.targets, first, sampling.prompt_logprobs or 0)
            owners.append(owner)
            start += len(chunk.token_ids)
        return owners
