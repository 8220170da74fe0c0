"""An Executor that computes nothing but time: same plans, same kind of results, a cost model instead of a device."""

import dataclasses
import math
import zlib
from collections.abc import Mapping, Sequence

from jaxkv.control.executor import ExecutorLimits
from jaxkv.core.clock import SimulatedClock
from jaxkv.core.plan import Admission, Masking, RowResult, StepPlan, StepResult, StepTiming
from jaxkv.core.request import TokenLogprobs
from jaxkv.core.token_constraint import allows
from jaxkv.core.unseen_tokens import UnseenTokens
from jaxkv.simulation.cost_model import CostModel


@dataclasses.dataclass(slots=True)
class _SimRow:
    """What the device holds of a row.

    Attributes:
      position: of the next token to sample.
      num_emitted: tokens since admission.
      active: the last prefill chunk has run, and the row has neither stopped nor used up its budget.
      mask: what may be chosen; empty for anything.
      is_unseen: nobody knows its prompt, and nobody looks at its tokens: all are 0, and nothing but the budget ends it.
      last_result: of such a row, to be told again where the next one is equal.
    """

    admission: Admission
    position: int = 0
    num_emitted: int = 0
    active: bool = False
    mask: bytes = b""
    is_unseen: bool = False
    last_result: RowResult | None = None


@dataclasses.dataclass(frozen=True)
class _SimHandle:
    clock: SimulatedClock
    step_result: StepResult

    def result(self) -> StepResult:
        """Waiting moves the clock to the step's end."""
        self.clock.advance_to(max(self.clock.now(), self.step_result.timing.finished))
        return self.step_result


class SimExecutor:
    """Pretends to be a device that runs one step after another, each for as long as the cost model says.

    Tokens are a deterministic function of the row's seed and the token's position, so a request gets the same ones
    whatever its batch, chunking, C or preemption; rows stop at stop ids and budgets exactly as a device's would.
    Penalties and logit_bias change nothing.

    Attributes:
      busy_seconds: time of all submitted steps.
    """

    def __init__(
        self,
        limits: ExecutorLimits,
        cost_model: CostModel,
        clock: SimulatedClock,
        *,
        vocab_size: int = 32_000,
        sequences: Mapping[str, Sequence[int]] | None = None,
    ):
        """`sequences`: prompt and output of requests by id: these produce the tokens that they are known to."""
        self.limits = limits
        self.cost_model = cost_model
        self.clock = clock
        self.vocab_size = vocab_size
        self._rows: dict[int, _SimRow] = {}
        self._busy_until = clock.now()
        self._sequences = sequences or {}
        self.busy_seconds = 0.0

    def submit(self, plan: StepPlan) -> _SimHandle:
        for update in plan.updates:
            if update.admission is not None:
                self._rows[update.row] = _SimRow(update.admission)
        for row, mask in plan.token_masks:
            self._rows[row].mask = mask
        results = []
        for chunk in plan.prefill:
            row, result = self._rows[chunk.row], RowResult(chunk.request_id, ())
            if chunk.is_last:
                row.is_unseen = isinstance(chunk.token_ids, UnseenTokens) and not row.admission.stop_ids
                row.position = chunk.start + len(chunk.token_ids)
                row.active = True
                run = _run_unseen_row if row.is_unseen else self._run_row
                result = run(chunk.request_id, row, 1)
            if chunk.has_result:
                results.append(result._replace(prompt_logprobs=tuple(map(self._logprobs, chunk.targets))))
        rows, num_steps = self._rows, plan.num_steps
        decoded = [
            _run_unseen_row(entry.request_id, row, num_steps)
            if (row := rows[entry.row]).is_unseen
            else self._run_row(entry.request_id, row, num_steps)
            for entry in plan.decode
        ]
        results += decoded
        # The device leaves its loop as soon as no row is active.
        num_steps = max([len(result.token_ids) for result in decoded], default=0)
        submitted = self.clock.now()
        started = max(submitted, self._busy_until)
        shape = dataclasses.replace(plan.shape(), num_steps=num_steps)
        seconds = self.cost_model.seconds(shape)
        self.busy_seconds += seconds
        self._busy_until = started + seconds
        timing = StepTiming(submitted=submitted, finished=self._busy_until)
        return _SimHandle(self.clock, StepResult(plan.step_id, tuple(results), timing))

    def _run_row(self, request_id: str, row: _SimRow, num_steps: int) -> RowResult:
        """Sample up to num_steps tokens; none if the row is inactive."""
        tokens = []
        num_steps = 1 if row.admission.masking is Masking.EACH_TOKEN else num_steps
        stopped = exhausted = False
        while row.active and len(tokens) < num_steps:
            token = self._sample(request_id, row)
            tokens.append(token)
            row.position += 1
            row.num_emitted += 1
            stopped = token in row.admission.stop_ids
            exhausted = row.num_emitted == row.admission.max_new_tokens
            row.active = not (stopped or exhausted)
        return RowResult(request_id, tuple(tokens), stopped=stopped, exhausted=exhausted)

    def _logprobs(self, token: int) -> TokenLogprobs:
        """Of a model that knows nothing: all tokens are alike."""
        return TokenLogprobs(token, -math.log(self.vocab_size), rank=1)

    def _sample(self, request_id: str, row: _SimRow) -> int:
        known = self._sequences.get(request_id, ())
        if row.position < len(known):
            return known[row.position]
        token = zlib.crc32(b"%d:%d" % (row.admission.sampling.seed, row.position)) % self.vocab_size
        if row.num_emitted < row.admission.min_new_tokens:
            while token in row.admission.stop_ids:
                token = (token + 1) % self.vocab_size
        while row.mask and not allows(row.mask, token):
            token = (token + 1) % self.vocab_size
        return token


def _run_unseen_row(request_id: str, row: _SimRow, num_steps: int) -> RowResult:
    left = row.admission.max_new_tokens - row.num_emitted
    if num_steps >= left:
        row.num_emitted += left
        return RowResult(request_id, (0,) * left, exhausted=left > 0)
    row.num_emitted += num_steps
    result = row.last_result
    if result is None or len(result.token_ids) != num_steps:
        result = row.last_result = RowResult(request_id, (0,) * num_steps)
    return result
