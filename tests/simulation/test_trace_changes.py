"""Traces made out of traces keep what requests share."""

import pytest

from jaxkv.core.errors import ConfigError
from jaxkv.simulation.serial_replay import replay_serially
from jaxkv.simulation.synthetic_traces import synthetic_trace
from jaxkv.simulation.trace_changes import poisson_arrivals, scaled, with_token_ids
from jaxkv.simulation.traces import Trace, TraceRequest

TRACE = synthetic_trace("conversations", 60)


def test_poisson_arrivals_keep_the_order_and_the_rate():
    long = synthetic_trace("conversations", 2000)
    changed = poisson_arrivals(long)
    arrivals = [request.arrival for request in changed.requests]
    gaps = [after - before for before, after in zip(arrivals, arrivals[1:])]
    assert arrivals == sorted(arrivals) and arrivals[-1] == pytest.approx(2000, rel=0.1)
    assert sum(gap > 1 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.04)  # 1/e of a Poisson process
    assert [request.block_ids for request in changed.requests] == [request.block_ids for request in long.requests]
    assert poisson_arrivals(long) == changed != poisson_arrivals(long, seed=1)


def test_tokens_agree_exactly_where_the_blocks_do():
    spelled = with_token_ids(TRACE, vocab_size=50_000)
    for one in spelled.requests:
        assert len(one.token_ids) == one.input_length and max(one.token_ids) < 50_000
        for other in spelled.requests:
            pairs = zip(one.block_ids, other.block_ids)
            shared = next(
                (at for at, (a, b) in enumerate(pairs) if a != b), min(len(one.block_ids), len(other.block_ids))
            )
            assert one.token_ids[: 16 * shared] == other.token_ids[: 16 * shared]
            assert one.token_ids[16 * shared : 16 * shared + 16] != other.token_ids[16 * shared : 16 * shared + 16] or (
                min(len(one.block_ids), len(other.block_ids)) == shared
            )
    assert with_token_ids(spelled) is spelled


def test_scaled_traces_have_the_same_hits():
    """Partial last blocks too: 37 of 48 tokens in three blocks of 16 become 10 in three blocks of 4."""
    rows = [TraceRequest(float(at), 16 * at + 5, 64, tuple(range(at)) + (1000 + at,)) for at in range(1, 30)]
    trace = Trace("made", tuple(rows), 16)
    small = scaled(trace, 4)
    assert small.block_size == 4 and small.requests[1].input_length == 10 and small.requests[1].output_length == 16
    assert all(len(row.block_ids) == -(-row.input_length // 4) for row in small.requests)
    hits = [replay_serially(one, "lru", 40).hit_blocks for one in (trace, small)]
    assert hits[0] == hits[1] > 0
    assert scaled(trace, 1) is trace


def test_what_cannot_be_changed_is_refused():
    with pytest.raises(ConfigError, match="scale is 3; it must divide the 16"):
        scaled(TRACE, 3)
    with pytest.raises(ConfigError, match="has token ids"):
        scaled(with_token_ids(TRACE), 2)
    with pytest.raises(ConfigError, match="neither token ids nor hash_ids"):
        with_token_ids(Trace("lengths", (TraceRequest(0.0, 5, 5),), None))
