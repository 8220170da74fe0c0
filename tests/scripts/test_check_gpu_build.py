"""check_gpu_build as a user runs it: it never passes unchecked."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from gpulib import deviceless

PROGRAM = pathlib.Path(__file__).parents[2] / "scripts" / "check_gpu_build.py"


def run(*arguments, path=None):
    env = {**os.environ, "PYTHONPATH": str(PROGRAM.parents[1])} | ({} if path is None else {"PATH": path})
    command = [sys.executable, str(PROGRAM), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)


def test_without_the_tools_it_says_what_to_install(monkeypatch, tmp_path):
    if deviceless.missing() is None:  # as if ptxas were not there
        monkeypatch.setattr(deviceless, "find_tool", lambda name: None)
        assert (
            deviceless.missing()
            == "ptxas is neither among the installed packages nor on the PATH: " + deviceless.INSTALL
        )
        return
    done = run("--kernels=block_copy", path=str(tmp_path))
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.endswith("pip install -e '.[gpu-build]'\n")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--kernels=decoder", "kernels has decoder; there are: "),
        ("--targets=v100", "targets has v100; there are: a100, h100, h200"),
        ("--step_models=gpt-2", "step_models has gpt-2; there are: llama-3-8b, "),
    ],
)
def test_mistakes_are_named(argument, message):
    done = run(argument)
    assert (done.returncode, done.stdout) == (2, "") and message in done.stderr, done.stderr


@pytest.mark.gpu_build
def test_one_kernel(tmp_path):
    done = run("--kernels=kv_write/int8/d128/t64", "--targets=h200", "--no-steps", f"--keep={tmp_path / 'kept'}")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["checks"] == [{"name": "kv_write/int8/d128/t64 on h200", "ok": True, "problems": []}]
    figures = document["results"][0]["figures"]
    assert 0 < figures["registers"] <= 32 and figures["threads"] == 32 and figures["spilled"] == 0
    assert list(tmp_path.rglob("*.ptx"))
