"""Who owns which KV block. Bookkeeping only: ids and counts, never contents.

Every block but the null block is in exactly one of three places:

    free    holds nothing worth keeping
    cached  nobody uses it, but the prefix index can still find it; evicted when free blocks run out:
            first those that are not full, tails, so that they cost the full ones no place, then by the policy
    owned   used by `ref_count` >= 1 requests

A freed block may be handed out at once, even while a submitted step still writes to it: steps run in order, so the old
owner's writes come before the new owner's.
"""

import collections
from collections.abc import Iterable, Sequence

from jaxkv.control.eviction import LRU, EvictionPolicy
from jaxkv.control.prefix_index import BlockHash, MatchResult, PrefixIndex
from jaxkv.core.metrics import EngineStats
from jaxkv.core.plan import NULL_BLOCK


class _Ghosts(collections.OrderedDict[BlockHash, None]):
    """Hashes of what was evicted last."""

    def __init__(self, most: int):
        super().__init__()
        self._most = most

    def add(self, block_hash: BlockHash) -> None:
        self[block_hash] = None
        if len(self) > self._most:
            self.popitem(last=False)


class BlockManager:
    """The pool's blocks 1 .. num_blocks - 1. Operations cost O(blocks touched), whatever the size of the pool.

    Attributes:
      num_evictions: full cached blocks that were overwritten, since the start.
      now: set by the owner as time goes on, for the ages of blocks.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        eviction: EvictionPolicy | None = None,
        *,
        num_ghosts: int | None = None,
        stats: EngineStats | None = None,
    ):
        """
        Args:
          num_blocks: the null block included, as in `ExecutorLimits`.
          eviction: an empty policy; None is LRU.
          num_ghosts: most evicted hashes to remember, and as many of tails; None is as many as there are blocks.
          stats: to be told the ages of blocks that are evicted.
        """
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_usable = num_blocks - 1
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))  # a stack, lowest id on top
        self._cached: EvictionPolicy = LRU() if eviction is None else eviction
        self._tails = LRU()  # the cached ones of `_is_tail`
        self._is_tail: set[int] = set()
        self._ref_count = [0] * num_blocks
        self._index = PrefixIndex()
        num_ghosts = self.num_usable if num_ghosts is None else num_ghosts
        self._ghosts, self._tail_ghosts = _Ghosts(num_ghosts), _Ghosts(num_ghosts)
        self.num_evictions = 0
        self.now = 0.0
        self._stats = stats
        # Of blocks that can be found, the second once nobody uses them.
        self._since, self._idle_since = [0.0] * num_blocks, [0.0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out: free ones, then cached ones."""
        return len(self._free) + self.num_cached

    @property
    def num_cached(self) -> int:
        return len(self._cached) + len(self._tails)

    def ref_count(self, block: int) -> int:
        return self._ref_count[block]

    def num_exclusive(self, blocks: Sequence[int]) -> int:
        """How many of one request's blocks nobody else uses: what freeing them would bring."""
        counts = self._ref_count
        return sum([counts[block] == 1 for block in blocks])

    def num_free_without(self, shared: Sequence[int]) -> int:
        """`num_free` once `shared` has been called with these blocks."""
        counts = self._ref_count
        return self.num_free - sum([counts[block] == 0 for block in shared])

    def allocate(self, count: int, hashes: Sequence[BlockHash] = ()) -> list[int]:
        """Hand out `count` blocks with one reference each, evicting cached ones only when no free one is left.

        `hashes` name what the first of them will hold. Where a cached block holds it already, but can't be reached
        because a block before it was evicted, that block is handed out for its own place, to be written again with the
        same content: it stays findable, and no second copy of it is made.

        The caller has checked `num_free`.
        """
        assert count <= self.num_free, f"asked for {count} blocks, {self.num_free} are free"
        if not hashes:
            return [self._take() for _ in range(count)]
        stranded: dict[int, int] = {}
        for place, block_hash in enumerate(hashes[:count]):
            block = self._index.find(block_hash)
            if block is not None and self._ref_count[block] == 0:
                stranded[place] = block
        if stranded:
            self.share(stranded.values())  # before anything is evicted
        return [stranded[place] if place in stranded else self._take() for place in range(count)]

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block = self._evict()
            is_tail = block in self._is_tail
            (self._tail_ghosts if is_tail else self._ghosts).add(self._forget(block))
            if not is_tail:
                self.num_evictions += 1
                if self._stats is not None:
                    self._stats.block_age.add(self.now - self._since[block])
                    self._stats.block_idle.add(self.now - self._idle_since[block])
        self._ref_count[block] = 1
        return block

    def _evict(self) -> int:
        return self._tails.evict() if len(self._tails) else self._cached.evict()

    def _forget(self, block: int) -> BlockHash:
        self._is_tail.discard(block)
        return self._index.remove(block)

    def _order_of(self, block: int) -> EvictionPolicy:
        return self._tails if block in self._is_tail else self._cached

    @property
    def index(self) -> PrefixIndex:
        """For lookups; blocks come and go through the manager."""
        return self._index

    def match(self, hashes: Sequence[BlockHash]) -> MatchResult:
        """Longest findable prefix. Changes nothing: call `share` before anything else is allocated."""
        return self._index.match(hashes, self.block_size)

    def was_evicted(self, block_hash: BlockHash) -> bool:
        """Whether a block of this hash was overwritten, as far as the bounded list of ghosts remembers."""
        return block_hash in self._ghosts or block_hash in self._tail_ghosts

    def is_tail(self, block: int) -> bool:
        """Whether it is findable, but not full."""
        return block in self._is_tail

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to each of these owned or cached blocks; cached ones become owned again."""
        for block in blocks:
            if block in self._index:
                self._order_of(block).use(block)
            else:
                assert self._ref_count[block] > 0, f"block {block} is neither owned nor cached"
            self._ref_count[block] += 1

    def idle_seconds(self, blocks: Iterable[int]) -> list[float]:
        """Of those that are cached: how long nobody has used them."""
        counts, since, now = self._ref_count, self._idle_since, self.now
        return [now - since[block] for block in blocks if counts[block] == 0]

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each of a request's blocks, given in order, the tail first.

        Blocks left without references stay cached if the index can find them. Null blocks in between are nobody's.
        """
        for block in reversed(blocks):
            if block == NULL_BLOCK:
                continue
            count = self._ref_count[block] - 1
            assert count >= 0, f"block {block} is freed more often than it was taken"
            self._ref_count[block] = count
            if count == 0:
                if block in self._index:
                    self._order_of(block).release(block)
                    self._idle_since[block] = self.now
                else:
                    self._free.append(block)

    def drop_cached(self) -> None:
        """Forget every cached block, and those evicted before. The only operation that takes O(pool): tens of
        microseconds a block."""
        for _ in range(self.num_cached):
            block = self._evict()
            self._forget(block)
            self._free.append(block)
        self._ghosts.clear()
        self._tail_ghosts.clear()

    def register(
        self,
        block: int,
        block_hash: BlockHash,
        parent: BlockHash,
        unsalted: BlockHash | None = None,
        *,
        is_tail: bool = False,
    ) -> bool:
        """Make an owned block findable; False when an equal one already is (another one then stays private).

        `parent` is the hash of the block before it, or the root; `unsalted` as in `PrefixIndex.add`.
        """
        assert self._ref_count[block] > 0, f"block {block} is registered but not owned"
        added = self._index.add(block_hash, block, unsalted)
        if added:
            self._since[block] = self.now
            self._ghosts.pop(block_hash, None)
            self._tail_ghosts.pop(block_hash, None)
            if is_tail:
                self._is_tail.add(block)
            else:
                self._cached.insert(block, block_hash, parent)
        return added

    def unregister_tail(self, block: int) -> None:
        """Make an owned tail private again: its name is about to change."""
        assert self._ref_count[block] > 0 and block in self._is_tail, f"block {block} is no tail that somebody owns"
        self._forget(block)

    def check(self, owners: Iterable[Sequence[int]] | None = None) -> None:
        """Assert every invariant. `owners`: all block lists in use, to compare reference counts with. O(pool)."""
        free = set(self._free)
        owned = {block for block, count in enumerate(self._ref_count) if count > 0}
        cached = {block for block in range(self.num_blocks) if block in self._order_of(block)}
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert len(cached) == self.num_cached, "an eviction policy holds a block outside the pool"
        assert not free & owned and not free & cached and not owned & cached, "a block is in two places"
        assert free | owned | cached == set(range(1, self.num_blocks)), "a block leaked, or the null block was taken"
        assert all(count >= 0 for count in self._ref_count), "a reference count is negative"
        assert all(block in self._index for block in cached), "a cached block cannot be found"
        assert not any(block in self._index for block in free), "a free block can still be found"
        assert all(block in self._index for block in self._is_tail), "a tail cannot be found"
        self._index.check()
        if owners is not None:
            expected = collections.Counter(block for blocks in owners for block in blocks if block != NULL_BLOCK)
            actual = {block: self._ref_count[block] for block in owned}
            assert actual == dict(expected), f"Expected reference counts {dict(expected)}, got {actual}"
