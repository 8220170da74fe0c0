"""Checkpoints into the Flax model: the right numbers in the right places, or one clear error."""

import json
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jaxkv.core.errors import CheckpointError
from jaxkv.loading.model_config import parse_hf_config
from jaxkv.loading.resolve import ORBAX_CONFIG, resolve_model
from jaxkv.loading.weights import load_config, load_weights


def hf_arrays(model: nnx.Module) -> dict[str, np.ndarray]:
    """The model's arrays under Hugging Face names, by a mapping of its own."""
    renamed = {".attention.": ".self_attn.", ".input_norm.": ".input_layernorm."}
    renamed |= {".post_attention_norm.": ".post_attention_layernorm."}
    arrays = {}
    for path, variable in nnx.to_flat_state(nnx.split(model)[1]):
        name = ".".join(map(str, path))
        for ours, theirs in renamed.items():
            name = name.replace(ours, theirs)
        arrays[name if name.startswith("lm_head") else "model." + name] = np.asarray(variable.get_value())
    return arrays


def assert_holds(model: nnx.Module, tensors: dict[str, np.ndarray], dtype) -> None:
    found = hf_arrays(model)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == dtype
        np.testing.assert_array_equal(found[name], tensor.astype(dtype), err_msg=name)


FAMILIES = {
    "llama": {},
    "llama-biases-tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 16},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_shards", [1, 3])
def test_every_tensor_lands_in_its_place(tiny_config, random_tensors, write_folder, family, num_shards):
    config = tiny_config | FAMILIES[family]
    tensors = random_tensors(parse_hf_config(config, "here"))
    source = resolve_model(str(write_folder(config, tensors, num_shards)))
    model = load_weights(source, load_config(source), dtype="float32")
    assert_holds(model, tensors, np.float32)


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
def test_dtypes(tiny_config, random_tensors, write_folder, stored, wanted):
    tensors = random_tensors(parse_hf_config(tiny_config, "here"), stored)
    source = resolve_model(str(write_folder(tiny_config, tensors)))
    model = load_weights(source, load_config(source), dtype=wanted)
    assert_holds(model, tensors, np.dtype(wanted))


def test_gguf(tiny_config, random_tensors, write_gguf):
    config = parse_hf_config(tiny_config | {"eos_token_id": None, "bos_token_id": None}, "here")
    tensors = random_tensors(config)
    source = resolve_model(str(write_gguf(config, tensors)))
    assert load_config(source) == config
    assert_holds(load_weights(source, config, dtype="float32"), tensors, np.float32)


def test_progress_ends_with_every_byte(tiny_config, random_tensors, write_folder):
    updates = []

    class Recorder:
        def update(self, stage, done, total, unit=""):
            updates.append((stage, done, total, unit))

    config = parse_hf_config(tiny_config, "here")
    source = resolve_model(str(write_folder(tiny_config, random_tensors(config))))
    load_weights(source, config, dtype="bfloat16", progress=Recorder())
    total = 2 * config.num_parameters()
    assert updates[-1] == ("Loading weights", total, total, "B")
    assert [u[1] for u in updates] == sorted(u[1] for u in updates) and len(updates) == 21


def test_sharding_is_asked_for_each_parameter(tiny_config, random_tensors, write_folder):
    device = jax.devices()[0]
    asked = {}

    def sharding(name, shape):
        asked[name] = shape
        return jax.sharding.SingleDeviceSharding(device)

    config = parse_hf_config(tiny_config, "here")
    source = resolve_model(str(write_folder(tiny_config, random_tensors(config))))
    load_weights(source, config, dtype="float32", sharding=sharding)
    assert (
        len(asked) == 21
        and asked["layers.1.attention.k_proj.weight"] == (16, 32)
        and asked["lm_head.weight"] == (48, 32)
    )


def test_known_buffers_and_an_equal_tied_head_are_accepted(tiny_config, random_tensors, write_folder):
    config = tiny_config | {"tie_word_embeddings": True}
    tensors = random_tensors(parse_hf_config(config, "here"))
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32),
        "lm_head.weight": tensors["model.embed_tokens.weight"],
    }
    source = resolve_model(str(write_folder(config, tensors | extra)))
    assert_holds(load_weights(source, load_config(source), dtype="float32"), tensors, np.float32)
    other = resolve_model(
        str(write_folder(config, tensors | extra | {"lm_head.weight": extra["lm_head.weight"] + 1}, name="b"))
    )
    with pytest.raises(CheckpointError, match="lm_head.weight: differs from the embedding.*tie_word_embeddings"):
        load_weights(other, load_config(other), dtype="float32")


def test_one_error_lists_missing_extra_and_misshapen_tensors(tiny_config, random_tensors, write_folder):
    tensors = random_tensors(parse_hf_config(tiny_config, "here"))
    del tensors["model.norm.weight"], tensors["lm_head.weight"]
    tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((64, 31), np.float32)
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((64, 32), np.float32)
    source = resolve_model(str(write_folder(tiny_config, tensors)))
    with pytest.raises(CheckpointError) as caught:
        load_weights(source, load_config(source), dtype="float32")
    text = str(caught.value)
    assert f"{source.path}/model.safetensors: the tensors do not fit" in text
    assert "2 missing (" in text and "model.norm.weight [32]" in text and "lm_head.weight [48, 32]" in text
    assert "1 of another shape" in text
    assert "model.layers.1.mlp.up_proj.weight: expected [64, 32], found [64, 31]" in text
    assert "1 not expected" in text and "model.layers.2.mlp.up_proj.weight [64, 32]" in text


def test_long_lists_are_cut(tiny_config, random_tensors, write_folder):
    tensors = random_tensors(parse_hf_config(tiny_config, "here"))
    kept = {name: tensor for name, tensor in tensors.items() if "layers.1." not in name}
    source = resolve_model(str(write_folder(tiny_config, kept)))
    with pytest.raises(CheckpointError, match="9 missing .*; \\.\\.\\.\\)"):
        load_weights(source, load_config(source), dtype="float32")


def test_config_files_that_cant_be_read(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="config.json: not readable as JSON"):
        load_config(resolve_model(str(tmp_path)))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="config.json: expected a JSON object, found list"):
        load_config(resolve_model(str(tmp_path)))
    (tmp_path / ORBAX_CONFIG).write_text(json.dumps({"format": 99}))
    with pytest.raises(CheckpointError, match="format is 99"):
        load_config(resolve_model(str(tmp_path)))


def test_no_torch_at_run_time(tiny_config, random_tensors, write_gguf):
    """Not even where it is installed; and finding and describing a model imports no jax either."""
    config = parse_hf_config(tiny_config, "here")
    path = write_gguf(config, random_tensors(config))
    code = f"""
import sys
from jaxkv.loading import demo_model, gguf_config, gguf_source, hub, model_config, safetensors_source
from jaxkv.loading.resolve import resolve_model
source = resolve_model({str(path)!r})
assert "jax" not in sys.modules and "flax" not in sys.modules
from jaxkv.loading import convert
from jaxkv.loading.weights import load_config, load_weights
load_weights(source, load_config(source), dtype="bfloat16")
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
