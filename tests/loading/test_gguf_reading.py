"""GGUF headers, configs and tensors, against files that the gguf library wrote and against the demo model."""

import dataclasses
import hashlib

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from jaxkv.core.errors import CheckpointError
from jaxkv.core.model_config import ModelConfig, RopeConfig
from jaxkv.loading import tensor_source
from jaxkv.loading.gguf_config import llama3_divisors, parse_gguf_config
from jaxkv.loading.gguf_file import read_gguf_file
from jaxkv.loading.gguf_source import QUANTISED, GGUFSource

# Sizes are multiples of 256, the block of the K quantisations.
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=40,
    hidden_size=256,
    intermediate_size=512,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    rms_norm_eps=1e-5,
    max_position_embeddings=128,
    rope=RopeConfig(theta=100_000.0),
    window_sizes=(None, None),
)


def parsed(path) -> ModelConfig:
    source = GGUFSource(path)
    return parse_gguf_config(source.file, source.rope_freqs())


def test_demo_config(demo_source):
    config = parsed(demo_source.path)
    # theta 10,000 instead would still read well: perplexity 29.9 instead of 26.
    assert config.rope == RopeConfig(theta=100_000.0)
    assert config.rms_norm_eps == 1e-5
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.max_position_embeddings) == (49_152, 8192)
    assert config.tie_word_embeddings and config.window_sizes == (None,) * 30
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (1, (2,), 2)
    assert config.num_parameters() == 134_515_008


def test_demo_header_equals_the_gguf_librarys(demo_source):
    ours = read_gguf_file(demo_source.path)
    assert len(ours.tensors) == 272
    embedding = ours.tensors["token_embd.weight"]
    assert (embedding.shape, embedding.type_name) == ((49_152, 576), "Q8_0")
    # Parsed by gguf.GGUFReader once (6.5 s): chained over all tokens and merges.
    digest = hashlib.sha256()
    for text in ours.metadata["tokenizer.ggml.tokens"] + ours.metadata["tokenizer.ggml.merges"]:
        digest.update(text.encode() + b"\0")
    assert digest.hexdigest() == "7bf761750ca9e58d061d969bdb4cd1dcb561ce374e59f7a2da283d4e02d06f43"


def test_header_equals_the_gguf_librarys(write_gguf, random_tensors):
    extra = {
        "tokenizer.ggml.tokens": ["a", "é", ""],
        "tokenizer.ggml.scores": [0.5, -1.0, 2.0],
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.eos_token_id": 7,
    }
    path = write_gguf(CONFIG, random_tensors(CONFIG), extra=extra)
    ours, theirs = read_gguf_file(path), gguf.GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents(), key
    assert len(ours.metadata) == len(theirs.fields) - 3  # theirs counts version and the two counts as fields
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.shape, mine.type_name) == (tuple(tensor.shape[::-1]), tensor.tensor_type.name)
        assert (mine.offset, mine.num_bytes) == (tensor.data_offset, tensor.n_bytes)


@pytest.mark.parametrize("chunk_bytes", [4 * 2**20, 3000])
def test_every_float_reads_back_in_hugging_face_order(write_gguf, random_tensors, monkeypatch, chunk_bytes):
    """The writer interleaves q and k rows as llama.cpp does; small chunks cross every boundary."""
    monkeypatch.setattr("jaxkv.loading.gguf_source.CHUNK_BYTES", chunk_bytes)
    config = dataclasses.replace(CONFIG, qkv_bias=True, o_bias=True)
    tensors = random_tensors(config)
    types = {"model.norm.weight": Q.F32, "lm_head.weight": Q.F16, "model.layers.0.self_attn.q_proj.weight": Q.BF16}
    source = GGUFSource(write_gguf(config, tensors, types=types))
    assert sorted(source.names()) == sorted(tensors)
    for name, tensor in tensors.items():
        expected = tensor
        if types.get(name) == Q.F16:
            expected = tensor.astype(np.float16)
        elif types.get(name) == Q.BF16:
            expected = tensor.astype(source.stored_dtype(name))
            assert expected.dtype.name == "bfloat16"
        np.testing.assert_array_equal(source.read(name), expected, err_msg=name)
        np.testing.assert_array_equal(
            source.read(name, np.dtype(np.float16)), expected.astype(np.float16), err_msg=name
        )


def test_other_architectures_keep_their_row_order(write_gguf, random_tensors):
    config = dataclasses.replace(CONFIG, architecture="Qwen3ForCausalLM", qk_norm=True)
    tensors = random_tensors(config)
    path = write_gguf(config, tensors, architecture="qwen3")
    source = GGUFSource(path)
    assert parsed(path) == config
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(source.read(name), tensor, err_msg=name)


@pytest.mark.parametrize("type_name", QUANTISED)
def test_quantised_blocks_equal_the_gguf_library(write_gguf, random_tensors, monkeypatch, type_name):
    """Bytes at random (scales too, where finite); read in pieces of 2 rows, expected from the whole at once."""
    monkeypatch.setattr("jaxkv.loading.gguf_source.CHUNK_BYTES", 2 * 4 * CONFIG.hidden_size)
    kind, rng = Q[type_name], np.random.default_rng(1)
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    name, shape = "model.layers.1.self_attn.v_proj.weight", (128, CONFIG.hidden_size)
    raw = rng.integers(0, 256, (shape[0], shape[1] // block_size * block_bytes), dtype=np.uint8)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = gguf.quants.dequantize(raw, kind)
    path = write_gguf(CONFIG, {name: np.zeros(shape, np.float32)}, types={name: Q.F32})
    entry = read_gguf_file(path).tensors["blk.1.attn_v.weight"]
    # Same header, other type: the type id stands 12 bytes before the end of the (last) tensor entry.
    data = bytearray(path.read_bytes())
    position = data.index(b"blk.1.attn_v.weight") + len("blk.1.attn_v.weight") + 4 + 2 * 8
    data[position : position + 4] = int(kind).to_bytes(4, "little")
    data[entry.offset : entry.offset + raw.nbytes] = raw.tobytes()
    path.write_bytes(data)
    with np.errstate(invalid="ignore", over="ignore"):
        found = GGUFSource(path).read(name)
    np.testing.assert_array_equal(found, expected)
    assert found.shape == shape and np.isfinite(found).mean() > 0.5


def test_a_quantisation_it_does_not_know_is_refused_by_name(write_gguf):
    name = "model.layers.0.mlp.up_proj.weight"
    path = write_gguf(CONFIG, {name: np.zeros((256, 256), np.float32)}, types={name: Q.TQ1_0})
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up\.weight: type TQ1_0 is not supported.*Q4_1"):
        GGUFSource(path).read(name)


def test_float16_overflow_is_an_error_not_an_infinity(write_gguf):
    name = "model.norm.weight"
    path = write_gguf(CONFIG, {name: np.full(256, 70_000, np.float32)})
    with pytest.raises(CheckpointError, match="output_norm.weight.*7e\\+04.*bfloat16"):
        GGUFSource(path).read(name, np.dtype(np.float16))
    assert GGUFSource(path).read(name)[0] == 70_000


def test_configs_of_other_shapes(write_gguf, random_tensors):
    tensors = random_tensors(CONFIG)
    assert parsed(write_gguf(CONFIG, tensors)) == CONFIG
    extra = {
        "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32,
        "attention.sliding_window": 16, "tokenizer.ggml.eos_token_id": 3, "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.eom_token_id": 3,
    }  # fmt: skip
    config = parsed(write_gguf(CONFIG, tensors, extra=extra, name="yarn.gguf"))
    assert config.rope == RopeConfig(100_000.0, "yarn", 4.0, 32)
    assert config.window_sizes == (16, 16) and config.eos_token_ids == (3, 5)
    linear = parsed(write_gguf(CONFIG, tensors, extra={"rope.scale_linear": 2.0}, name="linear.gguf"))
    assert linear.rope == RopeConfig(100_000.0, "linear", 2.0)
    del tensors["lm_head.weight"]
    assert parsed(write_gguf(CONFIG, tensors, name="tied.gguf")).tie_word_embeddings


def test_llama3_scaling_is_derived_from_its_divisors(write_gguf, random_tensors):
    rope = RopeConfig(500_000.0, "llama3", 32.0, 8192, 1.0, 4.0)
    config = dataclasses.replace(CONFIG, rope=rope)
    divisors = llama3_divisors(rope, 64).astype(np.float32)
    # Short wavelengths are untouched, long ones divided by the factor, and some lie between.
    assert divisors[0] == 1 and divisors[-1] == 32 and np.sum((divisors > 1) & (divisors < 32)) >= 3
    path = write_gguf(config, random_tensors(config), extra_tensors={"rope_freqs.weight": divisors})
    assert parsed(path).rope == rope
    divisors[3] = 1.5
    path = write_gguf(config, random_tensors(config), extra_tensors={"rope_freqs.weight": divisors}, name="other.gguf")
    with pytest.raises(CheckpointError, match="rope_freqs.weight.*no llama3 scaling"):
        parsed(path)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, ["rope.scaling.type", "longrope", "yarn"]),
        ({"rope.scaling.type": "yarn"}, ["rope.scaling.factor", "missing"]),
        ({"rope.scaling.attn_factor": 1.5}, ["rope.scaling.attn_factor", "1.5"]),
        ({"expert_count": 8}, ["expert_count", "8"]),
        ({"logit_scale": 0.5}, ["logit_scale", "0.5"]),
        ({"block_count": None}, ["block_count", "missing"]),
        ({"rope.dimension_count": 32}, ["rope.dimension_count", "32", "64"]),
        ({"attention.head_count_kv": [2, 4]}, ["head_count_kv", "[2, 4]"]),
        ({"attention.head_count_kv": 3}, ["head_count_kv", "3", "4"]),
        ({"split.count": 3}, ["3 files"]),
        ({"tokenizer.ggml.tokens": ["x"] * 41}, ["41", "40"]),
    ],
)
def test_refuses_what_would_change_the_numbers(write_gguf, extra, words):
    path = write_gguf(CONFIG, {"model.embed_tokens.weight": np.zeros((40, 256), np.float32)}, extra=extra)
    with pytest.raises(CheckpointError) as caught:
        parsed(path)
    for word in [str(path), *words]:
        assert word in str(caught.value)


def test_refuses_unknown_architectures_and_missing_embeddings(write_gguf):
    embedding = {"model.embed_tokens.weight": np.zeros((40, 256), np.float32)}
    with pytest.raises(CheckpointError, match="'gemma2'.*qwen3"):
        parsed(write_gguf(CONFIG, embedding, architecture="gemma2", name="gemma.gguf"))
    with pytest.raises(CheckpointError, match="token_embd.weight"):
        parsed(write_gguf(CONFIG, {"model.norm.weight": np.zeros(256, np.float32)}))


def test_damaged_files_say_what_is_wrong(write_gguf, random_tensors, tmp_path):
    data = write_gguf(CONFIG, random_tensors(CONFIG)).read_bytes()
    damaged = tmp_path / "damaged.gguf"

    def message(content: bytes) -> str:
        damaged.write_bytes(content)
        with pytest.raises(CheckpointError) as caught:
            GGUFSource(damaged)
        assert str(damaged) in str(caught.value)
        return str(caught.value)

    assert "too short" in message(b"GGUF")
    assert "starts with b'PK" in message(b"PK\x03\x04" + data[4:])
    assert "version 9" in message(data[:4] + (9).to_bytes(4, "little") + data[8:])
    assert "ends inside its GGUF header" in message(data[:300])
    cut = message(data[:-5000])
    assert "blk.1.ffn_down.weight" in cut and f"the file has {len(data) - 5000}" in cut


def test_a_file_that_shrinks_after_opening_is_an_error(write_gguf, random_tensors):
    path = write_gguf(CONFIG, random_tensors(CONFIG))
    source = GGUFSource(path)
    path.write_bytes(path.read_bytes()[:20_000])
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_down\.weight needs \d+ bytes .* only 0 are there"):
        source.read("model.layers.1.mlp.down_proj.weight")


def test_conversion_rounds_to_nearest_even():
    out = np.empty(3, np.float16)
    tensor_source.convert_into(out, np.array([1 + 2**-11, 1 + 3 * 2**-11, 65_504], np.float32), "here")
    assert out.tolist() == [1.0, 1 + 2**-9, 65_504.0]
