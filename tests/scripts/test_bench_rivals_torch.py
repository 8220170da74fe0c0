"""scripts/bench_throughput.py with transformers' engines on the very same tiny weights."""

import sys

import pytest

from jaxkv.measurement import AbsentError

pytest.importorskip("torch")

# Stands for vLLM: prints where the protocol speaks, and knows what it was given.
STUB = """
import json, pathlib, types
print("noise on stdout")
class SamplingParams:
    def __init__(self, **settings): self.__dict__ |= settings
class LLM:
    def __init__(self, model, **settings):
        folder = pathlib.Path(model)
        assert (folder / "model.safetensors").is_file()
        assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
        assert settings["dtype"] == "float32" and settings["max_num_seqs"] == 2 and settings["enforce_eager"] is True
    def generate(self, prompts, sampling, use_tqdm):
        print("more noise")
        if prompts[0]["prompt_token_ids"] == [7]:
            raise ValueError("seven is not served")
        ids = [0] * sampling.max_tokens
        return [types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=ids)]) for _ in prompts]
"""


def test_vllm_speaks_json_lines_from_another_interpreter(tiny_model, tmp_path):
    from benchlib.vllm_contender import VllmContender

    (tmp_path / "vllm.py").write_text(STUB)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    vllm = VllmContender(str(tiny_model), "float32", python=str(python), eager=True, max_num_seqs=2, max_model_len=64)
    for count in (3, 5):
        timing = vllm.generate([[1, 2], [3, 4]], count)
        assert timing.seconds > 0 and timing.cpu_seconds >= 0
    with pytest.raises(AbsentError, match="(?s)ended with 1; it said last: .*ValueError: seven is not served"):
        vllm.generate([[7]], 1)


def test_transformers_and_its_continuous_batching(bench):
    code, document, err = bench(
        "bench_throughput.py", "--rivals=transformers,transformers_continuous", "--batch_sizes=2", "--prompt_len=16",
        "--prefill_len=0", "--json_only",
    )  # fmt: skip
    assert code == 0, err
    assert all(result["value"] > 0 for result in document["results"]), "someone was skipped"
    names = ["jaxkv", "transformers", "transformers_continuous"]
    dtypes = ["float32", "bfloat16"]
    measured = [(r["engine"], r["dtype"]) for r in document["results"]]
    assert measured == [(name, dtype) for dtype in dtypes for name in names]
    ratios = {ratio["name"]: ratio for ratio in document["ratios"]}
    for dtype in dtypes:
        ratio = ratios[f"decode batch 2 {dtype}: jaxkv / transformers"]
        values = {r["engine"]: r["value"] for r in document["results"] if r["dtype"] == dtype}
        assert ratio["value"] == pytest.approx(values["jaxkv"] / values["transformers"])
        assert ratio["target"] is None and ratio["ok"]
    ranked = sorted(document["results"], key=lambda r: r["value"])
    best = {r["engine"]: r for r in ranked}  # the last of an engine wins
    for rival in names[1:]:
        name = f"decode batch 2 best dtypes: jaxkv ({best['jaxkv']['dtype']}) / {rival} ({best[rival]['dtype']})"
        assert ratios[name]["value"] == pytest.approx(best["jaxkv"]["value"] / best[rival]["value"])
    assert len(ratios) == 6
