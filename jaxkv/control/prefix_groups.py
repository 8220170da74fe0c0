"""Which decode rows share the first blocks of their tables, and which of them had better attend to them together.

Attention reads a shared block once for each row, or once for a group of rows and then merges the parts. One level: a
row is in one group at most, and its group's prefix is what all of its rows share.
"""

import bisect
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxkv.control.cascade_cost import CascadeCost
from jaxkv.control.request_state import RequestState
from jaxkv.core.plan import PrefixGroup


class Choice(NamedTuple):
    """`rows` is what was given, reordered: the groups' members come first, group after group."""

    rows: list[RequestState]
    groups: tuple[PrefixGroup, ...]


class PrefixGroups:
    """Finds the groups among running requests.

    All of them are kept in the order of their block ids, with the number of blocks that each shares with the one
    before: requests with a common prefix are neighbours. A request's place is looked for once, when it is admitted;
    blocks that it gets later are its own. (Once such a block is full, a newcomer may share it. Should its owner's next
    block stand in the wrong order to the newcomer's, a longer prefix can be overlooked, but never one be made up.)
    """

    def __init__(self, cost: CascadeCost | None, *, block_size: int, max_groups: int):
        """Without a `cost`, or with no room for groups, there are none, at no cost."""
        self._cost = cost
        self._block_size = block_size
        self._max_groups = max_groups if cost is not None else 0
        self._running: list[RequestState] = []
        self._shared: list[int] = []  # leading blocks in common with the one before; 0 for the first
        self._choice = Choice([], ())
        self._chosen_for: list[RequestState] | None = None

    def add(self, state: RequestState) -> None:
        """A request was admitted: it has the blocks of all its known tokens."""
        if not self._max_groups:
            return
        place = bisect.bisect_left(self._running, state.blocks, key=lambda other: other.blocks)
        self._running.insert(place, state)
        self._shared.insert(place, 0)
        for i in (place, place + 1):
            if 0 < i < len(self._running):
                self._shared[i] = _num_common(self._running[i - 1].blocks, self._running[i].blocks)
        self._chosen_for = None

    def remove(self, state: RequestState) -> None:
        """A request gives its blocks back."""
        if not self._max_groups:
            return
        place = self._running.index(state)
        del self._running[place]
        shared = self._shared.pop(place)
        if place < len(self._shared):
            self._shared[place] = min(self._shared[place], shared)
        self._chosen_for = None

    def choose(self, decoding: list[RequestState]) -> Choice:
        """The groups of these running requests that save most. O(rows) when a request came or went since the last call
        or others decode; otherwise the last choice once more."""
        if not self._max_groups or not decoding:
            return Choice(decoding, ())
        if self._chosen_for != decoding:
            self._choice = self._choose(decoding)
            self._chosen_for = decoding.copy()
        return self._choice

    def _choose(self, decoding: list[RequestState]) -> Choice:
        wanted = set(decoding)
        rows: list[RequestState] = []
        shared: list[int] = []
        least = 0  # shared by the last of `rows` and all that came after it
        for state, count in zip(self._running, self._shared, strict=True):
            least = count if count < least else least
            if state in wanted:
                rows.append(state)
                shared.append(least)
                least = len(state.blocks)
        found = best_groups(shared, lambda count, blocks: self._cost.saved(count, blocks * self._block_size))
        found = sorted(found, key=lambda group: -group.saved)[: self._max_groups]
        if sum([group.saved for group in found]) <= self._cost.call:
            return Choice(decoding, ())
        members = [rows[i] for group in found for i in range(group.first, group.end)]
        others = wanted.difference(members)
        return Choice(
            members + [state for state in decoding if state in others],
            tuple([PrefixGroup(group.end - group.first, group.num_blocks) for group in found]),
        )

    def check(self, running: Sequence[RequestState]) -> None:
        """Assert that the books are right. For tests: O(blocks)."""
        if not self._max_groups:
            return
        assert {id(state) for state in self._running} == {id(state) for state in running}
        assert len(self._running) == len(self._shared) == len(running) and self._shared[:1] in ([], [0])
        for before, state, count in zip(self._running, self._running[1:], self._shared[1:], strict=False):
            assert before.blocks[:count] == state.blocks[:count], "rows are said to share what they do not"


class Span(NamedTuple):
    """Rows first to end - 1 share `num_blocks` blocks, which saves so much."""

    first: int
    end: int
    num_blocks: int
    saved: float


def best_groups(shared: Sequence[int], saved: Callable[[int, int], float]) -> list[Span]:
    """The spans that save most together, none overlapping another, of those that are nodes of the rows' trie.

    `shared[i]` blocks are common to rows i - 1 and i (that of row 0 is not read). A node is all rows i to j that have a
    prefix in common, the least of shared[i + 1 .. j]. From the leaves up, it is either one group or what is best in its
    children; what its children leave over stays alone, although it shares the node's prefix.

    Args:
      saved: of a number of rows and of blocks; 0 or less where a group is not worth it.
    """
    open_nodes: list[tuple[int, int, list[Span]]] = []  # (blocks, first row, the best of the children that are closed)
    for row in range(1, len(shared) + 1):
        blocks, first, best = (shared[row] if row < len(shared) else 0), row - 1, []
        while open_nodes and open_nodes[-1][0] > blocks:
            inner_blocks, first, children = open_nodes.pop()
            children += best
            whole = saved(row - first, inner_blocks)
            is_best = whole > 0 and whole >= sum([span.saved for span in children])
            best = [Span(first, row, inner_blocks, whole)] if is_best else children
        if open_nodes and open_nodes[-1][0] == blocks:
            open_nodes[-1][2].extend(best)
        else:
            open_nodes.append((blocks, first, best))
    return open_nodes[0][2] if open_nodes else []


def _num_common(a: list[int], b: list[int]) -> int:
    """How many leading entries are equal: O(log n) comparisons of slices, which cost a nanosecond an entry."""
    least, most = 0, min(len(a), len(b))
    while least < most:
        middle = (least + most + 1) // 2
        if a[least:middle] == b[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least
