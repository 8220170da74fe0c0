"""What every attention operation can be asked for beside its arrays."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """Static options of an attention call.

    Attributes:
      scale: multiplies the logits.
      window: sliding window in tokens: a query sees itself and the window - 1 tokens before it; None: all of them.
      soft_cap: logits x become soft_cap * tanh(x / soft_cap); None: they stay.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None

    def __post_init__(self):
        if self.window is not None and self.window < 1:
            raise ValueError(f"Expected a window of at least 1 token, got {self.window=}")
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ValueError(f"Expected a positive soft cap, got {self.soft_cap=}")
