"""The protocol between the control plane and whatever computes: the JAX executor, or a simulated one."""

import dataclasses
from typing import Protocol

from jaxkv.core.plan import StepPlan, StepResult


@dataclasses.dataclass(frozen=True)
class ExecutorLimits:
    """What the scheduler must respect; fixed at start.

    Attributes:
      num_blocks: blocks in the pool, the null block 0 included.
      max_num_seqs: rows, S.
      max_num_batched_tokens: most prefill tokens a step.
      max_prefill_seqs: most chunks a step, R.
      max_model_len: most tokens a row; its table has ceil(max_model_len / block_size) columns, M.
      max_decode_steps: largest C.
      max_stop_ids: most ids that end a row, W.
      max_prefix_groups: most groups of rows that a plan may name; 0: no cascade.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_seqs: int
    max_model_len: int
    max_decode_steps: int
    max_stop_ids: int = 80
    max_prefix_groups: int = 0


class StepHandle(Protocol):
    def result(self) -> StepResult:
        """Wait for the step and return what it produced. Raises if the executor failed, which is fatal for it."""
        ...


class Executor(Protocol):
    """Computes plans.

    A row decodes in a step only if `plan.decode` names it: a row left out keeps its state, active or not, because its
    request may have been preempted or aborted without the device hearing of it. A named row that is already inactive
    (it stopped in a step that the host had not read yet) emits nothing and writes to no block but the null block.
    """

    limits: ExecutorLimits

    def submit(self, plan: StepPlan) -> StepHandle:
        """Enqueue a step; returns at once. Steps run in submission order."""
        ...
