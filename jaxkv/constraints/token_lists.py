"""Constraints that are lists of tokens: the only ones allowed, and sequences that must not come."""

from collections.abc import Iterable, Sequence

from jaxkv.core.token_constraint import ConstraintError, full_mask, is_empty, mask_of, without


class TokenLists:
    """A `TokenConstraint`: no id but `allowed` (None: any), and none that would complete one of the `bad` sequences."""

    def __init__(self, allowed: Iterable[int] | None, bad: Iterable[Sequence[int]], vocab_size: int):
        mask = full_mask(vocab_size) if allowed is None else mask_of(allowed, vocab_size)
        bad = {tuple(sequence) for sequence in bad}
        self._mask = without(mask, [sequence[0] for sequence in bad if len(sequence) == 1])
        self._bad = [(sequence[:-1], sequence[-1]) for sequence in bad if len(sequence) > 1]
        self._longest = max((len(head) for head, _ in self._bad), default=0)
        self._recent: tuple[int, ...] = ()
        """As much of the output as a head can be long."""
        self.is_fixed = not self._bad

    def mask(self) -> bytes:
        mask = without(self._mask, [last for head, last in self._bad if self._recent[-len(head) :] == head])
        if is_empty(mask):
            raise ConstraintError("bad_words forbid all that allowed_token_ids leave")
        return mask

    def accept(self, token_ids: Iterable[int]) -> None:
        if self._longest:
            self._recent = (*self._recent, *token_ids)[-self._longest :]

    def copy(self) -> "TokenLists":
        other = object.__new__(TokenLists)
        other.__dict__.update(self.__dict__)  # nothing in it is ever changed in place
        return other
