"""The executor's step functions, compiled for an H200 that is not here: the cache in place, no copies of it or of weights."""

import dataclasses
import functools
import re

import pytest
from gpulib.step_programs import BUCKETS, MODELS, biggest_temporary, build_step

from jaxkv.capacity import plan_capacity
from jaxkv.core.config import EngineConfig
from jaxkv.device import DEVICES
from pallas_kernels import mosaic_support

IMPLEMENTATION = "pallas_triton"


@pytest.mark.gpu_build
@pytest.mark.parametrize("kv_format", ["bfloat16", "int8"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", BUCKETS)
def test_cache_in_place_and_nothing_copied(kind, model, kv_format, tmp_path):
    step = build_step(MODELS[model], kv_format, kind, "h200", tmp_path / "dump", IMPLEMENTATION)
    assert not step.problems
    per_layer = step.launches_per_layer
    assert per_layer["kv_write"] == 1, per_layer
    # Neither grows with the pool: a layer's blocks alone are 268 MB or more in bfloat16, half a model's MLP 59 MB.
    assert step.temporary_bytes < step.cache_bytes / 8


@pytest.mark.gpu_build
@pytest.mark.parametrize("kv_format", ["bfloat16", "int8"])
def test_a_decode_step_with_mosaic_gpu(kv_format, tmp_path):
    """Two layers, since each stands alone: attention and merge of each are calls that XLA leaves out of its CUDA graphs."""
    model = dataclasses.replace(MODELS["llama-3-8b"], num_layers=2, window_sizes=(None,) * 2)
    build = functools.partial(build_step, model, kv_format, "decode", "h200", tmp_path / "dump", "pallas_mosaic_gpu")
    if reason := mosaic_support.unavailable():
        with pytest.raises(ValueError, match=re.escape(reason)):
            build()
        return
    step = build()
    assert not step.problems
    assert step.custom_calls == 4 and step.launches_per_layer["kv_write"] == 1


@pytest.mark.gpu_build
def test_a_plan_asks_the_compiler():
    model = dataclasses.replace(MODELS["llama-3-8b"], num_layers=1, window_sizes=(None,), vocab_size=1000)
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=64, num_gpu_blocks_override=100)
    bound = plan_capacity(config, model, DEVICES["h200"]).memory.needs
    needs = plan_capacity(
        config, model, DEVICES["h200"], temporaries=lambda made: biggest_temporary(made, "h200")
    ).memory.needs
    assert needs.compiled and bound.temporaries < needs.temporaries < 32 * 2**20  # a weight matrix has 117 MB
