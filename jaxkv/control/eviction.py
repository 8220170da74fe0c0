"""Which cached block to give up first. A policy sees only blocks that nobody uses and the prefix index can find."""

import collections
from typing import Protocol


class EvictionPolicy(Protocol):
    """Order among evictable blocks. Every call is O(1) or O(log n): pools hold 100,000 blocks and more."""

    def add(self, block: int) -> None:
        """The last user let go of a findable block. Of one request's blocks the tail comes first."""
        ...

    def remove(self, block: int) -> None:
        """An evictable block is used again."""
        ...

    def evict(self) -> int:
        """Take out and return the block to overwrite next. Raises KeyError when there is none."""
        ...

    def __len__(self) -> int: ...

    def __contains__(self, block: int) -> bool: ...


class LRU:
    """Least recently used first, where use ends with the last release.

    Whoever holds a block holds its whole prefix, and blocks are released tail first: so a block goes before the blocks
    it depends on, and what stays can be reached. (Only where two requests computed equal blocks side by side can one's
    later blocks hang on the other's; if those go first, the unreachable ones are evicted in their turn.)
    """

    def __init__(self):
        self._order: collections.OrderedDict[int, None] = collections.OrderedDict()

    def add(self, block: int) -> None:
        self._order[block] = None

    def remove(self, block: int) -> None:
        del self._order[block]

    def evict(self) -> int:
        return self._order.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, block: int) -> bool:
        return block in self._order
