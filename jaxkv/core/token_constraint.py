"""What a request's next token may be, as the host works it out token by token.

A mask is bytes with a bit for each token id, the lowest bit of the first byte for id 0; padded with zeros to whole 32-bit
words, as the device reads it.
"""

from collections.abc import Iterable
from typing import Protocol


class ConstraintError(Exception):
    """A constraint cannot go on: the request must end."""


class TokenConstraint(Protocol):
    """The state of one sequence's constraint; `accept` moves it on.

    Attributes:
      is_fixed: the mask is the same before every token.
    """

    is_fixed: bool

    def mask(self) -> bytes:
        """Of the ids that may come next, at least one. Raises ConstraintError."""
        ...

    def accept(self, token_ids: Iterable[int]) -> None:
        """Tokens that came next, each of them allowed. Raises ConstraintError."""
        ...

    def copy(self) -> "TokenConstraint":
        """Another one in the same state."""
        ...


def mask_bytes(vocab_size: int) -> int:
    """Length of a mask."""
    return -(-vocab_size // 32) * 4


def mask_of(token_ids: Iterable[int], vocab_size: int) -> bytes:
    mask = bytearray(mask_bytes(vocab_size))
    for token_id in token_ids:
        mask[token_id >> 3] |= 1 << (token_id & 7)
    return bytes(mask)


def full_mask(vocab_size: int) -> bytes:
    return ((1 << vocab_size) - 1).to_bytes(mask_bytes(vocab_size), "little")


def without(mask: bytes, token_ids: Iterable[int]) -> bytes:
    """`mask` less these ids."""
    left = bytearray(mask)
    for token_id in token_ids:
        left[token_id >> 3] &= ~(1 << (token_id & 7))
    return bytes(left)


def allows(mask: bytes, token_id: int) -> bool:
    return bool(mask[token_id >> 3] >> (token_id & 7) & 1)


def is_empty(mask: bytes) -> bool:
    return mask.count(0) == len(mask)
