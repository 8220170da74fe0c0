#!/usr/bin/env python
"""Settles on a GPU, in minutes, what a machine without one cannot: are the kernels right, and are they fast.

    python scripts/gpu_check.py --json_out=gpu_check.json
    python scripts/gpu_check.py --parts=kernels,bench --deadline_s=300
    python scripts/gpu_check.py --interpret             # anywhere, small and slow, to see that the program works

Parts, in this order:

    kernels   every operation natively against its reference: formats, head_dim, block_size, blocks beyond 4 GiB
    tests     the tests marked gpu, which run natively here
    engine    random weights made on the device: tokens beside XLA's attention, memory, recompilation, tokens a second
    bench     bench_kernels.py at the points that have targets

Each is a process of its own: a kernel that reads where it must not takes its process with it, and nothing else. The JSON
document is rewritten after each.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import flags
from benchlib.partial_report import save

from jaxkv import measurement
from jaxkv.core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
PARTS = ["kernels", "tests", "engine", "bench"]
OPS = ("kv_write", "block_copy", "decode_attention", "prefill_attention", "cascade")
_PARTS = flags.DEFINE_list("parts", None, f"Which to run: {', '.join(PARTS)}; all, but for tests with --interpret.")
_DEADLINE = flags.DEFINE_float("deadline_s", 450.0, "Begin nothing and let nothing run on after so many seconds.")
_INTERPRET = flags.DEFINE_bool("interpret", False, "The kernels in Pallas' interpreter on tiny inputs, no GPU needed.")
_OPS = flags.DEFINE_list("ops", list(OPS), "Which operations of kernels.")

# Seconds that a part may take, so that one which hangs leaves time for the others.
_LONGEST = {"kernels": 100, "tests": 150, "engine": 150, "bench": 200}
_LEAST = 15


@dataclasses.dataclass(frozen=True)
class Step:
    """One process.

    Attributes:
      command: of Python, without the interpreter. read: adds what it left in its file to a report.
    """

    part: str
    name: str
    command: tuple[str, ...]
    read: Callable[[measurement.Report, Path], None]


def _config() -> dict[str, Any]:
    for flag, known in ((_PARTS, PARTS), (_OPS, OPS)):
        if unknown := set(flag.value or ()) - set(known):
            raise ConfigError(f"{flag.name} has {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    names = ("parts", "deadline_s", "interpret", "ops", "quick")
    return {name: flags.FLAGS[name].value for name in names}


def _steps(parts: list[str]) -> list[Step]:
    small = _INTERPRET.value
    ours = f"--implementation={'pallas_triton_interpreted' if small else 'pallas_triton'}"
    tiny = ("--small",) * small

    def kernels(op: str) -> Step:
        command = ("-m", "benchlib.kernel_numerics", f"--op={op}", ours, *tiny)
        return Step("kernels", op, command, _read_document)

    def engine(kv_dtype: str) -> Step:
        command = ("-m", "benchlib.engine_check", f"--kv_cache_dtype={kv_dtype}", ours, *tiny)
        return Step("engine", f"engine, {kv_dtype} K/V", command, _read_document)

    bench = ["scripts/bench_kernels.py", ours]
    bench += (
        ["--rehearse", "--rivals=", "--sections=decode,kv_write"]
        if small
        else ["--rivals=jax_pallas,cudnn_paged,torch_sdpa,cudnn_dense"]
    )
    steps = {
        "kernels": [kernels(op) for op in OPS if op in _OPS.value],
        "tests": [
            Step(
                "tests",
                "tests marked gpu",
                ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "tests/pallas_kernels"),
                _read_junit,
            )
        ],
        "engine": [engine("auto"), engine("int8")][: 1 if small else 2],
        "bench": [Step("bench", "bench_kernels", tuple(bench), _read_document)],
    }
    return [step for part in PARTS if part in parts for step in steps[part]]


def _measure(report: measurement.Report) -> None:
    begin = time.monotonic()

    def seconds_left() -> float:
        return _DEADLINE.value - (time.monotonic() - begin)

    if not _INTERPRET.value:
        report.config["gpu"] = _gpu()
        report.console.print(f"on {report.config['gpu']}", highlight=False)
    parts = _PARTS.value or [part for part in PARTS if part != "tests" or not _INTERPRET.value]
    steps = _steps(parts)
    done = []
    for step in steps:
        if seconds_left() < _LEAST:
            report.skip(step.name, f"not begun within {_DEADLINE.value:.0f} s", engine=step.part)
            continue
        report.console.print(f"== {step.part}: {step.name}, {seconds_left():.0f} s left", highlight=False)
        started = time.monotonic()
        done.append(_run(report, step, min(seconds_left(), _LONGEST[step.part] * (10 if _INTERPRET.value else 1))))
        taken = time.monotonic() - started
        report.add(f"{step.name} took", [taken], unit="s", metric="duration", engine=step.part)
        save(report)
    whole = report.add("parts that ran to their end", [sum(done)], unit="parts", metric="parts", engine="gpu_check")
    asked = report.add("parts asked for", [len(steps)], unit="parts", metric="parts", engine="gpu_check")
    report.ratio("parts that ran to their end", whole, asked, target=1.0)


def _gpu() -> str:
    """The GPU as JAX names it, asked in another process: this one must not hold its memory.

    Raises:
      AbsentError: there is none.
    """
    ask = "import jax; d = jax.devices()[0]; print(d.platform, d.device_kind, len(jax.devices()), sep='|')"
    told = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=120)
    if told.returncode != 0:
        raise measurement.AbsentError(f"JAX does not start here: {(told.stderr.splitlines() or ['?'])[-1]}")
    platform, kind, count = told.stdout.splitlines()[-1].split("|")
    if platform != "gpu":
        raise measurement.AbsentError(
            f"no GPU: JAX sees {count} {kind} ({platform}); --interpret runs a part of it anywhere"
        )
    return f"{count} x {kind}"


def _run(report: measurement.Report, step: Step, seconds: float) -> bool:
    """Run a step to its end or its time's; True if it came to its end. Its progress goes to stderr."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        where = f"--junitxml={out}" if step.part == "tests" else f"--json_out={out}"
        limit = (f"--deadline_s={max(seconds - 20, 1):.0f}",) if step.part == "bench" else ()
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts")]),
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        process = subprocess.Popen(
            [sys.executable, *step.command, where, *limit],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr if step.part == "tests" else subprocess.DEVNULL,
            start_new_session=True,
        )
        ended = True
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            ended, code = False, None
        finally:
            if process.poll() is None:  # at an interrupt too
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if out.is_file():
            step.read(report, out)
        else:
            ended = False
        if not ended or code not in (0, 1):  # 1: it came to its end and found something wrong
            reason = f"stopped after {seconds:.0f} s" if code is None else f"ended with exit code {code}"
            report.skip(step.name, reason, engine=step.part)
            ended = False
        return ended


def _read_document(report: measurement.Report, path: Path) -> None:
    """Results and ratios of a measuring program, judged there."""
    document = json.loads(path.read_text(encoding="utf-8"))
    report.results += document["results"]
    report.ratios += document["ratios"]
    report.config.setdefault("parts_on", {})[document["program"]] = document["device"] | document["versions"]


def _read_junit(report: measurement.Report, path: Path) -> None:
    """Tests, and those that failed by name."""
    suite = xml.etree.ElementTree.parse(path).getroot().find("testsuite")
    total, skipped = (int(suite.get(key)) for key in ("tests", "skipped"))
    failed = 0
    for case in suite.iter("testcase"):
        for kind in ("failure", "error"):
            if (problem := case.find(kind)) is not None:
                failed += 1
                name = f"{case.get('classname')}.{case.get('name')}"
                report.skip(name, f"{kind}: {(problem.get('message') or '')[:300]}", engine="tests")
    passed = report.add("tests passed", [total - skipped - failed], unit="tests", metric="right", engine="tests")
    # None at all is a failure: the mark or the folder is wrong.
    run = report.add("tests run", [max(total - skipped, 1)], unit="tests", metric="tests", engine="tests")
    report.ratio("tests passed", passed, run, target=1.0)


if __name__ == "__main__":
    measurement.run("gpu_check", _config, _measure)
