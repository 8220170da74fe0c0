"""The masks of live requests: which tokens each may choose next, worked out as soon as its last token is read."""

from collections.abc import Sequence

from jaxkv.core.plan import Masking
from jaxkv.core.token_constraint import TokenConstraint, is_empty, without


class TokenChoice:
    """One request's constraint and its mask for the next token.

    A constraint that changes with the tokens lets a row sample one token a call, and none while one is unread.

    Attributes:
      constraint: after all tokens that were read.
      mask: for the next token. is_told: the row on the device has it.
    """

    def __init__(self, constraint: TokenConstraint, stop_ids: Sequence[int], min_tokens: int, num_generated: int):
        """`constraint` is this request's own from here on. Raises ConstraintError when no token may come at all."""
        self.constraint = constraint
        self.masking = Masking.FIXED if constraint.is_fixed and not min_tokens else Masking.EACH_TOKEN
        self._stop_ids, self._min_tokens = stop_ids, min_tokens
        self._work_out(num_generated)

    def advance(self, token_ids: Sequence[int], num_generated: int) -> None:
        """After tokens that were read; `num_generated` of the request so far. Raises ConstraintError."""
        if self.masking is Masking.EACH_TOKEN:
            self.constraint.accept(token_ids)
            self._work_out(num_generated)

    def _work_out(self, num_generated: int) -> None:
        mask = self.constraint.mask()
        if num_generated < self._min_tokens:
            longer = without(mask, self._stop_ids)
            mask = mask if is_empty(longer) else longer  # what cannot go on ends, whatever min_tokens says
        self.mask, self.is_told = mask, False
