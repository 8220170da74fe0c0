"""scripts/bench_throughput.py as a process, on a tiny model."""

import importlib.util


def test_jaxkv_beside_an_absent_rival(bench):
    code, document, err = bench(
        "bench_throughput.py", "--rivals=vllm", "--batch_sizes=1,4", "--prompt_len=16", "--prefill_len=32",
        "--dtypes=float32",
    )  # fmt: skip
    assert code == 0, err
    assert (document["schema"], document["program"], document["ok"]) == ("jaxkv.result/1", "bench_throughput", True)
    assert document["config"]["quick"] is True and document["config"]["max_num_seqs"] == 4
    work = ["decode batch 1", "decode batch 4", "prefill 32"]
    measured = [result for result in document["results"] if result["engine"] == "jaxkv"]
    assert [result["name"] for result in measured] == [f"{name} float32 jaxkv" for name in work]
    assert [result["unit"] for result in measured] == ["tokens/s", "tokens/s", "prompts/s"]
    assert all(result["value"] > 0 and result["runs"] == 1 and result["cpu_seconds"] > 0 for result in measured)
    absent = [result for result in document["results"] if result["engine"] == "vllm"]
    wanted = "torch is not installed" if importlib.util.find_spec("torch") is None else "--vllm_python names"
    assert len(absent) == 3 and all(result["value"] is None and wanted in result["skipped"] for result in absent)
    assert document["ratios"] == [] and "load average on" in err


def test_users_errors(bench):
    cases = (
        (["--rivals=nobody"], "rivals has nobody; there are transformers, transformers_continuous, vllm"),
        (["--batch_sizes=1,many"], "batch_sizes is '1,many'"),
        (["--batch_sizes=0"], "batch_sizes is '0'"),
        (["--max_num_sequences=3"], "no flag --max_num_sequences"),
    )
    for arguments, text in cases:
        code, document, err = bench("bench_throughput.py", *arguments)
        assert (code, document) == (2, None) and text in err and "Traceback" not in err
