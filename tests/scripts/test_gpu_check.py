"""scripts/gpu_check.py: what it does without a GPU, with parts that fail, and how it judges."""

import json
import os
import subprocess
import sys
from pathlib import Path

import gpu_check
import pytest
from benchlib.token_parity import compare_tokens

from jaxkv import measurement
from jaxkv.core.request import TokenLogprobs

ROOT = Path(__file__).parents[2]


def run(*arguments):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"}
    command = [sys.executable, str(ROOT / "scripts/gpu_check.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=550, env=environment)


def test_without_a_gpu_it_says_so_at_once():
    done = run()
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == "gpu_check: no GPU: JAX sees 1 cpu (cpu); --interpret runs a part of it anywhere\n"


def test_users_errors():
    for argument, text in (
        ("--parts=kernels,benches", "parts has benches; there are kernels, tests, engine, bench"),
        ("--ops=copy", "ops has copy; there are kv_write"),
    ):
        done = run(argument)
        assert (done.returncode, done.stderr) == (2, f"gpu_check: {text}" + done.stderr.partition(text)[2])


def test_interpreted_kernels_pass(tmp_path):
    done = run(
        "--interpret", "--parts=kernels", "--ops=kv_write,decode_attention", f"--json_out={tmp_path / 'out.json'}"
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert json.loads((tmp_path / "out.json").read_text())["results"] == document["results"]
    ratios = {ratio["name"]: (ratio["value"], ratio["target"]) for ratio in document["ratios"]}
    assert ratios == {
        "kv_write cases right": (1, 1),
        "decode_attention cases right": (1, 1),
        "parts that ran to their end": (1, 1),
    }
    values = {result["name"]: result["value"] for result in document["results"]}
    assert values["decode_attention cases"] == 2 and values["decode_attention largest error"] <= 1


def test_what_does_not_fit_the_time_is_not_begun_and_told():
    done = run("--interpret", "--deadline_s=1")
    document = json.loads(done.stdout)
    assert done.returncode == 1 and document["ok"] is False
    skipped = [result["name"] for result in document["results"] if result.get("skipped") == "not begun within 1 s"]
    assert skipped == [*gpu_check.OPS, "engine, auto K/V", "bench_kernels"]


def ran(code, *, part="kernels", seconds=60, read=gpu_check._read_document):
    """(whether a process of that Python code ran to its end, the report)"""
    report = measurement.Report("gpu_check", {})
    return gpu_check._run(report, gpu_check.Step(part, "step", ("-c", code), read), seconds), report


WRITES = """
import json, sys
out = next(a for a in sys.argv if a.startswith("--json_out=")).partition("=")[2]
result = {"name": "half done", "engine": "e", "value": 3}
ratio = {"name": "right", "value": 0.5, "target": 1.0, "ok": False}
json.dump({"program": "p", "results": [result], "ratios": [ratio], "device": {}, "versions": {}}, open(out, "w"))
"""


@pytest.mark.parametrize(
    ("code", "seconds", "ended", "reason"),
    [
        (WRITES + "sys.exit(1)", 60, True, None),  # it found something wrong, and said so
        (WRITES + "import os; os.abort()", 60, False, "ended with exit code -6"),
        (WRITES + "import time; time.sleep(600)", 8, False, "stopped after 8 s"),
        ("import sys; sys.exit(3)", 60, False, "ended with exit code 3"),
        ("pass", 60, False, "ended with exit code 0"),  # and left nothing
    ],
)
def test_what_a_part_measured_outlives_it(code, seconds, ended, reason):
    came_to_end, report = ran(code, seconds=seconds)
    assert came_to_end is ended
    assert [r["skipped"] for r in report.results if r.get("skipped")] == [reason] * (reason is not None)
    wrote = code.startswith(WRITES)
    assert [r["name"] for r in report.ratios] == ["right"] * wrote and report.ok is not wrote


JUNIT = """<testsuites><testsuite tests="4" skipped="1" failures="1" errors="0">
<testcase classname="a" name="one"/><testcase classname="a" name="two"><failure message="1 != 2">x</failure></testcase>
<testcase classname="a" name="three"/><testcase classname="a" name="four"><skipped/></testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize(("text", "value"), [(JUNIT, 2 / 3), ('<r><testsuite tests="0" skipped="0"/></r>', 0)])
def test_tests_are_counted(tmp_path, text, value):
    (tmp_path / "junit.xml").write_text(text)
    report = measurement.Report("gpu_check", {})
    gpu_check._read_junit(report, tmp_path / "junit.xml")
    (ratio,) = report.ratios
    assert ratio["value"] == pytest.approx(value) and ratio["ok"] is False
    failed = [(r["name"], r["skipped"]) for r in report.results if r.get("skipped")]
    assert failed == ([("a.two", "failure: 1 != 2")] if value else [])


def told(*tokens):
    """Tokens (id, logprob, the other's id, the other's logprob)."""
    return {"r": tuple(TokenLogprobs(t, lp, 1, ((t, lp), (other, lp2))) for t, lp, other, lp2 in tokens)}


def test_texts_may_part_at_a_near_tie_only():
    same = told((5, -1.0, 6, -2.0), (7, -0.5, 8, -3.0))
    assert compare_tokens(same, same, 0.1) == (1, 2, [])
    near = told((5, -1.0, 6, -2.0), (8, -0.70, 7, -0.75))
    assert compare_tokens(told((5, -1.0, 6, -2.0), (7, -0.7, 8, -0.72)), near, 0.1) == (1, 1, [])
    right, equal, wrong = compare_tokens(same, near, 0.1)  # one of them was sure
    assert (right, equal) == (0, 1) and wrong == ["prompt of r: token 1 is 7, with xla 8, 2.500 apart"]
    assert compare_tokens(told((5, -1.0, 9, -1.01)), told((6, -1.0, 9, -1.01)), 0.1)[0] == 0  # unknown to the other
