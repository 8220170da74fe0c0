"""scripts/reproduce_articles.py: every row has rules, rules follow the values, and the program runs."""

import copy
import json
import os
import pathlib
import subprocess
import sys

import pytest
from articlelib import judge_blocks as block_rules
from articlelib import judge_cache as cache
from articlelib import judge_capacity as room
from articlelib import judge_load as load_rules
from articlelib import judge_speed as pace
from articlelib.claims import CLAIMS
from articlelib.registry import PARTS
from articlelib.verdict import Verdict, of_row

ROOT = pathlib.Path(__file__).parents[2]
CLAIMS_FILE = ROOT.parent / "shared" / "article-claims.md"
CONFIRMED, REFUTED, OPEN = "confirmed", "refuted", "not measurable here"


def served(hit_rate, ttft, computed=100, prompt=300):
    return {"hit_rate": hit_rate, "ttft": ttft, "computed_tokens": computed, "prompt_tokens": prompt, "queue": 0.0}


def bucket(hit_rate, p50, mean=0.1, p99=0.5):
    return {"hit_rate": hit_rate, "ttft_p50": p50, "ttft_mean": mean, "ttft_p99": p99}


def quality(kl, agreement=0.995, change=0.001):
    return {"kl": kl, "agreement": agreement, "perplexity_change": change}


def tasks(maths=2e-4):
    return {"maths": quality(maths), "qa": quality(1e-4), "summaries": quality(1e-4)}


GiB, GB = 2**30, 10**9
# row: (rule, values, verdicts, [(path of a value, another value, verdicts then)]). The other value stands on the far side of
# the rule's bound, often just so.
CASES = {
    "B1": (
        pace.b1,
        {"lengths": [8, 64], "cached": [1.0, 2.0], "uncached": [2.0, 9.0], "ttft_cached": 1.0, "ttft_uncached": 1.05},
        [CONFIRMED, REFUTED],
        [
            (("uncached", 1), 7.9, [REFUTED, REFUTED]),  # 3.95 times
            (("uncached", 0), 4.6, [REFUTED, REFUTED]),  # falls from 4.6 to 4.5
            (("ttft_uncached",), 4.0, [CONFIRMED, CONFIRMED]),
        ],
    ),
    "B2": (
        room.b2,
        {"allocated": GiB, "formula": GiB, "gqa_stored": 131_072, "gqa_formula": 524_288},
        [CONFIRMED, REFUTED],
        [(("allocated",), GiB + 16, [REFUTED, REFUTED]), (("gqa_stored",), 524_288, [CONFIRMED, CONFIRMED])],
    ),
    "B3": (room.b3, {"request_bytes": GiB, "whole": 58, "real": 115}, [REFUTED], [(("real",), 60, [CONFIRMED])]),
    "B4": (
        room.b4,
        {"request_bytes": GiB, "shares": [0.90, 0.95, 0.98], "fit": [43, 49, 52]},
        [CONFIRMED],
        [(("fit", 0), 44, [REFUTED]), (("fit", 2), 60, [REFUTED])],
    ),
    "B5": (room.b5, {"available": 76 * GB, "kv": 62 * GB, "weights": 13 * GB}, [REFUTED], [(("kv",), 64 * GB, [CONFIRMED])]),
    "B6": (
        room.b6,
        {"largest_safe": {"a100-80g": [0.92, 0.93], "a100-40g": [0.88, 0.90], "24g": [0.7, 0.8]}, "pools": [16 * GB, 19 * GB]},
        [CONFIRMED] * 6,
        [
            (("largest_safe", "a100-80g", 1), 0.94, [OPEN] + [CONFIRMED] * 5),
            (("largest_safe", "a100-80g"), [0.98, 0.99], [REFUTED] * 2 + [CONFIRMED] * 4),
            (("largest_safe", "24g"), [0.9, 0.9], [CONFIRMED] * 4 + [REFUTED, CONFIRMED]),
            (("pools", 1), 18 * GB, [CONFIRMED] * 5 + [REFUTED]),
        ],
    ),
    "B7": (
        block_rules.b7,
        {"requests": 9, "finished": 9, "cut_short": 0, "refused": 0, "preemptions": 4, "pool_holds": 2, "max_num_seqs": 20},
        [REFUTED],
        [(("finished",), 8, [CONFIRMED]), (("cut_short",), 1, [CONFIRMED]), (("refused",), 1, [CONFIRMED])],
    ),
    "B8": (
        pace.b8,
        {
            "block_sizes": [8, 16, 32, 64],
            "tokens_per_second": [1850.0, 2010.0, 2080.0, 2100.0],
            "waste_tokens": [3.5, 7.5, 15.5, 31.5],
            "waste_share": [0.03, 0.05, 0.11, 0.18],
        },
        [CONFIRMED] * 3,
        [
            (("tokens_per_second", 0), 1950.0, [REFUTED, CONFIRMED, CONFIRMED]),
            (("waste_share", 3), 0.25, [CONFIRMED, REFUTED, CONFIRMED]),
            (("waste_tokens", 1), 12.0, [CONFIRMED, REFUTED, CONFIRMED]),
            (("tokens_per_second", 2), 2200.0, [CONFIRMED, CONFIRMED, REFUTED]),
        ],
    ),
    "A1": (
        cache.a1,
        {
            "block_sizes": [8, 16, 32, 128],
            "hit_rates": {"whole": [0.605, 0.60, 0.55, 0.40], "to_the_token": [0.6, 0.6, 0.599, 0.595]},
            "table_entries": [512, 256, 128, 32],
        },
        [CONFIRMED, CONFIRMED, REFUTED, REFUTED, CONFIRMED],
        [
            (("hit_rates", "whole", 2), 0.57, [REFUTED, CONFIRMED, REFUTED, REFUTED, CONFIRMED]),
            (("hit_rates", "whole", 3), 0.59, [CONFIRMED, REFUTED, REFUTED, REFUTED, CONFIRMED]),
            (("hit_rates", "whole", 0), 0.62, [CONFIRMED, CONFIRMED, REFUTED, REFUTED, REFUTED]),
            (("hit_rates", "to_the_token"), [0.6, 0.6, 0.5, 0.5], [CONFIRMED] * 5),
        ],
    ),
    "B9": (
        pace.b9,
        {"concurrent": 12, "shared_len": 500, "off": 2.6, "cold": 1.5, "warm": 1.0},
        [CONFIRMED],
        [(("off",), 2.2, [REFUTED])],
    ),
    "A2": (
        pace.a2,
        {"ratios": [0.995, 1.0, 1.004], "how": "a second"},
        [CONFIRMED],
        [
            (("ratios",), [0.97, 0.98, 0.985], [REFUTED]),
            (("ratios",), [0.97, 1.0, 1.03], [OPEN]),
            (("ratios",), [0.5, 0.995, 1, 1, 1, 1, 1, 1.005, 2.0], [CONFIRMED]),  # two outliers among nine
            (("ratios",), [1.02, 1.03, 1.04], [CONFIRMED]),
        ],
    ),
    "A3": (
        pace.a3,
        {
            "runs": {
                "off": served(0, 2.6), "cold": served(0.7, 1.5), "warm": served(0.9, 1.0), "any order": served(0.2, 2.0)
            }
        },
        [CONFIRMED],
        [(("runs", "warm", "ttft"), 1.2, [REFUTED])],
    ),
    "B10": (
        lambda values: cache.b10_memory(values) + pace.b10_throughput(values) + cache.b10_quality(values),
        {
            "A4": {"bytes_per_token": {"float16": 512, "int8": 260}},
            "base": "float16",
            "tokens_per_second": {"float16": 100.0, "int8": 135.0, "fp8_e4m3": 120.0},
            "tasks": {"int8": tasks()},
            "rouge_l": {"int8": {"loss": 0.012, "error": 0.003}, "summaries": 16, "mean": {"float32": 0.42, "int8": 0.41}},
        },
        [CONFIRMED] * 4,
        [
            (("A4", "bytes_per_token", "int8"), 300, [REFUTED] + [CONFIRMED] * 3),
            (("tokens_per_second", "int8"), 131.0, [CONFIRMED, REFUTED, CONFIRMED, CONFIRMED]),
            (("rouge_l", "int8", "loss"), 0.014, [CONFIRMED, CONFIRMED, REFUTED, CONFIRMED]),
            (("tasks", "int8", "maths", "kl"), 0.9e-4, [CONFIRMED] * 3 + [REFUTED]),
        ],
    ),
    "A4": (
        lambda values: room.a4_capacity(values) + cache.a4_hit_rate(values) + cache.a4_quality(values),
        {
            "tokens": {"float16": 1000, "int8": 1900},
            "bytes_per_token": {"float16": 512, "int8": 260},
            "hit_rates": {"float16": 0.6, "int8": 0.77, "fp8_e4m3": 0.77},
            "tasks": {"int8": tasks(), "fp8_e4m3": tasks()},
        },
        [CONFIRMED] * 5,
        [
            (("tokens", "int8"), 1790, [REFUTED] + [CONFIRMED] * 4),
            (("hit_rates", "int8"), 0.75, [CONFIRMED, REFUTED] + [CONFIRMED] * 3),
            (("hit_rates", "fp8_e4m3"), 0.6, [CONFIRMED, CONFIRMED, REFUTED, CONFIRMED, CONFIRMED]),
            (("tasks", "int8", "qa", "agreement"), 0.98, [CONFIRMED] * 3 + [REFUTED, CONFIRMED]),
            (("tasks", "fp8_e4m3", "maths", "perplexity_change"), 0.006, [CONFIRMED] * 4 + [REFUTED]),
        ],
    ),
    "A5": (
        pace.a5,
        {"goodput": [10.0, 31.0], "hit_rates": [0.0, 0.9], "running": [10.0, 31.0]},
        [CONFIRMED] * 2,
        [(("goodput", 1), 29.0, [REFUTED, CONFIRMED]), (("running", 0), 11.0, [CONFIRMED, REFUTED])],
    ),
    "A6": (
        cache.a6,
        {
            "busy": {"load": 15.0, "runs": {name: served(0.2, 1.0) for name in ("0.85 16", "0.85 8", "0.90 16", "0.90 8")}},
            "quiet": {
                "load": 5.0,
                "runs": {
                    "0.85 16": served(0.19, 0.9), "0.85 8": served(0.21, 0.8), "0.90 16": served(0.2, 0.9),
                    "0.90 8": served(0.30, 0.6),
                },
            },
        },
        [CONFIRMED] * 3,
        [
            (("quiet", "runs", "0.90 8", "hit_rate"), 0.26, [REFUTED, CONFIRMED, CONFIRMED]),
            (("quiet", "runs", "0.90 8", "ttft"), 0.7, [CONFIRMED, REFUTED, CONFIRMED]),
            (("quiet", "runs", "0.85 8", "hit_rate"), 0.195, [CONFIRMED, CONFIRMED, REFUTED]),
            (("busy", "runs", "0.90 8"), served(0.1, 5.0), [CONFIRMED] * 3),  # the better load counts
        ],
    ),
    "A7": (
        cache.a7,
        {"runs": {"30": served(0.2, 0.6), "500": served(0.7, 0.3)}},
        [CONFIRMED] * 2,
        [(("runs", "500", "hit_rate"), 0.59, [REFUTED, CONFIRMED]), (("runs", "500", "ttft"), 0.4, [CONFIRMED, REFUTED])],
    ),
    "A8": (
        pace.a8,
        {
            "load": 20.0,
            "rounds": {
                "before": served(0.2, 0.9) | {"requests_per_second": 22.0},
                "round 3": served(0.8, 0.3) | {"requests_per_second": 42.0},
            },
        },
        [CONFIRMED] * 2,
        [
            (("rounds", "round 3", "requests_per_second"), 38.0, [REFUTED, CONFIRMED]),
            (("rounds", "round 3", "ttft"), 0.4, [CONFIRMED, REFUTED]),
        ],
    ),
    "B11": (
        pace.b11,
        {"requests_per_second": {"before": 10.0, "int8": 18.5}},
        [CONFIRMED],
        [(("requests_per_second", "int8"), 17.5, [REFUTED])],
    ),
    "A9": (
        load_rules.a9,
        {
            "all": bucket(0.8, 0.05),
            "caller": {"chat": bucket(0.9, 0.04), "reports": bucket(0.0, 0.2)},
            "prompt length": {"short": bucket(0.9, 0.04), "long": bucket(0.0, 0.2)},
            "interval": {"1": bucket(0.8, 0.05)},
        },
        [CONFIRMED] * 2,
        [
            (("all", "hit_rate"), 0.6, [REFUTED, CONFIRMED]),
            (("caller", "reports", "ttft_p50"), 0.1, [REFUTED, CONFIRMED]),
            (("caller", "chat", "hit_rate"), 0.4, [CONFIRMED, REFUTED]),
            (("prompt length", "short", "hit_rate"), 0.3, [CONFIRMED, REFUTED]),
        ],
    ),
    "A10": (
        load_rules.a10,
        {
            "runs": {
                "4": {"hit_rate": 0.9, "ttft": 5.0, "queue": 4.9}, "32": {"hit_rate": 0.9, "ttft": 0.1, "queue": 0.02},
                "256": {"hit_rate": 0.9, "ttft": 0.3, "queue": 0.2},
            }
        },
        [CONFIRMED] * 2,
        [
            (("runs", "4", "queue"), 2.0, [REFUTED, CONFIRMED]),
            (("runs", "256", "ttft"), 0.105, [CONFIRMED, REFUTED]),
        ],
    ),
    "A11": (
        load_rules.a11,
        {
            "runs": {"in front": served(0.02, 0.3), "behind": served(0.8, 0.1)},
            "found_at": 6, "planted_at": 6, "computed_before": 0.02, "computed_after": 0.8,
        },
        [CONFIRMED],
        [(("runs", "in front", "hit_rate"), 0.2, [REFUTED])],
    ),
    "A12": (
        block_rules.a12,
        {
            "allocations": 1_000_000, "pool": 4096, "failures": 0, "largest_after": 4096, "slowest_tenth": 1.1,
            "warm_prefix_left": {"0.5": 1.0, "2": 0.0},
        },
        [REFUTED],
        [(("failures",), 1, [CONFIRMED]), (("largest_after",), 4095, [CONFIRMED])],
    ),
    "A13": (
        load_rules.a13,
        {
            "cold": {"ttft": 0.2, "ttft_max": 0.3, "cached_tokens": 5}, "warm": {"ttft": 0.1, "ttft_max": 0.1, "cached_tokens": 9}
        },
        [CONFIRMED],
        [(("warm", "ttft"), 0.19, [REFUTED])],
    ),
    "B12": (
        lambda values: block_rules.b12_memory(values) + block_rules.b12_needle(values),
        {
            "window": 128,
            "curves": {"full": {"100": 10, "2000": 200, "3000": 300}, "window": {"100": 10, "2000": 40, "3000": 40}},
            "retrieved": {"full": {"256": 1.0, "512": 0.8}, "window": {"256": 0.0, "512": 0.0}},
        },
        [CONFIRMED] * 2,
        [
            (("curves", "window", "3000"), 60, [REFUTED, CONFIRMED]),
            (("retrieved", "window", "256"), 0.8, [CONFIRMED, REFUTED]),
            (("retrieved", "full"), {"256": 0.2, "512": 0.0}, [CONFIRMED, OPEN]),
        ],
    ),
    "B13": (
        pace.b13,
        {"tokens_per_second": {"1": {"eager": 4.0, "compiled, C = 1": 10.0, "compiled, C = 8": 11.0}}},
        [CONFIRMED] * 2,
        [
            (("tokens_per_second", "1", "eager"), 1.0, [REFUTED] * 2),
            (("tokens_per_second", "1", "compiled, C = 8"), 13.0, [CONFIRMED, REFUTED]),
            (("tokens_per_second", "1", "compiled, C = 1"), 7.0, [REFUTED, CONFIRMED]),  # eager does better than claimed
        ],
    ),
    "B14": (
        block_rules.b14,
        {
            "gpus": 4,
            "kv_bytes_per_token": 400,
            "shard_bytes": [100] * 4,
            "replicas": {
                "in turn, without prefix cache": {"spread": 1.0, "hit_rate": 0.0},
                "in turn, with prefix cache": {"spread": 1.0, "hit_rate": 0.7},
                "by prefix, with prefix cache": {"spread": 2.0, "hit_rate": 0.8},
            },
        },
        [REFUTED] * 2,
        [
            (("shard_bytes",), [100, 100, 90, 110], [CONFIRMED, REFUTED]),
            (("replicas", "in turn, without prefix cache", "spread"), 1.5, [REFUTED, CONFIRMED]),
        ],
    ),
    "A14": (
        lambda values: room.a14_plan(values) + block_rules.a14_ran(values),
        {
            "max_model_len": 4096, "told": 11, "fit": 11, "fit_half": 22, "length": 4096,
            "ran": {"told": True, "one_more": False, "half_as_long": True},
        },
        [CONFIRMED] * 2,
        [
            (("fit",), 10, [REFUTED, CONFIRMED]),
            (("ran", "told"), False, [CONFIRMED, REFUTED]),
            (("ran", "one_more"), True, [CONFIRMED, REFUTED]),
        ],
    ),
}  # fmt: skip


def judged(rule, values):
    verdicts = rule(values)
    assert all(verdict.what and verdict.claimed and verdict.ours and verdict.why for verdict in verdicts)
    return [verdict.verdict for verdict in verdicts]


def test_every_row_is_judged():
    rows = {f"{article}{number}" for article in "AB" for number in range(1, 15)}
    assert len(rows) == 28
    assert set(CLAIMS) == set(CASES) == {row for part in PARTS for row in part.rules} == rows


@pytest.mark.skipif(not CLAIMS_FILE.is_file(), reason="the list of claims lies beside the checkout")
def test_no_row_of_the_list_is_forgotten():
    """A4 and B11 stand inside other rows there."""
    lines = CLAIMS_FILE.read_text().splitlines()
    heads = [line.split("|")[1].strip() for line in lines if line.startswith("| ")]
    assert set(heads) - {"id"} == set(CLAIMS) - {"A4", "B11"}


@pytest.mark.parametrize("row", CASES)
def test_verdicts_follow_the_measured_values(row):
    rule, values, expected, changes = CASES[row]
    assert judged(rule, values) == expected
    assert changes and any(then != expected for *_, then in changes)
    for path, value, then in changes:
        changed = copy.deepcopy(values)
        place = changed
        for key in path[:-1]:
            place = place[key]
        assert path[-1] in place or isinstance(place, list)
        place[path[-1]] = value
        assert judged(rule, changed) == then, (path, value)


@pytest.mark.parametrize("row", CASES)
def test_the_registry_uses_the_rules_that_are_tested(row):
    """Each rule of a row, on the case's values or on those of the capacity measurement, gives verdicts of this row."""
    rule, values, _, _ = CASES[row]
    assert {verdict.claim for verdict in rule(values)} == {row}
    whats = set()
    for part in PARTS:
        if row in part.rules:
            of_part = values | {row: values} if part.name == "capacity" else values
            whats |= {verdict.what for verdict in part.rules[row](of_part)}
    assert whats == {verdict.what for verdict in rule(values)}


def test_a_row_of_several_claims():
    def of(*words):
        return of_row([Verdict("B1", "", "", "", word, "") for word in words])

    assert of(CONFIRMED, CONFIRMED) == CONFIRMED
    assert of(CONFIRMED, REFUTED, OPEN) == REFUTED
    assert of(CONFIRMED, OPEN) == CONFIRMED
    assert of(OPEN, OPEN) == OPEN


def run(*arguments):
    command = [sys.executable, str(ROOT / "scripts" / "reproduce_articles.py"), *arguments]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts")]),
    }
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, env=environment)
    return done.returncode, json.loads(done.stdout.splitlines()[-1]) if done.stdout else None, done.stderr


def test_the_program_in_simulation(tmp_path):
    code, document, error = run(
        "--mode=simulation", "--quick", "--only=b4,A11,A12,B11,B12,A14,B13", f"--plot={tmp_path}/new"
    )
    assert code == 0 and document["ok"], error
    rows = {result["row"]: result["verdict"] for result in document["results"] if result.get("metric") == "row"}
    assert rows == {
        "A11": CONFIRMED, "A12": REFUTED, "A14": CONFIRMED, "B11": CONFIRMED, "B12": CONFIRMED, "B13": OPEN, "B4": REFUTED
    }  # fmt: skip
    verdicts = [result for result in document["results"] if result.get("claim") == "A11"]
    assert verdicts[0]["engine"] == "llama-2-7b on a100-40g, simulated" and "token 6 (planted: 6)" in verdicts[0]["why"]
    (eager,) = [result for result in document["results"] if result.get("claim") == "B13"]
    assert "--mode=cpu or gpu" in eager["skipped"]
    assert [pathlib.Path(file).name for file in document["files"]] == ["memory_by_length.png", "three_steps.png"]
    assert pathlib.Path(document["files"][0]).read_bytes().startswith(b"\x89PNG")


def test_mistakes_are_named():
    code, document, error = run("--only=B1,C3")
    assert (code, document) == (2, None) and "only has C3; there are B1, B2" in error


@pytest.mark.slow
def test_the_program_on_tiny_engines():
    code, document, error = run("--mode=cpu", "--quick", "--only=A13")
    assert code == 0, error
    real = [
        result for result in document["results"] if result.get("metric") == "part" and "machine" in result["engine"]
    ]
    assert [part["name"] for part in real] == ["restart"]
    # Four prompts of 96 tokens, each asked twice: the first user of each finds all of it only when it was warmed.
    assert real[0]["values"]["cold"]["cached_tokens"] < real[0]["values"]["warm"]["cached_tokens"] == 8 * 96
