"""scripts/bench_decode_loop.py as a process, on a tiny model."""

import pytest


def test_all_sections(bench, tmp_path):
    plot = tmp_path / "costs.png"
    code, document, err = bench("bench_decode_loop.py", f"--plot_out={plot}", f"--json_out={tmp_path / 'result.json'}")
    assert code == 0, err
    assert (tmp_path / "result.json").is_file()
    results = {result["name"]: result for result in document["results"]}
    values = {name: result["value"] for name, result in results.items()}
    ratios = {ratio["name"]: ratio["value"] for ratio in document["ratios"]}

    for steps in (1, 8):
        for in_flight in (1, 2):
            name = f"C={steps}, {in_flight} in flight"
            host, call = values[f"{name} host time between calls"], values[f"{name} call"]
            assert 0 < host < call
            assert ratios[f"{name}: call / host time"] == pytest.approx(call / host)
        assert values[f"C={steps}, 1 in flight calls that found the device idle"] == 1

    for rows in (1, 4):
        for steps in (2, 4, 8):
            measured = values[f"tiny model, {rows} rows, C={steps}"] / values[f"tiny model, {rows} rows, C=1"]
            assert ratios[f"tiny model, {rows} rows: C={steps} / C=1"] == pytest.approx(measured)

    for setting in ("C=1", "C adaptive"):
        for case in ("1 client, itl", "2 clients, itl", "newcomers, itl", "newcomers, ttft"):
            result = results[f"{setting}, {case}"]
            assert 0 < result["p50"] <= result["p95"] and result["value"] == pytest.approx(result["p50"])
        assert results[f"{setting}, newcomers, ttft"]["runs"] == 2
    # 16 tokens: the first, then fifteen calls of one step, or two of eight.
    assert results["C=1, 1 client, itl"]["runs"] == 15 and results["C adaptive, 1 client, itl"]["runs"] == 2
    assert "latency against throughput" in err

    assert [values[f"decode step, 4 rows, context {context}"] > 0 for context in (32, 128, 256)] == [True] * 3
    assert results["decode step fit"]["coefficients"].keys() == {"constant", "rows", "kv_tokens"}
    assert results["prefill fit"]["coefficients"].keys() == {"constant", "tokens", "pairs"}
    assert document["files"] == [str(plot)] and plot.read_bytes().startswith(b"\x89PNG")


def test_users_errors(bench):
    cases = (
        ("--sections=hots", "sections has hots; there are host, loop, latency, costs"),
        ("--enforce_eager", "enforce_eager runs one step a call"),
    )
    for argument, text in cases:
        code, document, err = bench("bench_decode_loop.py", argument)
        assert (code, document) == (2, None) and text in err
