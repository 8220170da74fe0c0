"""config.json to ModelConfig: equal to what transformers' own config classes make of it, or refused by name."""

import json

import pytest

from jaxkv.core.errors import CheckpointError
from jaxkv.core.model_config import RopeConfig
from jaxkv.loading.model_config import FAMILIES, parse_hf_config

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
LLAMA = SIZES | {"architectures": ["LlamaForCausalLM"], "num_key_value_heads": 2, "max_position_embeddings": 64}
QWEN3 = SIZES | {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2}


def parse(config, generation_config=None):
    return parse_hf_config(config, "config.json", generation_config)


def refused(config, *words):
    with pytest.raises(CheckpointError) as caught:
        parse(config)
    for word in ("config.json", *words):
        assert word in str(caught.value), f"{word!r} not in: {caught.value}"


@pytest.mark.parametrize("architecture", FAMILIES)
def test_defaults_are_those_of_transformers(architecture):
    transformers = pytest.importorskip("transformers")
    # Qwen's default of 32 KV heads fits no small model, so the number of heads is theirs here too.
    config = SIZES | {"architectures": [architecture], "num_attention_heads": 32, "hidden_size": 128}
    theirs = getattr(transformers, architecture.replace("ForCausalLM", "Config"))(**config)
    ours = parse(config)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.rope == RopeConfig(theta=theirs.rope_parameters["rope_theta"])
    window = theirs.sliding_window if architecture == "MistralForCausalLM" else None
    assert ours.window_sizes == (window,) * 4
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    assert ours.pad_token_id == theirs.pad_token_id


@pytest.mark.parametrize("architecture", FAMILIES)
def test_accepts_what_transformers_writes(architecture):
    """Every field that save_pretrained writes, at its default, is honoured or known: none is refused."""
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, architecture.replace("ForCausalLM", "Config"))
    written = json.loads(
        kind(**SIZES, num_key_value_heads=2, architectures=[architecture]).to_json_string(use_diff=False)
    )
    ours = parse(written)
    assert (ours.num_layers, ours.num_heads, ours.num_kv_heads, ours.hidden_size) == (4, 4, 2, 32)


def test_real_configs_of_the_families():
    """As published, shortened only where a list repeats."""
    llama32 = parse({
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0,
        "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.45.0.dev0", "use_cache": True,
        "vocab_size": 128256,
    })  # fmt: skip
    assert llama32.rope == RopeConfig(500_000.0, "llama3", 32.0, 8192, 1.0, 4.0)
    assert llama32.eos_token_ids == (128001, 128008, 128009) and llama32.dtype == "bfloat16"
    assert llama32.num_parameters() == 1_235_814_400
    qwen25 = parse({
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
        "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
        "max_position_embeddings": 32768, "max_window_layers": 21, "model_type": "qwen2", "num_attention_heads": 14,
        "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True,
        "use_mrope": False, "use_sliding_window": False, "vocab_size": 151936,
    })  # fmt: skip
    assert qwen25.qkv_bias and not qwen25.o_bias and qwen25.window_sizes == (None,) * 24
    assert qwen25.num_parameters() == 494_032_768
    qwen3 = parse({
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
        "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151936,
    })  # fmt: skip
    assert qwen3.qk_norm and qwen3.head_dim == 128 and qwen3.num_parameters() == 596_049_920
    mistral = parse({
        "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 32000,
    })  # fmt: skip
    assert mistral.window_sizes == (4096,) * 32 and mistral.num_parameters() == 7_241_732_096


YARN = {"factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, RopeConfig(50_000.0)),
        ({"rope_type": "default"}, RopeConfig(50_000.0)),
        ({"type": "linear", "factor": 2}, RopeConfig(50_000.0, "linear", 2.0)),
        ({"rope_type": "dynamic", "factor": 2.0}, RopeConfig(50_000.0, "dynamic", 2.0, 64)),
        (
            {"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4},
            RopeConfig(50_000.0, "llama3", 8.0, 64, 1.0, 4.0),
        ),
        ({"rope_type": "yarn", **YARN}, RopeConfig(50_000.0, "yarn", 4.0, 16)),
        ({"rope_type": "yarn", "type": "yarn", **YARN}, RopeConfig(50_000.0, "yarn", 4.0, 16)),
        (
            {"type": "yarn", **YARN, "beta_fast": 16, "beta_slow": 0, "attention_factor": 1.5, "mscale": 1.0, "truncate": False},
            RopeConfig(50_000.0, "yarn", 4.0, 16, beta_fast=16.0, attention_factor=1.5, mscale=1.0, truncate=False),
        ),
        ({"type": "yarn", "factor": None, "original_max_position_embeddings": 16}, RopeConfig(50_000.0, "yarn", 4.0, 16)),
    ],
)  # fmt: skip
def test_rope_scaling_in_every_spelling(scaling, expected):
    assert parse(LLAMA | {"rope_theta": 50_000.0, "rope_scaling": scaling}).rope == expected
    new = {**(scaling or {}), "rope_theta": 50_000.0}  # transformers 5
    assert parse(LLAMA | {"rope_parameters": new}).rope == expected


def test_original_length_at_the_top_level_wins():
    config = LLAMA | {"rope_scaling": {"type": "yarn", **YARN}, "original_max_position_embeddings": 32}
    assert parse(config).rope.original_max_position_embeddings == 32


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, ["rope_scaling.rope_type", "longrope", "yarn"]),
        ({"rope_scaling": {"rope_type": "yarn", "type": "linear"}}, ["rope_type", "linear"]),
        ({"rope_scaling": {"type": "linear"}}, ["rope_scaling.factor", "missing"]),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}}, ["high_freq_factor", "missing"]),
        ({"rope_scaling": {"type": "linear", "factor": "two"}}, ["rope_scaling.factor", "'two'"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 1.0}}, ["rope_scaling.mscale", "not honoured"]),
        ({"rope_scaling": {"type": "default", "mrope_section": [1, 2]}}, ["mrope_section"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["rope_parameters.full_attention"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
        ({"partial_rotary_factor": 0.25}, ["partial_rotary_factor", "0.25"]),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 32}},
            ["original_max_position_embeddings", "32", "64"],
        ),
    ],
)  # fmt: skip
def test_refuses_rope_it_would_get_wrong(fields, words):
    refused(LLAMA | fields, *words)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, ["GemmaForCausalLM", "Qwen3ForCausalLM"]),
        ({"architectures": None}, ["architectures", "LlamaForCausalLM"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"pretraining_tp": 2}, ["pretraining_tp", "2"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "quantised"]),
        ({"final_logit_softcapping": 30.0}, ["final_logit_softcapping", "30.0"]),
        ({"a_field_of_tomorrow": True}, ["a_field_of_tomorrow", "True"]),
        ({"sliding_window": 16}, ["sliding_window", "LlamaForCausalLM"]),
        ({"hidden_size": None}, ["hidden_size", "missing"]),
        ({"hidden_size": 33}, ["hidden_size", "33", "4 heads"]),
        ({"head_dim": 7}, ["head_dim", "7", "even"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "3", "4"]),
        ({"num_hidden_layers": "two"}, ["num_hidden_layers", "'two'"]),
        ({"tie_word_embeddings": 1}, ["tie_word_embeddings", "1"]),
        ({"torch_dtype": "float64"}, ["torch_dtype", "float64", "bfloat16"]),
        ({"layer_types": ["full_attention"] * 3}, ["layer_types", "3", "4"]),
        ({"layer_types": ["linear_attention"] * 4}, ["layer_types[0]", "linear_attention"]),
    ],
)
def test_refuses_what_would_change_the_numbers(fields, words):
    refused(LLAMA | fields, *words)


def test_biases_follow_the_architecture():
    both = parse(LLAMA | {"attention_bias": True, "mlp_bias": True})
    assert both.qkv_bias and both.o_bias and both.mlp_bias
    qwen2 = SIZES | {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2}
    assert parse(qwen2).qkv_bias and not parse(qwen2).o_bias
    refused(qwen2 | {"attention_bias": False}, "attention_bias", "Qwen2ForCausalLM")
    refused(qwen2 | {"mlp_bias": True}, "mlp_bias")
    refused(
        SIZES | {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2, "attention_bias": True},
        "attention_bias",
    )


def test_windows_of_qwen():
    sliding = QWEN3 | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
    assert parse(sliding).window_sizes == (None, None, None, 8)
    assert parse(QWEN3 | {"sliding_window": 8, "max_window_layers": 0}).window_sizes == (None,) * 4
    types = ["sliding_attention", "full_attention"] * 2
    assert parse(sliding | {"layer_types": types}).window_sizes == (8, None, 8, None)
    refused(QWEN3 | {"layer_types": types}, "layer_types[0]", "sliding_window")


def test_windows_of_mistral():
    mistral = SIZES | {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}
    assert parse(mistral | {"sliding_window": None}).window_sizes == (None,) * 4
    assert parse(mistral | {"sliding_window": 8}).window_sizes == (8,) * 4
    mixed = ["sliding_attention"] * 3 + ["full_attention"]
    refused(mistral | {"sliding_window": 8, "layer_types": mixed}, "layer_types", "MistralForCausalLM")
    refused(mistral | {"sliding_window": 8, "use_sliding_window": False}, "use_sliding_window", "8")


def test_token_ids_prefer_the_generation_config():
    config = LLAMA | {"eos_token_id": 5, "bos_token_id": 4}
    assert parse(config).eos_token_ids == (5,)
    ours = parse(config, {"eos_token_id": [6, 7], "pad_token_id": 0})
    assert (ours.bos_token_id, ours.eos_token_ids, ours.pad_token_id) == (4, (6, 7), 0)
    assert parse(LLAMA | {"eos_token_id": None}).eos_token_ids == ()
