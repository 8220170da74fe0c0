"""scripts/bench_throughput.py with transformers' engines on the very same tiny weights."""

import pytest

pytest.importorskip("torch")


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
