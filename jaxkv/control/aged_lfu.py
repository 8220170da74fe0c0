"""A policy better than LRU where conversations come back later than a pool's worth of new blocks.

Three known parts:

  * frequency with ageing: a block's rank is the time of its last release plus a bonus for each earlier use, so every
    use keeps it longer, and none keeps it for ever (LFU with dynamic ageing, Arlitt et al., HP Labs 1998);
  * counts outlive eviction in a bounded ghost list, as in ARC (Megiddo and Modha, FAST 2003) and LRU-K;
  * the size of the bonus is not a constant: each candidate runs a miniature cache on a sample of the blocks, and the
    one that hits most is in force (Waldspurger et al., USENIX ATC 2017). No bonus at all is LRU, and is a candidate.

Time is counted in released blocks. Hits in a miniature cache ignore the chains that blocks form.
"""

import collections
import heapq
import zlib

from jaxkv.control.eviction import Ranked
from jaxkv.control.prefix_index import BlockHash

# Pools' worth of released blocks that each earlier use adds to a block's life.
BONUS_FACTORS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
MOST_USES = 9  # uses beyond this add nothing
GHOSTS = 8  # pools' worth of counts kept of evicted blocks
SAMPLE = 8  # one block in so many is seen by the miniature caches
KEPT_SCORE = 0.9  # of the past hits, each time that a pool's worth of blocks was released
LEAD = 1.02  # another factor takes over when it hits so much more


class AgedLFU(Ranked):
    """Least (last release + bonus for each use) first.

    Attributes:
      bonus_factor: in force now.
    """

    def __init__(self, num_blocks: int):
        super().__init__()
        self._num_blocks = num_blocks
        self._time = 0
        self._hash: dict[int, BlockHash] = {}
        self._num_uses: dict[int, int] = {}
        self._ghosts: collections.OrderedDict[BlockHash, int] = collections.OrderedDict()
        self._miniatures = [_Miniature(max(1, num_blocks // SAMPLE)) for _ in BONUS_FACTORS]
        self._next_choice = num_blocks
        self.bonus_factor = BONUS_FACTORS[0]

    def insert(self, block: int, block_hash: BlockHash, parent: BlockHash) -> None:
        self._hash[block] = block_hash
        self._num_uses[block] = self._ghosts.pop(block_hash, 0) + 1

    def use(self, block: int) -> None:
        super().use(block)
        self._num_uses[block] += 1

    def rank(self, block: int) -> tuple[int, ...]:
        self._time += 1
        block_hash = self._hash[block]
        bonus = (min(self._num_uses[block], MOST_USES) - 1) * self._num_blocks
        if zlib.crc32(block_hash) % SAMPLE == 0:
            for factor, miniature in zip(BONUS_FACTORS, self._miniatures, strict=True):
                miniature.access(block_hash, self._time + int(factor * bonus))
        if self._time >= self._next_choice:
            self._choose()
        # Releases at the same rank keep their order: of one request's blocks the tail goes first.
        return self._time + int(self.bonus_factor * bonus), self._time

    def forget(self, block: int) -> None:
        self._ghosts[self._hash.pop(block)] = self._num_uses.pop(block)
        if len(self._ghosts) > GHOSTS * self._num_blocks:
            self._ghosts.popitem(last=False)

    def _choose(self) -> None:
        self._next_choice += self._num_blocks
        scores = dict(zip(BONUS_FACTORS, [miniature.score for miniature in self._miniatures], strict=True))
        best = max(scores, key=scores.__getitem__)
        if scores[best] > LEAD * scores[self.bonus_factor]:
            self.bonus_factor = best
        for miniature in self._miniatures:
            miniature.score *= KEPT_SCORE


class _Miniature:
    """A cache of a few sampled blocks that evicts the least rank; counts its hits in `score`."""

    def __init__(self, capacity: int):
        self.score = 0.0
        self._capacity = capacity
        self._rank: dict[BlockHash, int] = {}
        self._heap: list[tuple[int, BlockHash]] = []

    def access(self, block_hash: BlockHash, rank: int) -> None:
        self.score += block_hash in self._rank
        self._rank[block_hash] = rank
        heapq.heappush(self._heap, (rank, block_hash))
        while len(self._rank) > self._capacity:
            rank, block_hash = heapq.heappop(self._heap)
            if self._rank.get(block_hash) == rank:
                del self._rank[block_hash]
        if len(self._heap) > 2 * len(self._rank) + 64:
            self._heap = [(rank, block_hash) for block_hash, rank in self._rank.items()]
            heapq.heapify(self._heap)
