"""What `kv_rotation=auto` means, and that a rotating engine generates what it should."""

import numpy as np
import pytest

from jaxkv import startup
from jaxkv.core.config import EngineConfig
from jaxkv.core.progress import SilentProgress
from jaxkv.core.request import Request, SamplingParams
from jaxkv.device import DEVICES, local_device
from jaxkv.settings import resolve_settings
from tests.support.dense_model import DenseModel
from tests.support.tiny_models import model_of, parse, random_tensors, random_tokens, tiny_config
from tests.support.tiny_programs import run_requests, tokens_of


@pytest.mark.parametrize("dtype, rotation", [
    ("auto", "none"), ("bfloat16", "none"), ("int8", "hadamard"), ("int4", "hadamard"), ("int8,int4", "hadamard"),
    ("fp8_e4m3", "none"), ("bfloat16,int8", "none"),
])  # fmt: skip
@pytest.mark.parametrize("device", ["h200", None])
def test_auto_rotates_where_keys_are_integers(dtype, rotation, device):
    device = DEVICES[device] if device else local_device()
    model = parse(tiny_config(head_dim=64))
    for asked, expected in (("auto", rotation), ("none", "none"), ("hadamard", "hadamard")):
        config = EngineConfig(kv_cache_dtype=dtype, kv_rotation=asked)
        assert resolve_settings(config, model, device).kv_rotation == expected


def test_an_engine_that_rotates_generates_what_the_dense_model_does():
    """With exact storage rotation changes nothing: weights, queries and keys are turned the same way."""
    model = parse(tiny_config(num_hidden_layers=1, tie_word_embeddings=True))
    tensors, prompt = random_tensors(model), random_tokens(30)
    config = EngineConfig(
        kv_rotation="hadamard", max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64,
        kv_cache_memory_bytes=2**20, compilation_cache_dir="",
    )  # fmt: skip
    loaded = []

    def load(dtype: str):
        loaded.append(model_of(model, tensors))
        return loaded[0]

    engine = startup.build_engine(config, model, load, origin="tiny", progress=SilentProgress()).engine
    news = run_requests(engine, [Request("a", prompt, SamplingParams(temperature=0.0, max_tokens=8))])["a"]
    assert list(tokens_of(news)) == DenseModel(model, tensors).generate(prompt, 8)
    values = loaded[0].layers[0].attention.v_proj.weight[...]
    assert not np.array_equal(values, tensors["model.layers.0.self_attn.v_proj.weight"]), "nothing was rotated"
