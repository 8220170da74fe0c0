"""What eviction policies and the look-ahead win over LRU on a recorded trace and on made-up ones."""

import pathlib

import pytest

from jaxkv.simulation.block_replay import OPT, replay_blocks
from jaxkv.simulation.synthetic_traces import SYNTHETIC_SHAPES, synthetic_trace
from jaxkv.simulation.traces import full_block_ids, read_trace

TRACES = pathlib.Path(__file__).parents[3] / "shared" / "traces"


def mooncake(name):
    path = TRACES / name
    if not path.exists():
        pytest.skip(f"needs the shared trace {name}, which lies beside the checkout")
    return read_trace(path)


def hits_of(trace, capacity, skip, *runs):
    """Hit blocks of each (policy, lookahead) after the first `skip` requests."""
    return [replay_blocks(trace, name, capacity, skip=skip, lookahead=depth).hit_blocks for name, depth in runs]


def share_closed(trace, capacity, skip, policy, lookahead=0):
    """How much of the way from LRU to the optimum."""
    lru, opt, hits = hits_of(trace, capacity, skip, ("lru", 0), (OPT, 0), (policy, lookahead))
    return (hits - lru) / (opt - lru)


def test_return_rate_on_the_first_1000_rows():
    """Too short for counts to tell much: what is asserted is half of what was measured (0.138 and 0.189)."""
    trace = mooncake("mooncake_conversation_first1000.jsonl.gz")
    lru, opt, alone, seeing = hits_of(trace, 1000, 300, ("lru", 0), (OPT, 0), ("return_rate", 0), ("return_rate", 32))
    assert 0.07 * (opt - lru) < alone - lru < seeing - lru


@pytest.mark.slow
def test_return_rate_closes_a_third_of_the_gap_on_rows_it_was_not_tuned_on():
    trace = mooncake("mooncake_conversation.jsonl.gz")
    assert share_closed(trace, 3000, 6015, "return_rate") > 1 / 3


@pytest.mark.slow
@pytest.mark.parametrize("capacity, least", [(1000, 0.22), (2000, 0.3), (5000, 0.27), (10_000, 0.14), (20_000, 0.1)])
def test_return_rate_wins_at_every_capacity(capacity, least):
    trace = mooncake("mooncake_conversation.jsonl.gz")
    assert share_closed(trace, capacity, 6015, "return_rate") > least


@pytest.mark.slow
@pytest.mark.parametrize("policy, depth, least", [("lru", 128, 0.18), ("return_rate", 32, 1 / 3)])
def test_the_waiting_queue_helps_on_the_whole_trace(policy, depth, least):
    trace = mooncake("mooncake_conversation.jsonl.gz")
    assert share_closed(trace, 2000, 6015, policy, depth) > least


@pytest.mark.slow
@pytest.mark.parametrize("shape", SYNTHETIC_SHAPES)
@pytest.mark.parametrize("capacity", [200, 500, 1500, 5000])
def test_return_rate_loses_nothing_but_noise_on_other_shapes(shape, capacity):
    trace = synthetic_trace(shape, 2500, seed=1)
    lru, rate = hits_of(trace, capacity, 500, ("lru", 0), ("return_rate", 0))
    assert rate >= 0.98 * lru


def test_frequent_prompts_stay_among_questions_asked_once():
    trace = synthetic_trace("shared_prompts", 500)
    assert share_closed(trace, 300, 200, "return_rate") > 0.3


@pytest.mark.parametrize("shape", SYNTHETIC_SHAPES)
def test_synthetic_traces_are_chains_and_repeatable(shape):
    trace = synthetic_trace(shape, 200, seed=3)
    assert trace == synthetic_trace(shape, 200, seed=3) != synthetic_trace(shape, 200, seed=4)
    parent_of = {}
    for ids in full_block_ids(trace):
        for parent, block in zip((None, *ids), ids):
            assert parent_of.setdefault(block, parent) == parent
    assert trace.block_size == 16 and len(trace.requests) == 200
