"""Hit rates of a block trace on the real BlockManager and PrefixIndex: one request at a time, no engine, no clock.

Each request looks up its leading blocks, shares them, takes the rest (evicting by policy), publishes all and lets go.
A prompt longer than the whole pool caches what fits. So it is the upper end of what the engine can do with the same
pool: nothing else is running, and no output takes blocks.
"""

import dataclasses
import heapq
import math
from collections.abc import Sequence

from jaxkv.control.block_manager import BlockManager
from jaxkv.control.eviction import EvictionPolicy
from jaxkv.control.eviction_choice import make_eviction_policy
from jaxkv.control.lookahead import LookAhead
from jaxkv.control.prefix_index import BlockHash
from jaxkv.simulation.traces import Trace, full_block_ids

OPT = "opt"
ROOT = BlockHash(b"")


@dataclasses.dataclass(frozen=True)
class BlockReplayReport:
    """One policy at one capacity.

    Attributes:
      capacity_blocks: None when nothing is ever evicted.
      hit_blocks / total_blocks: found at a prompt's head / asked for.
      block_hit_rate: their quotient; token_hit_rate: tokens in the blocks found over tokens asked for.
    """

    trace: str
    block: int
    full_blocks_only: bool
    capacity_blocks: int | None
    policy: str
    leaf_only: bool
    hit_blocks: int
    total_blocks: int
    block_hit_rate: float
    token_hit_rate: float
    evictions: int

    @classmethod
    def of(
        cls,
        trace: Trace,
        *,
        policy: str,
        hit_blocks: int,
        total_blocks: int,
        hit_tokens: int,
        total_tokens: int,
        **fields: bool | int | None,
    ) -> "BlockReplayReport":
        """`policy`: as eviction policies are named, with _leaves where it is leaf_only; `fields`: the others, as they are."""
        base, leaves, _ = policy.partition("_leaves")
        return cls(
            trace=trace.name,
            policy=base,
            leaf_only=bool(leaves),
            hit_blocks=hit_blocks,
            total_blocks=total_blocks,
            block_hit_rate=hit_blocks / total_blocks if total_blocks else 0.0,
            token_hit_rate=hit_tokens / total_tokens if total_tokens else 0.0,
            **fields,
        )


def replay_blocks(
    trace: Trace,
    policy: str,
    capacity_blocks: int | None = None,
    *,
    full_blocks_only: bool = True,
    skip: int = 0,
    lookahead: int = 0,
) -> BlockReplayReport:
    """Replay a trace that has block ids.

    Args:
      policy: a name of `EVICTION_POLICIES`, or "opt" for Belady's.
      capacity_blocks: blocks in the pool; None holds all.
      full_blocks_only: leave out the last id of prompts that end within a block.
      skip: count hits only after that many requests, to judge on rows that nothing was tuned on.
      lookahead: that many next requests are known to wait while one is served, as in a queue of this depth.
    """
    if full_blocks_only:
        chains = list(full_block_ids(trace))
    else:
        chains = [request.block_ids for request in trace.requests]
    hashes = [[BlockHash(b"%d" % block_id) for block_id in chain] for chain in chains]
    capacity = capacity_blocks or len({block_id for chain in chains for block_id in chain}) or 1
    eviction = Belady(hashes) if policy == OPT else make_eviction_policy(policy, capacity)
    queue = LookAhead(eviction) if lookahead else None
    manager = BlockManager(capacity + 1, trace.block_size, eviction if queue is None else queue)
    hit_blocks = hit_tokens = 0
    for number, (request, chain) in enumerate(zip(trace.requests, hashes, strict=True)):
        if queue is not None:
            queue.stop_waiting((0, number))
            for waiting in range(number + 1, min(number + 1 + lookahead, len(hashes))):
                queue.wait((0, waiting), hashes[waiting])
        num_hits = serve(manager, chain)
        if number >= skip:
            hit_blocks += num_hits
            hit_tokens += min(num_hits * trace.block_size, request.input_length)
    return BlockReplayReport.of(
        trace,
        policy=policy,
        hit_blocks=hit_blocks,
        total_blocks=sum(len(chain) for chain in chains[skip:]),
        hit_tokens=hit_tokens,
        total_tokens=sum(request.input_length for request in trace.requests[skip:]),
        block=trace.block_size,
        full_blocks_only=full_blocks_only,
        capacity_blocks=capacity_blocks,
        evictions=manager.num_evictions,
    )


def serve(manager: BlockManager, chain: Sequence[BlockHash]) -> int:
    """One request from admission to release; returns how many leading blocks it found."""
    found = manager.match(chain).blocks
    manager.share(found)
    missing = chain[len(found) :]
    blocks = [*found, *manager.allocate(min(len(missing), manager.num_free), missing)]
    parent = chain[len(found) - 1] if found else ROOT
    for block, block_hash in zip(blocks[len(found) :], missing):
        manager.register(block, block_hash, parent)
        parent = block_hash
    manager.free(blocks)
    return len(found)


class Belady(EvictionPolicy):
    """Evicts the block whose next use is furthest away: knows the future, so it is for comparison only.

    Optimal for independent blocks (Belady, IBM Systems Journal 1966). Under chains it is not a proven bound, since a
    block behind a missing one can't be found, but no policy here comes near it.
    """

    def __init__(self, chains: Sequence[Sequence[BlockHash]]):
        """`chains`: the block hashes of every request to come, in order."""
        self._uses: dict[BlockHash, list[int]] = {}  # request numbers, the last first
        for number in range(len(chains) - 1, -1, -1):
            for block_hash in chains[number]:
                self._uses.setdefault(block_hash, []).append(number)
        self._hash: dict[int, BlockHash] = {}
        self._next: dict[int, tuple[float, int]] = {}  # of the evictable blocks: minus the next use, time of release
        self._heap: list[tuple[tuple[float, int], int]] = []
        self._time = 0

    def insert(self, block: int, block_hash: BlockHash, parent: BlockHash) -> None:
        self._hash[block] = block_hash
        self._uses[block_hash].pop()

    def use(self, block: int) -> None:
        self._next.pop(block, None)
        self._uses[self._hash[block]].pop()

    def release(self, block: int) -> None:
        uses = self._uses[self._hash[block]]
        self._time += 1  # of one request's blocks the tail comes first, and is evicted first
        rank = self._next[block] = (-float(uses[-1]) if uses else -math.inf, self._time)
        heapq.heappush(self._heap, (rank, block))

    def evict(self) -> int:
        while self._heap:
            rank, block = heapq.heappop(self._heap)
            if self._next.get(block) == rank:
                del self._next[block], self._hash[block]
                return block
        raise KeyError("no block can be evicted")

    def __len__(self) -> int:
        return len(self._next)

    def __contains__(self, block: int) -> bool:
        return block in self._next
