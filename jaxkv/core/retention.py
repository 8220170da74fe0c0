"""Which blocks a request must keep when no layer looks further back than a window.

    |<- sinks ->|   given back while it runs   |<-- window, and what is computed next -->|
    0                                                                               len(blocks)

A query sees itself and the `window - 1` tokens before it, and with sinks the first tokens too (StreamingLLM, Xiao et al.
2023, arXiv 2309.17453). Blocks wholly behind every window still to come go back to the pool, where the prefix index can
find them as long as nobody overwrites them. In a request's list of blocks the null block then stands in their places.
"""

import dataclasses
from collections.abc import Sequence

from jaxkv.core.plan import NULL_BLOCK


@dataclasses.dataclass(frozen=True)
class Retention:
    """Attributes:
    window: tokens that the layer which sees furthest sees, the query's own included.
    num_sinks: tokens at the start that are seen beside it.
    max_chunk: most tokens computed at once.
    """

    window: int
    num_sinks: int
    block_size: int
    max_chunk: int

    @property
    def num_sink_blocks(self) -> int:
        return -(-self.num_sinks // self.block_size)

    @property
    def max_blocks(self) -> int:
        """Most blocks that a request holds, however long it gets."""
        return self.num_sink_blocks + self._max_behind

    @property
    def _max_behind(self) -> int:
        """Blocks that the largest chunk and the window before it touch, at the worst place of their first token."""
        return -(-(self.window - 1 + self.max_chunk - 1) // self.block_size) + 1

    def first_seen(self, position: int) -> int:
        """Place of the first block behind the sinks' that a query at `position` or later sees."""
        return max(self.num_sink_blocks, (position + 1 - self.window) // self.block_size)

    def end(self, num_computed: int, num_tokens: int) -> int:
        """Places that a request has when it is admitted: for all its tokens if they take no more than max_blocks."""
        return min(-(-num_tokens // self.block_size), self.first_seen(num_computed) + self._max_behind)

    def num_findable(self, found: Sequence[int | None], num_tokens: int) -> int:
        """Of the full blocks of `num_tokens` tokens, which are in the cache or not (None): the most leading ones that need
        not be computed, since of those that are looked at behind them none is missing."""
        most, last_missing = 0, -1
        for place, block in enumerate(found):
            if block is None:
                if place < self.num_sink_blocks:
                    break
                last_missing = place
            # Of a prompt's last block a token is computed, all of them where it can't be copied.
            is_last = (place + 1) * self.block_size == num_tokens
            next_query = (place if is_last else place + 1) * self.block_size
            if last_missing < self.first_seen(next_query):
                most = place + 1
        return most

    def seen_of(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """These leading blocks, the null block in place of those that nothing behind them looks at."""
        first = self.first_seen(len(blocks) * self.block_size)
        sinks = self.num_sink_blocks
        return tuple([b if place < sinks or place >= first else NULL_BLOCK for place, b in enumerate(blocks)])

    def kept_from(self, blocks: Sequence[int]) -> int:
        """Place of the first block behind the sinks' that is not a null block."""
        behind = range(self.num_sink_blocks, len(blocks))
        return next((place for place in behind if blocks[place] != NULL_BLOCK), max(self.num_sink_blocks, len(blocks)))

    def num_blocks(self, num_tokens: int) -> int:
        """Most blocks that a request of `num_tokens` tokens holds at once."""
        return min(-(-num_tokens // self.block_size), self.max_blocks)


def retention_of(
    window_sizes: tuple[int | None, ...], num_sinks: int, *, block_size: int, max_chunk: int
) -> Retention | None:
    """For a model with these windows, one a layer; None when a layer sees everything, so that nothing can be given back."""
    if not window_sizes or None in window_sizes:
        return None
    return Retention(max(window_sizes), num_sinks, block_size, max_chunk)
