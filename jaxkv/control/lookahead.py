"""Eviction that looks at the waiting queue: a block that a waiting request will ask for stays if any other can go."""

import heapq
from collections.abc import Sequence

from jaxkv.control.eviction import EvictionPolicy
from jaxkv.control.prefix_index import BlockHash

Rank = tuple[int, int]  # of a waiting request, smaller first: `RequestState.rank`
_Need = tuple[int, int, int, BlockHash]


class LookAhead(EvictionPolicy):
    """Wraps any policy. What that one would evict next is set aside while somebody waits for it.

    Only when nothing else is left do blocks go that were set aside, the one that is needed last first, of one request's
    the tail first: without a block, those behind it are of no use. To the wrapped policy setting aside looks like an
    eviction, and giving back like an insertion. On average a call costs O(1) beyond the policy's own, `wait` and
    `stop_waiting` cost O(hashes).
    """

    def __init__(self, policy: EvictionPolicy):
        self._policy = policy
        self._identity: dict[int, tuple[BlockHash, BlockHash]] = {}  # of all findable blocks: own hash, parent's
        self._hashes: dict[Rank, dict[BlockHash, int]] = {}  # and their places in the prompt
        self._waiters: dict[BlockHash, set[Rank]] = {}
        self._set_aside: dict[BlockHash, int] = {}
        self._last_needed: list[_Need] = []  # a heap; entries may be old

    def wait(self, rank: Rank, hashes: Sequence[BlockHash]) -> None:
        """A request has come into sight that will ask for these blocks; nothing happens if it is in sight already."""
        if rank not in self._hashes:
            self._hashes[rank] = {block_hash: place for place, block_hash in enumerate(hashes)}
            for block_hash in hashes:
                self._waiters.setdefault(block_hash, set()).add(rank)

    def stop_waiting(self, rank: Rank) -> None:
        """Its turn has come, or it left; nothing happens if it is not in sight."""
        for block_hash in reversed(self._hashes.pop(rank, {})):
            waiters = self._waiters[block_hash]
            waiters.remove(rank)
            if not waiters:
                del self._waiters[block_hash]
            # Back to the policy even if others wait: when its turn comes again, it is set aside by their rank.
            block = self._set_aside.pop(block_hash, None)
            if block is not None:
                self._policy.insert(block, *self._identity[block])
                self._policy.release(block)

    def insert(self, block: int, block_hash: BlockHash, parent: BlockHash) -> None:
        self._identity[block] = block_hash, parent
        self._policy.insert(block, block_hash, parent)

    def use(self, block: int) -> None:
        if self._set_aside.pop(self._identity[block][0], None) is None:
            self._policy.use(block)
        else:
            self._policy.insert(block, *self._identity[block])

    def release(self, block: int) -> None:
        self._policy.release(block)

    def evict(self) -> int:
        while len(self._policy):
            block = self._policy.evict()
            block_hash = self._identity[block][0]
            if block_hash not in self._waiters:
                del self._identity[block]
                return block
            self._set_aside[block_hash] = block
            heapq.heappush(self._last_needed, self._need(block_hash))
        while self._last_needed:
            entry = heapq.heappop(self._last_needed)
            block_hash = entry[-1]
            if block_hash not in self._set_aside:
                continue
            if (need := self._need(block_hash)) != entry:  # a request of better rank waits for it by now
                heapq.heappush(self._last_needed, need)
                continue
            block = self._set_aside.pop(block_hash)
            del self._identity[block]
            return block
        raise KeyError("no block can be evicted")

    def _need(self, block_hash: BlockHash) -> _Need:
        """Smaller where its first waiter comes later, and where it lies later in that one's prompt."""
        rank = min(self._waiters[block_hash])
        return -rank[0], -rank[1], -self._hashes[rank][block_hash], block_hash

    def __len__(self) -> int:
        return len(self._policy) + len(self._set_aside)

    def __contains__(self, block: int) -> bool:
        return block in self._policy or self._set_aside.get(self._identity.get(block, (None,))[0]) == block
