"""scripts/bench_prefix_sharing.py as a process, on a tiny model."""

import dataclasses

import pytest
from benchlib.prefix_scenarios import ALL, check_room

from jaxkv.core.config import EngineConfig
from jaxkv.core.errors import ConfigError

MODES, METRICS = ("off", "cold", "warm"), ("ttft_mean", "ttft_p50", "ttft_p95", "total")


def test_document(bench):
    code, document, err = bench("bench_prefix_sharing.py", "--json_only")
    assert (code, err) == (0, "")
    results = {result["name"]: result for result in document["results"]}
    for scenario, shared in (("chats", 125), ("documents", 256)):
        names = {(mode, metric): f"{scenario} {mode} {metric}" for mode in MODES for metric in METRICS}
        times = {key: results[name]["value"] for key, name in names.items()}
        assert all(seconds > 0 for seconds in times.values())
        for mode in MODES:
            assert times[mode, "ttft_p50"] <= times[mode, "ttft_p95"] <= times[mode, "total"]
        computed = {mode: results[f"{scenario} {mode} computed prompt tokens"]["value"] for mode in MODES}
        # Four requests with 32 tokens of their own. Shared to the token, but for heads of blocks written in the plan
        # that admits the next request: fewer than a block of 16 each.
        assert computed["off"] == 4 * (shared + 32)
        assert shared + 4 * 32 <= computed["cold"] <= shared + 4 * 32 + 3 * 15
        assert 4 * 32 <= computed["warm"] <= 4 * 32 + 4 * 15
        assert results[f"{scenario} requests with equal tokens, cold and off"]["value"] == 1
        ratio = next(r for r in document["ratios"] if r["name"] == f"{scenario} total: off / cold")
        assert ratio["value"] == pytest.approx(times["off", "total"] / times["cold", "total"])
        assert ratio["target"] is None  # quick runs are not judged
    assert len(document["ratios"]) == 8


def test_users_errors(bench):
    cases = (
        ("--scenarios=chat", "scenarios has chat; there are chats, documents"),
        ("--dtype=int3", "--dtype=int3 is not supported"),
    )
    for argument, text in cases:
        code, document, err = bench("bench_prefix_sharing.py", argument)
        assert (code, document) == (2, None) and text in err and "Traceback" not in err


def test_scenarios_must_fit_at_once():
    scenario = ALL["chats"]
    fits = EngineConfig(block_size=16, max_num_seqs=12, max_model_len=564)
    needed = 12 * (500 + 32 + 32 + 2 * 16)
    check_room(fits, needed, [scenario])
    for config, tokens, text in (
        (fits, needed - 1, f"the KV pool holds {needed - 1:,} tokens, scenario chats needs {needed:,}"),
        (dataclasses.replace(fits, max_num_seqs=11), needed, "max_num_seqs is 11, scenario chats needs 12"),
        (dataclasses.replace(fits, max_model_len=563), needed, "max_model_len is 563, scenario chats needs 564"),
    ):
        with pytest.raises(ConfigError, match=text):
            check_room(config, tokens, [scenario])
