"""How many blocks a pool must have for LRU to keep a prefix until its next use.

LRU keeps what was used last, so a block is still there if the pool holds it and all that was used since (the stack
distance of Mattson et al., Evaluation techniques for storage hierarchies, 1970). A request uses its blocks all at once,
its tail released first; so it is enough to know for each block the request that used it last, and how many blocks were
last used by each request: a Fenwick tree over the requests, touched once for every earlier request that a prompt shares
blocks with.
"""

from collections import Counter
from collections.abc import Sequence

from jaxkv.control.prefix_index import BlockHash, hash_blocks, root_hash
from jaxkv.insight.packing import unpacked
from jaxkv.insight.prompt_log import PromptLog


def block_chains(log: PromptLog) -> list[tuple[list[BlockHash], list[BlockHash]]]:
    """Names of the full blocks of each request's prompt, and of prompt and output together."""
    chains = []
    for request in log.requests:
        if log.has_tokens:
            tokens = unpacked(request.sequence)
            chain = hash_blocks(root_hash(b"", request.salt), tokens, log.block_size)
        else:
            data, width, salt = request.sequence, log.symbol_bytes, (request.salt or "").encode()
            chain = [BlockHash(salt + data[start : start + width]) for start in range(0, len(data), width)]
        chains.append((chain[: request.num_tokens // log.block_size], chain))
    return chains


def needed_capacities(log: PromptLog) -> list[list[int]]:
    """For each request and each leading block of its prompt that an earlier request had: usable blocks that a pool
    needs to have kept it, and so all before it, when requests come one at a time. One more than the blocks used since,
    for the block that a request does not fill. Memory and time: some 1 us a block."""
    last_use: dict[BlockHash, int] = {}
    used_last_by = _Fenwick(len(log.requests))
    needed = []
    for number, (prompt, chain) in enumerate(block_chains(log)):
        capacities: list[int] = []
        from_same = younger = 0
        request = None
        for name in prompt:
            last = last_use.get(name)
            if last is None:
                break
            if last != request:
                request, from_same, younger = last, 0, used_last_by.total - used_last_by.up_to(last)
            from_same += 1
            capacities.append(younger + from_same + 1)
        needed.append(capacities)
        for last, count in Counter([last_use[name] for name in chain if name in last_use]).items():
            used_last_by.add(last, -count)
        used_last_by.add(number, len(chain))
        last_use.update(dict.fromkeys(chain, number))
    return needed


class _Fenwick:
    """Counts by place, and their sums from the first on in O(log n)."""

    def __init__(self, size: int):
        self._sums = [0] * (size + 1)
        self.total = 0

    def add(self, place: int, count: int) -> None:
        self.total += count
        place += 1
        while place < len(self._sums):
            self._sums[place] += count
            place += place & -place

    def up_to(self, place: int) -> int:
        """Sum of the counts at 0 .. place."""
        place, total = place + 1, 0
        while place:
            total += self._sums[place]
            place -= place & -place
        return total


def capacity_for(needs: Sequence[tuple[int, int]], share: float) -> int:
    """The smallest capacity that keeps this share of all tokens, of (capacity needed, tokens); 0 of nothing."""
    wanted, kept = share * sum(tokens for _, tokens in needs), 0
    for capacity, tokens in sorted(needs):
        kept += tokens
        if kept >= wanted:
            return capacity
    return 0
