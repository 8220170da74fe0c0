"""Prices of steps: the roofline by hand, and fitted ones as files."""

import dataclasses
import json

import pytest

from jaxkv.control.executor import ExecutorLimits
from jaxkv.core.devices import DEVICES
from jaxkv.core.errors import ConfigError
from jaxkv.core.model_config import ModelConfig, RopeConfig
from jaxkv.core.plan import BlockCopy, PlanShape, PrefillChunk, StepPlan
from jaxkv.simulation.fitted_cost import CostModelError, FittedCostModel, read_cost_model
from jaxkv.simulation.roofline import Efficiency, roofline

LLAMA_3_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    max_position_embeddings=8192,
    rope=RopeConfig(),
    window_sizes=(None,) * 32,
)
IDEAL = Efficiency(1, 1, 1, 0, 0)
KV = 131_072


def ideal(device="h200", **fields):
    return roofline(dataclasses.replace(LLAMA_3_8B, **fields), DEVICES[device], kv_bytes=KV, efficiency=IDEAL)


def test_what_is_counted_of_llama_3_8b():
    model = ideal()
    # 8.03 billion parameters, of which 0.525 are looked up, and as many more used for sampled tokens only.
    assert model.layer_params == LLAMA_3_8B.num_parameters() - 2 * 128_256 * 4096
    assert model.weight_bytes == pytest.approx(15.01e9, rel=1e-3)
    assert ideal(tie_word_embeddings=True).weight_bytes == model.weight_bytes


def test_decode_reads_weights_and_kv():
    model = ideal()
    one = model.seconds(PlanShape(0, 0, 1, 1000, 1))
    assert one == pytest.approx((model.weight_bytes + 1000 * KV) / 4.8e12)
    # 8 steps of 2 rows: each step a token more a row, 3.5 on average.
    eight = model.seconds(PlanShape(0, 0, 2, 1000, 8))
    assert eight == pytest.approx(8 * (model.weight_bytes + 1007 * KV) / 4.8e12)


def test_prefill_is_bound_by_its_products_and_small_ones_by_the_weights():
    model = ideal("a100-80g")
    plan = StepPlan(0, prefill=(PrefillChunk("a", 0, 1000, (1,) * 4096, True), PrefillChunk("b", 1, 0, (1, 2), False)))
    shape = plan.shape()
    assert shape.prefill_pairs == 4096 * 1000 + 4096 * 4097 // 2 + 3
    flops = 2 * 4098 * model.layer_params + 4 * 32 * 32 * 128 * shape.prefill_pairs
    assert model.seconds(shape) == pytest.approx(flops / 312e12)
    assert model.seconds(PlanShape(1, 0, 0, 0, 0, prefill_pairs=1)) == pytest.approx(
        (model.weight_bytes + KV) / 2.039e12
    )


def test_copies_calls_and_layers_cost_and_shares_of_the_peaks_count():
    fixed = dataclasses.replace(ideal(), efficiency=Efficiency(1, 1, 1, layer_seconds=1e-3, call_seconds=0.5))
    assert fixed.seconds(PlanShape(0, 0, 0, 0, 0)) == 0.5
    copies = StepPlan(0, block_copies=(BlockCopy(1, 2, 1000),)).shape()
    assert ideal().seconds(copies) == pytest.approx(2 * 1000 * KV / 4.8e12)
    step = PlanShape(0, 0, 1, 1, 2)
    assert fixed.seconds(step) == pytest.approx(0.5 + 2 * 32e-3 + ideal().seconds(step))
    half = dataclasses.replace(ideal(), efficiency=Efficiency(0.5, 0.5, 0.5, 0, 0))
    for shape in (step, PlanShape(4096, 0, 0, 0, 0, prefill_pairs=4096 * 2048)):
        assert half.seconds(shape) == pytest.approx(2 * ideal().seconds(shape))


def test_a_device_without_figures_is_refused():
    with pytest.raises(ConfigError, match="calibrate_cost_model"):
        roofline(LLAMA_3_8B, dataclasses.replace(DEVICES["h200"], name="mine", flops=None), kv_bytes=KV)


FITTED = FittedCostModel(1.0, ((64, 10.0), (128, 18.0)), 0.01, ((1, 2.0), (4, 3.0)), 0.001, 0.1, {"model": "tiny"})


def test_a_fitted_model_prices_padded_calls():
    assert FITTED.seconds(PlanShape(0, 0, 0, 0, 0, copied_tokens=3)) == pytest.approx(1.3)
    assert FITTED.seconds(PlanShape(64, 0, 0, 0, 0, prefill_pairs=100)) == pytest.approx(1 + 10 + 1)
    assert FITTED.seconds(PlanShape(65, 0, 1, 50, 1)) == pytest.approx(1 + 18 + 2 + 0.05)
    assert FITTED.seconds(PlanShape(0, 0, 2, 1000, 4)) == pytest.approx(1 + 4 * (3 + 1.003))


def test_a_fitted_model_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "cost.json"
    path.write_text(FITTED.to_json())
    assert read_cost_model(path) == FITTED


@pytest.mark.parametrize(
    "text",
    ["", "[1]", "{}", json.dumps({"schema": "other"}), json.dumps({"schema": "jaxkv.cost_model/1", "call_seconds": 1}),
     FITTED.to_json().replace("64", "640")],
)  # fmt: skip
def test_other_files_are_no_cost_models(tmp_path, text):
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(CostModelError, match="cost.json holds no cost model"):
        read_cost_model(path)


def test_calls_larger_than_any_measured_are_refused_before_a_replay():
    limits = ExecutorLimits(64, 16, 4, 128, 4, 128, 8)
    FITTED.check(limits)
    with pytest.raises(ConfigError, match="max_num_seqs is 5, but the cost model was measured up to 4"):
        FITTED.check(dataclasses.replace(limits, max_num_seqs=5))
    with pytest.raises(ConfigError, match="max_num_batched_tokens is 256"):
        FITTED.check(dataclasses.replace(limits, max_num_batched_tokens=256))
