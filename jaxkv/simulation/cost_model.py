"""How long a step takes, from nothing but its shape."""

import dataclasses
from typing import Protocol

from jaxkv.core.plan import PlanShape


class CostModel(Protocol):
    def seconds(self, shape: PlanShape) -> float:
        """Time of one step. `shape.num_steps` is the number of decode steps that really ran."""
        ...


@dataclasses.dataclass(frozen=True)
class ConstantCostModel:
    """A fixed price for each call, prefill or copied token, decode step, and row in a decode step; context is free.

    The defaults are round numbers of the order of a 1B model on one GPU, for tests and for comparing policies: they
    predict no machine.
    """

    call_seconds: float = 0.0005
    prefill_token_seconds: float = 0.00002
    decode_step_seconds: float = 0.004
    decode_row_seconds: float = 0.00001
    copied_token_seconds: float = 0.00000005

    def seconds(self, shape: PlanShape) -> float:
        step = self.decode_step_seconds + shape.decode_rows * self.decode_row_seconds
        tokens = shape.prefill_tokens * self.prefill_token_seconds + shape.copied_tokens * self.copied_token_seconds
        return self.call_seconds + tokens + shape.num_steps * step
