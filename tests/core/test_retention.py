"""What a request keeps of its blocks, against plain counting."""

import hypothesis
from hypothesis import strategies as st

from jaxkv.core.plan import NULL_BLOCK
from jaxkv.core.retention import Retention, retention_of

RETENTIONS = st.builds(
    Retention, st.integers(1, 40), st.integers(0, 20), st.sampled_from([1, 4, 16]), st.integers(1, 30)
)


def seen_blocks(retention: Retention, first_query: int, end: int) -> set[int]:
    """Places that queries first_query to end - 1 look at, and write to."""
    seen = set()
    for query in range(first_query, end):
        start = max(0, query + 1 - retention.window)
        seen |= {position // retention.block_size for position in range(start, query + 1)}
        seen |= {position // retention.block_size for position in range(min(retention.num_sinks, start))}
    return seen


@hypothesis.given(RETENTIONS, st.integers(0, 150))
def test_a_chunk_finds_all_it_looks_at_within_the_most(retention, start):
    end = start + retention.max_chunk
    kept = {*range(retention.num_sink_blocks), *range(retention.first_seen(start), -(-end // retention.block_size))}
    assert seen_blocks(retention, start, end) <= kept
    assert len(kept) <= retention.max_blocks
    assert retention.end(start, end) == -(-end // retention.block_size), "an admission has no room for its first chunk"


def test_the_most_is_not_too_much():
    for window, block_size, chunk in ((1, 8, 1), (17, 16, 7), (33, 16, 64), (4096, 64, 8192)):
        retention = Retention(window, 0, block_size, chunk)
        needed = (
            -(-(start + chunk) // block_size) - retention.first_seen(start) for start in range(window, window + block_size)
        )
        assert max(needed) == retention.max_blocks == retention.num_blocks(10**9)


@hypothesis.given(RETENTIONS, st.lists(st.sampled_from([None, 1, 2]), max_size=20), st.integers(0, 3))
def test_findable_is_what_needs_no_missing_block(retention, found, rest):
    size = retention.block_size
    num_tokens = len(found) * size + min(rest, size - 1)

    def is_enough(count: int) -> bool:
        query = count * size if count * size < num_tokens else (count - 1) * size
        blocks = seen_blocks(retention, query, query + 1) | set(range(min(retention.num_sink_blocks, count)))
        return all(found[place] is not None for place in blocks if place < count)

    most = retention.num_findable(found, num_tokens)
    assert most == 0 or is_enough(most)
    # What a later token sees of the blocks before is less, never more.
    assert all(not is_enough(count) for count in range(most + 1, len(found) + 1))
    blocks = retention.seen_of([block or NULL_BLOCK for block in found[:most]])
    kept_from = retention.kept_from(blocks)
    assert all(block == NULL_BLOCK for block in blocks[retention.num_sink_blocks : kept_from])
    if most and most * size < num_tokens:
        assert NULL_BLOCK not in blocks[kept_from:]


def test_one_layer_that_sees_everything_keeps_everything():
    assert retention_of((16, None), 0, block_size=16, max_chunk=64) is None
    assert retention_of((16, 40), 2, block_size=16, max_chunk=64) == Retention(40, 2, 16, 64)
