"""The capacity planner as a user runs it, and its verdicts on two articles."""

import json
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest
from articlelib.capacity import num_that_fit
from articlelib.judge_capacity import verdicts
from gpulib.deviceless import missing
from gpulib.step_programs import MODELS

from jaxkv.capacity import mean_waste, plan_capacity
from jaxkv.core.config import EngineConfig
from jaxkv.device import DEVICES
from jaxkv.execution.memory import GiB, gpu_share
from jaxkv.loading.model_config import parse_hf_config
from pallas_kernels.kv_format import FORMATS

ROOT = pathlib.Path(__file__).parents[2]
LLAMA_3_2_1B = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "max_position_embeddings": 131_072, "rope_theta": 500_000.0, "tie_word_embeddings": True,
}  # fmt: skip


def run(*command):
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}", "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def test_a_config_file_is_all_it_needs(tmp_path):
    folder = tmp_path / "llama-3.2-1b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_3_2_1B))
    flags = ["--gpu-memory-utilization=0.8", "--kv_cache_dtype=int8", "--block_sizes=32,64", "--lengths=1000,200000"]
    done = run(
        sys.executable, str(ROOT / "scripts" / "plan_capacity.py"), f"--model={folder / 'config.json'}", "--device=24g",
        *flags, "--shard_counts=1,2,3", "--articles",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["program"] == "plan_capacity" and document["config"]["kv_cache_dtype"] == "int8"
    found = {result["name"]: result for result in document["results"]}

    model = parse_hf_config(LLAMA_3_2_1B, "test")
    for name in FORMATS:
        result = found[f"llama-3.2-1b on 24g, kv_cache_dtype {name}"]
        planned = plan_capacity(EngineConfig(gpu_memory_utilization=0.8, kv_cache_dtype=name), model, DEVICES["24g"])
        assert (result["value"], result["capped"]) == (planned.memory.num_tokens, planned.capped)
        assert result["concurrency"] == {"1000": planned.memory.num_blocks / 16, "200000": None}
        assert result["available_bytes"] == gpu_share(DEVICES["24g"].memory, 0.8)
        assert result["temporaries"] == "lower_bound" and result["kv_cache_dtype"] == name
    for size in (32, 64):
        assert found[f"llama-3.2-1b on 24g, block_size {size}"]["waste_tokens"] == mean_waste(size)
    bytes_of = {n: found[f"llama-3.2-1b on 24g, shards {n}"].get("kv_bytes_per_token") for n in (1, 2, 3)}
    assert bytes_of == {1: 16 * 2 * 8 * 66, 2: 16 * 2 * 4 * 66, 3: None}
    assert "3 devices cannot share the model" in found["llama-3.2-1b on 24g, shards 3"]["skipped"]
    # The lines of an engine with these flags, and the verdicts.
    lines = plan_capacity(EngineConfig(gpu_memory_utilization=0.8, kv_cache_dtype="int8"), model, DEVICES["24g"])
    assert "\n".join(f"  {line}" for line in lines.memory.lines()) in done.stderr
    assert sum(result.get("metric") == "article" for result in document["results"]) == 13


def test_mistakes_are_named(tmp_path):
    """One process for all: importing jax takes longer than planning."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA_3_2_1B | {"num_hidden_layers": 400}))
    plot = tmp_path / "plot.png"
    cases = [
        (["--device=v100"], 2, "device is 'v100'; it must be some of h200,"),
        (["--lengths=2048,many"], 2, "lengths is '2048,many'; it must be whole numbers from 1"),
        (["--shards=0"], 2, "shards"),
        (["--kv_cache_dtypes=int3"], 2, "kv_cache_dtypes has int3; there are: float32"),
        (["--model=./no/config.json"], 2, "--model=./no/config.json: no such file"),
        ([f"--model={tmp_path}", "--device=24g"], 2, "the engine needs 45.80 GiB for weights"),
        (
            ["--model=llama-2-7b", "--max_model_len=9999"],
            2,
            "9,999, but the model allows at most 4,096",
        ),
        (["--model=llama-3-8b", "--shards=3"], 2, "3 devices cannot share the model: num_heads 32"),
        (["--model=llama-3-8b", "--device=24g", "--temporaries=compiler"], 2, "none is set up for device 24g"),
        ([f"--plot={tmp_path / 'no' / 'plot.png'}"], 2, "in a folder that does not exist"),
        (["--plot=plot.txt"], 2, "plot is 'plot.txt'; its name must end in .png"),
        (["--model="], 2, "model is empty: name a config.json"),
        (["--device=detect", "--model=Llama-2-7B", "--num_gpu_blocks_override=999999"], 2, "for 999,999 KV blocks"),
    ]
    cases.append(([f"--plot={plot}", "--quick"], 0, ""))
    if missing():
        cases.append((["--model=llama-3-8b", "--device=h200", "--temporaries=compiler"], 3, "CUDA plugin"))
    code = """
        import json, sys
        import plan_capacity
        from absl import flags
        from jaxkv import measurement
        for arguments in json.loads(sys.argv[1]):
            flags.FLAGS.unparse_flags()
            sys.argv = ["plan_capacity", *arguments]
            try:
                measurement.run("plan_capacity", plan_capacity._config, plan_capacity._measure, timed=False)
            except SystemExit as exit:
                print(f"=== {exit.code or 0}", file=sys.stderr)
    """
    done = run(sys.executable, "-c", textwrap.dedent(code), json.dumps([arguments for arguments, *_ in cases]))
    told = done.stderr.split("=== ")
    assert len(told) == len(cases) + 1 and "Traceback" not in done.stderr, done.stderr
    for i, (arguments, code, words) in enumerate(cases):
        assert (told[i + 1].splitlines()[0], words in told[i]) == (str(code), True), (arguments, told[i])
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def judged():
    found = verdicts(MODELS["llama-2-7b"], MODELS["llama-3-8b"])
    return {claim: [v for v in found if v.claim == claim] for claim in ("B2", "B3", "B4", "B5", "B6", "A4", "A14")}


def test_what_the_articles_get_right(judged):
    bytes_a_request, grouped = judged["B2"]
    assert bytes_a_request.verdict == "confirmed" and bytes_a_request.numbers == (GiB,)
    assert grouped.verdict == "refuted" and grouped.numbers == (131_072,) and "4x too large" in grouped.why
    (int8,) = judged["A4"]
    assert int8.verdict == "confirmed" and int8.numbers[0] == pytest.approx(256 / 130, rel=1e-3)
    (lines,) = judged["A14"]
    assert lines.verdict == "confirmed" and lines.numbers[1] >= 2 * lines.numbers[0]


def test_what_does_not_add_up(judged):
    (requests,) = judged["B4"]
    assert requests.verdict == "refuted" and requests.claimed == "42 / 49 / 53"
    # By the article's own figures 54 / 57.7 / 60; by ours more, since an 80 GB card has 85 billion bytes.
    assert "54.0 / 57.7 / 60.0" in requests.why and "12.9 / 9.4 / 7.5 GB" in requests.why and "148 GB" in requests.why
    for share, ours in zip((0.90, 0.95, 0.98), requests.numbers):
        weights = 2 * 6_738_415_616
        assert ours == pytest.approx((DEVICES["a100-80g"].memory * share - weights) / GiB, abs=1.5)
    (each,) = judged["B3"]
    paged, whole = each.numbers
    assert each.verdict == "refuted" and paged > 1.9 * whole and "66 GB hold 61" in each.why
    (share,) = judged["B5"]
    assert share.verdict == "refuted" and share.numbers[0] < 0.9 * DEVICES["a100-80g"].memory - 2 * 6_738_415_616
    *safe, five_percent = judged["B6"]
    assert five_percent.numbers[0] == pytest.approx(0.05 * DEVICES["a100-40g"].memory / 1e9, rel=0.02)
    assert five_percent.verdict == "refuted"
    assert [v.numbers for v in safe] == [(0.98, 0.99)] * 2 + [(0.97, 0.98)] * 2 + [(0.95, 0.97)]


def test_blocks_are_dealt_out_until_one_request_does_not_fit():
    memory = plan_capacity(EngineConfig(num_gpu_blocks_override=100), MODELS["llama-2-7b"], DEVICES["h200"]).memory
    assert num_that_fit(memory, [64] * 200) == 100
    assert num_that_fit(memory, [65, 6400, 64]) == 1  # 98 are left, 100 wanted
