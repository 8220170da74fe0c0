"""Tokens of which nothing but their number is known: what a trace with lengths and block hashes tells of a prompt."""

import itertools
from collections.abc import Iterator, Sequence


class UnseenTokens(Sequence[int]):
    """So many tokens, in constant memory. One that is read is 0; what is appended is counted and forgotten."""

    __slots__ = ("_count",)

    def __init__(self, count: int):
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: int | slice) -> "int | UnseenTokens":
        if isinstance(place, slice):
            return UnseenTokens(len(range(self._count)[place]))
        range(self._count)[place]  # raises IndexError as a list would
        return 0

    def __iter__(self) -> Iterator[int]:
        return itertools.repeat(0, self._count)

    def __iadd__(self, more: Sequence[int]) -> "UnseenTokens":
        self._count += len(more)
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnseenTokens) and self._count == other._count

    __hash__ = None

    def __repr__(self) -> str:
        return f"UnseenTokens({self._count})"

    def copy(self) -> "UnseenTokens":
        return UnseenTokens(self._count)
