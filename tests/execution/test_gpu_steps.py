"""The executor's step functions, compiled for an H200 that is not here: the cache in place, no copies of it or of weights."""

import pytest
from gpulib.step_programs import BUCKETS, MODELS, build_step

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
