"""The evaluation of KV formats as a user runs it, on a random model whose tokens are bytes."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]


def run(*arguments, path=""):
    command = [sys.executable, str(ROOT / "scripts" / "eval_kv_quality.py"), *map(str, arguments)]
    env = os.environ | {"PYTHONPATH": f"{path}:{ROOT}:{ROOT / 'scripts'}", "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)


def test_formats_on_a_text(tiny_model, tmp_path):
    text = tmp_path / "numbers.txt"
    text.write_text(" ".join(map(str, range(100)))[:200])
    flags = [f"--model={tiny_model}", f"--text={text}", "--window=64", "--kv_cache_dtypes=int8;int8,int4", "--kv_rotations=none", "--metrics=teacher_forced", f"--plot={tmp_path / 'quality.png'}"]
    done = run(*flags, "--kv_cache_dtypes=bfloat16")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["program"] == "eval_kv_quality" and document["ok"]
    found = {result["kv_cache_dtype"]: result for result in document["results"]}
    assert list(found) == ["int8", "int8,int4", "bfloat16"]
    # Two layers, keys and values in two heads of 16: bytes, with scales of two bytes, and of groups with zero points.
    assert [result["kv_bytes_per_token"] for result in found.values()] == [144, 4 * (18 + 12), 256]
    for result in found.values():
        # 200 bytes fill three windows; what is left fills none.
        assert (result["num_tokens"], result["num_windows"]) == (192, 3)
        assert result["value"] == pytest.approx(np.mean(result["kl_by_window"]))
        assert 0 < result["value"] < result["kl_p99"] and result["kl_goal"] is None
        assert result["perplexity_change"] == pytest.approx(result["perplexity"] / result["base_perplexity"] - 1)
    assert found["bfloat16"]["value"] < found["int8"]["value"] < found["int8,int4"]["value"]
    assert document["files"] == [flag.removeprefix("--plot=") for flag in flags if flag.startswith("--plot=")]
    assert all(pathlib.Path(file).stat().st_size for file in document["files"])


def test_prompts_are_sequences_of_their_own(tiny_model, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("A first prompt.\n\nAnother\n" + "x" * 70 + "\n")
    flags = [f"--model={tiny_model}", f"--prompts={prompts}", "--window=32", "--kv_cache_dtypes=int8", "--kv_rotations=hadamard", "--metrics=teacher_forced", "--json_only"]
    done = run(*flags)
    assert done.returncode == 0 and not done.stderr, done.stderr
    (result,) = json.loads(done.stdout)["results"]
    assert (result["num_tokens"], result["num_windows"]) == (15 + 7 + 64, 4)


def test_mistakes_are_named(tiny_model, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    for arguments, message in (
        (["--kv_cache_dtypes=int8;int3"], "kv_cache_dtypes has 'int3'"),
        (["--text=/no/such/file"], "/no/such/file"),
        ([f"--text={empty}", f"--prompts={empty}"], "choose one"),
        ([f"--prompts={empty}"], "holds no text"),
        (["--window=10000"], "takes 8192 tokens at most"),
        (["--plot=quality.jpg"], "must end in .png"),
        (["--metrics=bleu"], "metrics is 'bleu'; there are teacher_forced, tasks, generation"),
        (["--metrics=tasks", "--plot=quality.png"], "add it to metrics"),
        (["--metrics=generation", "--max_tokens=9000"], "max_tokens is 9000"),
    ):
        done = run(f"--model={tiny_model}", *arguments)
        assert done.returncode == 2 and message in done.stderr, (arguments, done.stderr)


def test_tasks_and_generated_texts(tiny_model, tmp_path):
    text = tmp_path / "numbers.txt"
    text.write_text(" ".join(map(str, range(200))))
    flags = ["--metrics=tasks,generation", "--kv_rotations=auto", "--kv_cache_dtypes=int4;float32", "--num_prompts=2"]
    done = run(f"--model={tiny_model}", f"--text={text}", "--window=300", "--max_tokens=40", "--num_summaries=2", *flags)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    results = {(result["name"], result.get("text_kind", "greedy")): result for result in document["results"]}
    # A passage does not fit 300 bytes.
    assert set(results) == {(name, kind) for name in ("int4 hadamard", "float32") for kind in ("maths", "greedy")}
    maths = results["int4 hadamard", "maths"]
    assert maths["value"] > 0 and 0 < maths["num_tokens"] < 300 * maths["num_windows"] == 600
    assert results["float32", "maths"]["value"] == 0
    same, int4 = (results[name, "greedy"] for name in ("float32", "int4 hadamard"))
    assert (same["value"], same["min"], same["identical"], same["rouge_l_to_float32"]) == (40, 40, 2, 1)
    assert same["rouge_l_loss"] == 0
    assert int4["runs"] == int4["num_prompts"] == int4["num_summaries"] == 2 and int4["max"] <= 40


def test_without_rouge_score_only_generation_ends_early(tiny_model, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['rouge_score'] = None\n")
    done = run(f"--model={tiny_model}", "--metrics=tasks,generation", path=tmp_path)
    assert done.returncode == 3 and "rouge_score is not installed" in done.stderr and ".[eval]" in done.stderr
    done = run(f"--model={tiny_model}", "--metrics=tasks", "--quick", "--kv_cache_dtypes=int8", "--kv_rotations=none", path=tmp_path)
    assert done.returncode == 0, done.stderr
