"""The engine one request at a time against an independent program's hit rates, and against the block manager alone."""

import dataclasses
import json
import pathlib

import pytest

from jaxkv.control.eviction_choice import EVICTION_POLICIES
from jaxkv.core.errors import ConfigError
from jaxkv.simulation.block_replay import replay_blocks
from jaxkv.simulation.serial_replay import replay_serially
from jaxkv.simulation.synthetic_traces import SYNTHETIC_SHAPES, synthetic_trace
from jaxkv.simulation.traces import Trace, TraceRequest, read_trace

TRACES = pathlib.Path(__file__).parents[3] / "shared" / "traces"
FIRST_1000, WHOLE = "mooncake_conversation_first1000.jsonl.gz", "mooncake_conversation.jsonl.gz"


def check_reference(name, wanted=lambda row: True):
    """Every row of the table that an engine's policy can give: all but Belady's. Rates have six digits there."""
    if not (TRACES / name).exists():
        pytest.skip(f"needs the shared trace {name}, which lies beside the checkout")
    trace = read_trace(TRACES / name)
    rows = json.loads((TRACES / "reference_hit_rates.json").read_text())
    rows = [row for row in rows if row["trace"] == name and row["policy"] != "opt" and wanted(row)]
    for row in rows:
        policy = row["policy"] + "_leaves" * row["leaf_only"]
        report = replay_serially(trace, policy, row["capacity_blocks"], full_blocks_only=row["full_blocks_only"])
        got = {key: round(value, 6) if isinstance(value, float) else value for key, value in vars(report).items()}
        assert got == row
    return len(rows)


def test_reference_hit_rates_of_the_first_1000_rows():
    """Without evictions, with many, and where some prompts are longer than the pool."""
    assert check_reference(FIRST_1000, lambda row: row["full_blocks_only"] and _is_telling(row)) == 4


def _is_telling(row):
    return (row["capacity_blocks"], row["policy"], row["leaf_only"]) in {
        (None, "lru", False), (200, "lru", False), (2000, "fifo", True), (2000, "lfu", False)
    }  # fmt: skip


@pytest.mark.slow
def test_all_reference_hit_rates_of_the_first_1000_rows():
    """Those that count the last, partial block too."""
    assert check_reference(FIRST_1000) == 50


@pytest.mark.slow
def test_reference_hit_rates_of_the_whole_trace():
    assert check_reference(WHOLE, lambda row: row["full_blocks_only"]) == 17


@pytest.mark.parametrize("shape", SYNTHETIC_SHAPES)
def test_engine_and_block_manager_alone_agree(shape):
    trace = synthetic_trace(shape, 40, seed=4)
    for policy in EVICTION_POLICIES:
        for capacity in (40, 150):
            assert replay_serially(trace, policy, capacity) == replay_blocks(trace, policy, capacity)


def test_blocks_of_other_sizes_find_the_same_tokens_when_nothing_is_evicted():
    trace = synthetic_trace("conversations", 80, seed=2)
    own = replay_serially(trace)
    parts, pairs = replay_serially(trace, block_size=4), replay_serially(trace, block_size=32)
    assert parts.hit_blocks == 4 * own.hit_blocks and parts.token_hit_rate == own.token_hit_rate
    assert own.token_hit_rate * 0.8 < pairs.token_hit_rate < own.token_hit_rate


def test_salts_keep_requests_apart():
    rows = [TraceRequest(float(i), 32, 1, (1, 2), salt=salt) for i, salt in enumerate(["a", "b", None, "a"])]
    assert replay_serially(Trace("t", tuple(rows), 16)).hit_blocks == 2


def test_mistakes_are_named():
    trace = synthetic_trace("loop", 5)
    for arguments, message in (
        ((trace, "opt"), "policy is 'opt'"),
        ((trace, "lru", 0), "capacity_blocks is 0"),
        ((dataclasses.replace(trace, block_size=None),), "no hash_ids"),
    ):
        with pytest.raises(ConfigError, match=message):
            replay_serially(*arguments)
    with pytest.raises(ConfigError, match="block_size is 24"):
        replay_serially(trace, block_size=24)
