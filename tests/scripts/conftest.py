"""Runs the programs in a process of their own: with start_engine replaced by one over a scripted engine, or, for those
that measure, with the real one on a tiny random model."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from benchlib.random_model import write_random_model

ROOT = pathlib.Path(__file__).parents[2]
STUB = f"""
import pathlib, runpy, sys, time, types
tests = pathlib.Path({str(ROOT / "tests")!r})
fake = runpy.run_path(str(tests / "fake_engine.py"))
tokenizer = runpy.run_path(str(tests / "small_tokenizers.py"))["byte_level"]()


def start_engine(config, *, progress):
    if config.model == "missing":
        from jaxkv.core.errors import CheckpointError
        raise CheckpointError("--model=missing: no such file")
    if config.model == "large":
        time.sleep(2)
    progress.update("load", 1, 1)
    if config.model == "logged":
        from jaxkv.server import periodic_log
        periodic_log.INTERVAL_S = 0.05
    def script(request):
        if tokenizer.decode(request.prompt_token_ids) == "break": 1 / 0
        if tokenizer.decode(request.prompt_token_ids) == "slowly":
            engine.step_seconds = 0.2
            return tokenizer.encode("x", add_special_tokens=False) * 200
        return [*tokenizer.encode("Hello 👋!", add_special_tokens=False), tokenizer.eos_token_id]
    engine = fake["FakeEngine"](script, eos=(tokenizer.eos_token_id,), step_seconds=0.001)
    return fake["fake_started"](engine, tokenizer)


module = types.ModuleType("jaxkv.startup")
module.start_engine = start_engine
sys.modules["jaxkv.startup"] = module
script, *sys.argv = [sys.argv[1], *sys.argv[1:]]
runpy.run_path(script, run_name="__main__")
"""


@pytest.fixture
def program():
    """program("serve.py", *arguments, **Popen options) -> Popen with text pipes; killed if it outlives the test."""
    running = []

    def start(name, *arguments, **options):
        process = subprocess.Popen(
            [sys.executable, "-c", STUB, str(ROOT / "scripts" / name), *arguments],
            stdin=options.pop("stdin", subprocess.DEVNULL),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "PYTHONIOENCODING": "utf-8"},
            **options,
        )
        running.append(process)
        return process

    yield start
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


# The same shapes for every program, so that the compilation cache serves all but the first of the first run.
TINY_ENGINE = (
    "--max_num_seqs=4",
    "--max_num_batched_tokens=64",
    "--max_model_len=512",
    "--num_gpu_blocks_override=256",
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A folder with a random model."""
    return write_random_model(tmp_path_factory.mktemp("bench") / "tiny")


@pytest.fixture
def bench(tiny_model):
    """bench("bench_x.py", *flags) -> (exit code, its JSON document or None, stderr), quick and on the tiny model."""

    def run(name, *arguments):
        command = [sys.executable, str(ROOT / "scripts" / name), f"--model={tiny_model}", "--quick", *TINY_ENGINE]
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=550, env=environment)
        document = json.loads(done.stdout.splitlines()[-1]) if done.stdout else None
        return done.returncode, document, done.stderr

    return run
