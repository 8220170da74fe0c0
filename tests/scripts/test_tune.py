"""The tuner on small traces with few values, and as a user runs it."""

import io
import json
import os
import pathlib
import shlex
import subprocess
import sys

import pytest
from benchlib.kv_format_costs import FORMAT_COSTS
from benchlib.tuning_engines import serve_command
from benchlib.tuning_run import Wanted, tune
from rich.console import Console

from jaxkv.core.config import EngineConfig
from jaxkv.core.errors import ConfigError
from jaxkv.flags import define_engine_flags, engine_config, normalized
from jaxkv.measurement import Report
from jaxkv.simulation.fitted_cost import FittedCostModel, read_cost_model

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = ROOT / "scripts" / "tune.py"


def run(*arguments, timeout=500):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments], capture_output=True, text=True, timeout=timeout, env=env
    )
    document = json.loads(done.stdout.splitlines()[-1]) if done.stdout else None
    return done.returncode, document, done.stderr


def write_trace(path, count=60):
    """Twelve conversations in turn, each prompt the one before and more, all from one system prompt; two a second."""
    rows = []
    for number in range(count):
        talk, turn = number % 12, number // 12
        ids = [0, *(1 + 100 * talk + place for place in range(3 * turn + 3))]
        rows.append({"timestamp": 500 * number, "input_length": 64 * len(ids), "output_length": 32, "hash_ids": ids})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# Of the search only the number of rows, from a start that is far too low; all in this process.
ROWS = {"max_num_seqs": [1, 4, 64]}
WANTED = Wanted(
    trace=None,
    synthetic="conversations",
    trace_block_size=None,
    num_requests=1000,
    scale=1,
    device="a100-40g",
    cost_model=None,
    limits=(1.0, 0.1),
    goal_share=0.95,
    speed=None,
    min_gain=0.02,
    max_sweeps=2,
    processes=1,
    check_real=False,
    real_requests=2,
    plot=None,
)


def tuned(trace, space=ROWS, settings={}, **wanted):
    """The document, and what was told on the way."""
    report = Report("tune", {}, timed=False, console=Console(file=io.StringIO(), width=200))
    config = EngineConfig(**{"model": "llama-2-7b", "max_num_seqs": 1} | settings)
    tune(report, WANTED._replace(trace=str(trace), **wanted), config, space)
    report.print_table()
    return report.document(), report.console.file.getvalue()


def results(document, **wanted):
    return [one for one in document["results"] if all(one.get(name) == value for name, value in wanted.items())]


def test_too_few_rows_are_found_and_raised(tmp_path):
    plot = tmp_path / "tuned.png"
    document, told = tuned(write_trace(tmp_path / "trace.jsonl"), plot=str(plot))
    assert document["program"] == "tune" and document["ok"] and document["files"] == [str(plot)]
    assert plot.read_bytes().startswith(b"\x89PNG")
    recommended = document["config"]["recommended"]
    assert recommended["setting"]["max_num_seqs"] > 1
    words = shlex.split(recommended["command"])
    assert words[:2] == ["python", "scripts/serve.py"] and "--model=./llama-2-7b" in words
    assert f"--max_num_seqs={recommended['setting']['max_num_seqs']}" in words and recommended["command"] in told
    (default,) = results(document, kind="default", part="searched")
    (step,) = results(document, kind="step")
    assert step["gain"] == pytest.approx(step["value"] - default["value"]) and step["value"] > 1.5 * default["value"]
    # At the rate that one row just bears, more rows wait less.
    assert step["reference"]["ttft_p95"] < default["reference"]["ttft_p95"]
    held_out = {one["kind"]: one["value"] for one in results(document, part="held out")}
    assert held_out["recommended"] > 1.5 * held_out["default"]
    (ratio,) = document["ratios"]
    assert ratio["value"] == pytest.approx(held_out["recommended"] / held_out["default"]) and ratio["ok"]
    measured = {one["setting"]["max_num_seqs"] for one in results(document, kind="measured")}
    looked = {one["setting"]["max_num_seqs"] for one in results(document, kind="look")}
    assert {1, recommended["setting"]["max_num_seqs"]} <= measured and {4, 64} <= looked | measured
    assert {one["setting"]["max_num_seqs"] for one in results(document, kind="front")} <= measured


def test_one_speed_as_a_user_runs_it(tmp_path):
    """In two processes. Far below what the device can do no setting is better, and that is told."""
    trace = write_trace(tmp_path / "trace.jsonl")
    others = "kv_cache_dtypes gpu_memory_utilizations numbers_of_batched_tokens block_sizes eviction_policies"
    fixed = [f"--{name}=" for name in (*others.split(), "numbers_of_decode_steps")]
    code, document, told = run(
        f"--trace={trace}", "--numbers_of_seqs=4", "--max_num_seqs=1", "--speed=0.5", "--processes=2", *fixed
    )
    assert code == 0, told
    assert "far below" in told and "the default setting stays" in told
    assert document["config"]["recommended"]["setting"]["max_num_seqs"] == 1
    (default,) = results(document, kind="default", part="searched")
    assert default["reference"]["attained"] == 1.0 and default["highest_speed"] is None
    # One request a second, until the last has its last token.
    assert default["value"] == pytest.approx(1.0, rel=0.1)


def test_what_the_engine_refuses_is_told(tmp_path):
    trace = write_trace(tmp_path / "trace.jsonl")
    document, told = tuned(trace, {"kv_cache_dtype": ["int4"]}, speed=1.0)
    assert "kv_cache_dtype int4 is refused: no GPU kernel" in " ".join(told.split())
    (refused,) = results(document, kind="refused")
    assert refused["setting"]["kv_cache_dtype"] == "int4" and "no GPU kernel" in refused["skipped"]


def test_what_the_trace_does_not_tell_is_not_searched(tmp_path):
    """Ids of blocks of 64 tokens: what blocks of 128 share by the token is not known."""
    trace = write_trace(tmp_path / "trace.jsonl")
    document, told = tuned(trace, {"block_size": [16, 128]}, speed=1.0)
    assert "block_size is not searched" in told and not results(document, kind="look")
    document, told = tuned(trace, {"block_size": [16, 32]}, speed=1.0)
    assert "not searched" not in told
    assert {one["setting"]["block_size"] for one in results(document, kind="look")} == {16, 32}


def test_mistakes_are_named(tmp_path):
    for argument, message in (
        ("--numbers_of_seqs=many", "numbers_of_seqs is 'many'"),
        ("--ttft_limit=0", "ttft_limit is 0.0"),
        ("--goal_share=2", "goal_share is 2.0"),
        ("--check_real", "only detect"),
        ("--device=abacus", "device is 'abacus'"),
    ):
        code, document, told = run(argument)
        assert (code, document) == (2, None) and message in told and "Traceback" not in told, told


def test_traffic_that_cannot_be_tuned_for_is_refused(tmp_path):
    trace = write_trace(tmp_path / "trace.jsonl")
    at_once = tmp_path / "at_once.jsonl"
    row = json.dumps({"timestamp": 0, "input_length": 64, "output_length": 2, "hash_ids": [0]})
    at_once.write_text(f"{row}\n" * 8)
    for options, message in (
        ({"device": "detect"}, "calibrate_cost_model.py"),
        ({"limits": (1e-6, 0.1)}, "one by one"),
        ({"limits": (1e3, 1e3)}, "come at once"),
        ({"settings": {"max_model_len": 100}}, "0 of 60 requests of trace.jsonl fit the 100 tokens"),
        ({"trace": at_once}, "arrive all at once"),
    ):
        with pytest.raises(ConfigError, match=message):
            tuned(**{"trace": trace, **options})


def test_the_command_says_what_it_was_made_of():
    from absl import flags

    config = EngineConfig(model="demo", max_num_seqs=4, share_partial_blocks=False, kv_cache_memory_bytes=2**20)
    default = {"max_num_seqs": 4, "kv_cache_dtype": "bfloat16", "block_size": 64, "decode_steps": 0}
    setting = default | {"max_num_seqs": 32, "kv_cache_dtype": "int8"}
    command = serve_command(config, setting, default)
    values = flags.FlagValues()
    define_engine_flags(values)
    values(["serve", *normalized(shlex.split(command)[2:], values)])
    expected = EngineConfig(
        model="demo", max_num_seqs=32, kv_cache_dtype="int8", share_partial_blocks=False, kv_cache_memory_bytes=2**20
    )
    assert engine_config(values) == expected


def test_costs_of_formats_are_those_of_the_readme():
    """The rows of the table that hold for the default rotation."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## What a smaller cache costs")[2]
    rows = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and cells[0].startswith("`") and "--kv_rotation=none" not in cells[0]:
            rows[cells[0].split("`")[1]] = float(cells[2].rstrip(" %")), float(cells[3])
    assert rows == {name: tuple(cost) for name, cost in FORMAT_COSTS.items() if name != "float32"}


# As conftest's TINY_ENGINE: the executables are there already.
TINY = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 512, "num_gpu_blocks_override": 256}


def test_settings_are_served_for_real(tmp_path, tiny_model):
    """By made-up costs, where a call costs as much as 50 steps; what is real here is the serving."""
    cost_model = tmp_path / "costs.json"
    costs = FittedCostModel(0.05, ((64, 5e-3),), 1e-8, ((1, 1e-3), (4, 1e-3)), 1e-8)
    cost_model.write_text(costs.to_json())
    document, told = tuned(
        write_trace(tmp_path / "trace.jsonl"),
        {"decode_steps": [8], "kv_cache_dtype": ["int8"], "gpu_memory_utilization": [0.5]},
        settings={"model": str(tiny_model), "decode_steps": 1, **TINY},
        device="detect",
        cost_model=str(cost_model),
        scale=4,
        check_real=True,
        real_requests=30,
    )
    for name in ("kv_cache_dtype", "gpu_memory_utilization"):
        assert f"{name} is not searched" in told
    assert document["config"]["recommended"]["setting"]["decode_steps"] == 8
    served = {(one["engine"], one["kind"]): one["served"] for one in results(document, part="served for real")}
    assert served.keys() == {(by, kind) for by in ("simulated", "jaxkv") for kind in ("default", "recommended")}
    for kind in ("default", "recommended"):
        (simulated,), (real, again) = served["simulated", kind], served["jaxkv", kind]
        # Every request was served, with the hits that were foretold: of its own talk, or of the system prompt.
        assert real["ttft_mean"] > 0 and real["speed"] == simulated["speed"] and again["hit_rate"] == real["hit_rate"]
        assert real["hit_rate"] == pytest.approx(simulated["hit_rate"], abs=0.1) and real["hit_rate"] > 0.3
    assert [check["name"] for check in document["checks"]] == ["real engine ranks as simulated"]
    assert f"--model={tiny_model} " in document["config"]["recommended"]["command"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_real_engine_ranks_settings_as_foretold(tmp_path):
    """The demo model on this machine, on costs that were measured just before."""
    engine = ["--max_num_batched_tokens=256", "--max_model_len=768", "--num_gpu_blocks_override=200"]
    costs = tmp_path / "costs.json"
    calibrate = [str(ROOT / "scripts" / "calibrate_cost_model.py"), f"--output={costs}", "--rounds=2", "--no-validate"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, *calibrate, "--max_num_seqs=8", *engine], check=True, env=env)
    measured = read_cost_model(costs)
    code, document, told = run(
        "--model=demo",
        "--device=detect",
        f"--cost_model={costs}",
        "--scale=8",
        "--num_requests=200",
        # By how fast the machine is now.
        f"--ttft_limit={5 * measured.prefill_seconds[-1][1]}",
        f"--itl_limit={8 * measured.decode_seconds[-1][1]}",
        "--max_num_seqs=1",
        "--numbers_of_seqs=2,8",
        "--numbers_of_batched_tokens=",
        "--check_real",
        "--real_requests=40",
        *engine,
        timeout=3000,
    )
    assert code == 0, told
    assert document["config"]["recommended"]["setting"]["max_num_seqs"] > 1
    checks = {check["name"]: check["ok"] for check in document["checks"]}
    assert checks == {"real engine ranks as simulated": True}
