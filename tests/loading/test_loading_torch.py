"""Weights equal to the last bit to what transformers loads (torch): the demo's GGUF, and folders of random models."""

import json

import numpy as np
import pytest
from flax import nnx

from jaxkv.core.model_config import RopeConfig
from jaxkv.loading.gguf_config import llama3_divisors
from jaxkv.loading.gguf_source import GGUFSource
from jaxkv.loading.resolve import resolve_model
from jaxkv.loading.weights import load_config, load_weights

torch = pytest.importorskip("torch", reason="the oracle is transformers' torch model")
import transformers.modeling_rope_utils  # noqa: E402

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def their_arrays(model) -> dict[str, np.ndarray]:
    """In float32, which holds bfloat16 and float16 exactly."""
    arrays = {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del arrays["lm_head.weight"]
    return arrays


def our_arrays(model) -> dict[str, np.ndarray]:
    arrays = {}
    for path, variable in nnx.to_flat_state(nnx.split(model)[1]):
        name = ".".join(map(str, path)).replace(".attention.", ".self_attn.")
        name = name.replace(".input_norm.", ".input_layernorm.").replace("attention_norm", "attention_layernorm")
        arrays[name if name.startswith("lm_head") else f"model.{name}"] = np.asarray(variable.get_value(), np.float32)
    return arrays


def assert_equal(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array, err_msg=name)


def test_the_demos_gguf(demo_source):
    """Through the function under from_pretrained(gguf_file=...), which itself wants accelerate for no arithmetic."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = load_config(demo_source)
    with torch.device("meta"):  # only its names matter
        skeleton = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
                num_hidden_layers=config.num_layers, num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_kv_heads, tie_word_embeddings=True,
            )
        )  # fmt: skip
    theirs = load_gguf_checkpoint(demo_source.path, return_tensors=True, model_to_load=skeleton)
    source = GGUFSource(demo_source.path)
    assert_equal(
        {name: source.read(name) for name in source.names()},
        {name: tensor.numpy() for name, tensor in theirs["tensors"].items()},
    )
    their_config = theirs["config"]
    assert config.rope.theta == their_config["rope_theta"] == 100_000.0
    assert config.rms_norm_eps == pytest.approx(their_config["rms_norm_eps"], rel=1e-6)
    assert (config.num_kv_heads, config.head_dim) == (their_config["num_key_value_heads"], their_config["head_dim"])
    assert config.tie_word_embeddings == their_config["tie_word_embeddings"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("num_shards", [1, 2])
def test_llama_folders(tmp_path, dtype, tied, num_shards):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied, dtype=dtype)
    model = transformers.LlamaForCausalLM(config).to(getattr(torch, dtype))
    size = sum(t.numel() * t.element_size() for t in model.parameters())
    model.save_pretrained(tmp_path, max_shard_size="1GB" if num_shards == 1 else size * 2 // 3)
    assert len(list(tmp_path.glob("*.safetensors"))) == num_shards
    source = resolve_model(str(tmp_path))
    ours = load_config(source)
    assert (ours.dtype, ours.tie_word_embeddings) == (dtype, tied)
    assert ours.num_parameters() == model.num_parameters()
    assert_equal(our_arrays(load_weights(source, ours, dtype=dtype)), their_arrays(model))


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("Llama", {"attention_bias": True, "mlp_bias": True}),
        ("Mistral", {"sliding_window": 16}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
        ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    ],
)
def test_families(tmp_path, family, fields):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **fields)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():  # biases and norms start as constants, which a swap would not show
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(tmp_path)
    source = resolve_model(str(tmp_path))
    ours = load_config(source)
    windows = [
        config.sliding_window if kind == "sliding_attention" else None for kind in getattr(config, "layer_types", [])
    ]
    assert ours.window_sizes == tuple(windows or [getattr(config, "sliding_window", None)] * 3)
    assert ours.num_parameters() == model.num_parameters()
    assert_equal(our_arrays(load_weights(source, ours, dtype="float32")), their_arrays(model))


def test_the_written_config_is_transformers_5s_spelling(tmp_path):
    """Guards the test above: what it loads has rope_parameters, and no rope_theta at the top."""
    transformers.LlamaConfig(
        **SIZES, rope_parameters={"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}
    ).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "rope_theta" not in written and written["rope_parameters"]["rope_theta"] == 5e5


def test_llama3_divisors_equal_transformers():
    rope = RopeConfig(500_000.0, "llama3", 8.0, 8192, 1.0, 4.0)
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_theta": 500_000.0,
    }  # fmt: skip
    theirs, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](
        transformers.LlamaConfig(
            hidden_size=512, num_attention_heads=4, rope_parameters=scaling, max_position_embeddings=131072
        ),
        torch.device("cpu"),
    )
    plain = 500_000.0 ** -(np.arange(0, 128, 2) / 128)
    np.testing.assert_allclose(plain / theirs.numpy(), llama3_divisors(rope, 128), rtol=1e-5)
