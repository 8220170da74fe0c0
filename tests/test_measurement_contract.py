"""What every measuring program promises: the JSON line, the flags, the exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = """
from jaxkv import measurement
from jaxkv.core.errors import ConfigError

def measure(report):
    fast = report.add("fast", [4.0, 2.0, 3.0], unit="tokens/s", metric="throughput", engine="a", dtype="float32")
    slow = report.add("slow", [2.0], unit="tokens/s", metric="throughput", engine="b")
    report.skip("gone", "not installed", engine="c")
    report.ratio("told", slow, fast, target=None)
    BODY

measurement.run("example", lambda: {"size": 1}, measure)
"""


def run(body, *arguments):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROGRAM.replace("BODY", body), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


def test_document_and_tables(tmp_path):
    done = run('report.ratio("judged", fast, slow, target=1.5)', f"--json-out={tmp_path / 'out.json'}", "--quick")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert json.loads((tmp_path / "out.json").read_text()) == (document := json.loads(line))
    assert document["schema"] == "jaxkv.result/1" and document["config"] == {"size": 1} and document["ok"] is True
    assert document["results"][0] == {
        "name": "fast", "engine": "a", "dtype": "float32", "metric": "throughput", "unit": "tokens/s",
        "value": 3.0, "min": 2.0, "max": 4.0, "runs": 3,
    }  # fmt: skip
    assert document["results"][2] == {"name": "gone", "engine": "c", "value": None, "skipped": "not installed"}
    told, judged = document["ratios"]
    assert told == {
        "name": "told", "numerator": "slow", "denominator": "fast", "value": 2 / 3, "target": None, "ok": True,
    }  # fmt: skip
    assert (judged["value"], judged["target"], judged["ok"]) == (1.5, 1.5, True)
    assert document["device"]["load"] >= 0 and document["device"]["load_at_start"] >= 0
    assert "load average on" in done.stderr and "skipped: not installed" in done.stderr


def test_help():
    done = run("pass", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--[no-]quick" in done.stdout and "Print nothing but the JSON line." in done.stdout


@pytest.mark.parametrize(
    ("body", "arguments", "code", "text"),
    [
        ('report.ratio("judged", slow, fast, target=1.5)', ["--json_only"], 1, ""),
        ('raise ConfigError("size is 1; it must be 2")', [], 2, "example: size is 1; it must be 2\n"),
        ("pass", ["--sise=2"], 2, "example: jaxkv has no flag --sise; --help lists those it has\n"),
        ('measurement.check_installed("no_such", extra="plot")', [], 3, "example: no_such is not installed (pip install -e '.[plot]')\n"),
        ("pass", ["--json_out=no/such/x"], 2, "example: json_out is 'no/such/x', in a folder that does not exist\n"),
        ("pass", ["word"], 2, "example: unexpected argument 'word'\n"),
        ('raise measurement.AbsentError("no GPU here")', [], 3, "example: no GPU here\n"),
    ],
)
def test_exit_codes(body, arguments, code, text):
    done = run(body, *arguments)
    assert (done.returncode, done.stderr) == (code, text)
    assert bool(done.stdout) == (code == 1)  # a failed check is still a result
    if done.stdout:
        assert json.loads(done.stdout)["ok"] is False
