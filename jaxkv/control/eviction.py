"""Which cached block to give up first. A policy sees only blocks that the prefix index can find."""

import abc
import collections
import heapq
from typing import Protocol

from jaxkv.control.prefix_index import BlockHash


class EvictionPolicy(Protocol):
    """Order among evictable blocks. Every call is O(1) or O(log n) on average: pools hold 100,000 blocks and more.

    A block's life: inserted (one request owns it), used by further requests, released by the last, used again, ...,
    evicted. `len` and `in` tell of the blocks that are released: those that may be evicted.
    """

    def insert(self, block: int, block_hash: BlockHash, parent: BlockHash) -> None:
        """An owned block has become findable. `parent` is the hash of the block before it, or the root."""
        ...

    def use(self, block: int) -> None:
        """One more request shares a findable block, which is not evictable until its last user lets go."""
        ...

    def release(self, block: int) -> None:
        """The last user let go of a findable block. Of one request's blocks the tail comes first."""
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

    def insert(self, block: int, block_hash: BlockHash, parent: BlockHash) -> None:
        pass

    def use(self, block: int) -> None:
        self._order.pop(block, None)

    def release(self, block: int) -> None:
        self._order[block] = None

    def evict(self) -> int:
        return self._order.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, block: int) -> bool:
        return block in self._order


class Ranked(abc.ABC):
    """Smallest rank first, where a block's rank is fixed at its release: a heap whose outdated entries are skipped.

    With `leaves_only` a block stays as long as a block that continues it does. Subclasses say `rank`, and may extend
    `insert`, `use` and `forget`.
    """

    def __init__(self, *, leaves_only: bool = False):
        self._leaves_only = leaves_only
        self._heap: list[tuple[tuple[int, ...], int]] = []
        self._rank: dict[int, tuple[int, ...]] = {}  # of the evictable blocks
        self._inner: set[int] = set()  # evictable, but not in the heap: they were found to have children
        self._hashes: dict[int, tuple[BlockHash, BlockHash]] = {}  # own and parent's
        self._block_of: dict[BlockHash, int] = {}
        self._num_children: collections.Counter[BlockHash] = collections.Counter()

    @abc.abstractmethod
    def rank(self, block: int) -> tuple[int, ...]:
        """Called once at each release."""

    def forget(self, block: int) -> None:
        """The block is evicted."""

    def insert(self, block: int, block_hash: BlockHash, parent: BlockHash) -> None:
        if self._leaves_only:
            self._hashes[block] = block_hash, parent
            self._block_of[block_hash] = block
            self._num_children[parent] += 1

    def use(self, block: int) -> None:
        if self._rank.pop(block, None) is not None:
            self._inner.discard(block)

    def release(self, block: int) -> None:
        rank = self._rank[block] = self.rank(block)
        heapq.heappush(self._heap, (rank, block))
        if len(self._heap) > 2 * len(self._rank) + 64:
            self._heap = [(rank, block) for block, rank in self._rank.items() if block not in self._inner]
            heapq.heapify(self._heap)

    def evict(self) -> int:
        while self._heap:
            rank, block = heapq.heappop(self._heap)
            if self._rank.get(block) != rank or block in self._inner:
                continue
            if self._leaves_only and self._num_children[self._hashes[block][0]]:
                self._inner.add(block)
            else:
                return self._take(block)
        # Only where the children of all of them are in use: of two equal blocks the one in use is not the one found.
        if not self._inner:
            raise KeyError("no block can be evicted")
        return self._take(min(self._inner, key=self._rank.__getitem__))

    def _take(self, block: int) -> int:
        del self._rank[block]
        self._inner.discard(block)
        self.forget(block)
        if self._leaves_only:
            block_hash, parent = self._hashes.pop(block)
            del self._block_of[block_hash]
            self._num_children[parent] -= 1
            if not self._num_children[parent]:
                del self._num_children[parent]
                above = self._block_of.get(parent)
                if above in self._inner:
                    self._inner.discard(above)
                    heapq.heappush(self._heap, (self._rank[above], above))
        return block

    def __len__(self) -> int:
        return len(self._rank)

    def __contains__(self, block: int) -> bool:
        return block in self._rank


class FIFO(Ranked):
    """First inserted first, however often it is used. Without `leaves_only` it strands blocks: parents go first."""

    def __init__(self, *, leaves_only: bool = False):
        super().__init__(leaves_only=leaves_only)
        self._time = 0
        self._inserted: dict[int, int] = {}

    def insert(self, block: int, block_hash: BlockHash, parent: BlockHash) -> None:
        super().insert(block, block_hash, parent)
        self._time += 1
        self._inserted[block] = self._time

    def rank(self, block: int) -> tuple[int, ...]:
        return (self._inserted[block],)

    def forget(self, block: int) -> None:
        del self._inserted[block]


class LFU(Ranked):
    """Least often used first, of equals the least recently used. The count starts anew after an eviction."""

    def __init__(self):
        super().__init__()
        self._time = 0
        self._num_uses: dict[int, int] = {}

    def insert(self, block: int, block_hash: BlockHash, parent: BlockHash) -> None:
        super().insert(block, block_hash, parent)
        self._num_uses[block] = 1

    def use(self, block: int) -> None:
        super().use(block)
        self._num_uses[block] += 1

    def rank(self, block: int) -> tuple[int, ...]:
        self._time += 1
        return self._num_uses[block], self._time

    def forget(self, block: int) -> None:
        del self._num_uses[block]
