"""The compiler's own memory analysis: the cache is updated in place, and nobody pays for a padded table."""

import functools
import re

import jax
import pytest

from tests.support.tiny_models import parse, tiny_config
from tests.support.tiny_programs import make_programs, tiny_llama

# Pool of 2,049 blocks of 16 tokens: 32 MiB of KV, far above everything else in a tiny model.
SMALL = {"num_blocks": 2049, "max_model_len": 512}


@functools.lru_cache
def analysis(kind: str, bucket: int | None, num_blocks: int, max_model_len: int, **dtypes: str):
    programs = make_programs(tiny_llama(), num_blocks=num_blocks, max_model_len=max_model_len, **dtypes)
    cache_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(programs.abstract_cache))
    return programs.lower(kind, bucket).compile().memory_analysis(), cache_bytes


@pytest.mark.parametrize("kind, bucket", [("prefill", 64), ("decode", 4), ("copy", None)])
def test_cache_is_updated_in_place(kind, bucket):
    memory, cache_bytes = analysis(kind, bucket, **SMALL)
    assert cache_bytes == 2049 * 16 * 2 * 2 * 2 * 32 * 4  # blocks, tokens, k and v, layers, heads, head_dim, f32
    assert memory.alias_size_in_bytes >= cache_bytes
    # One block copy holds 16 blocks of one layer; nothing comes near the pool.
    assert memory.temp_size_in_bytes < cache_bytes / 16


@pytest.mark.parametrize(
    "kind, bucket, dtype, kv_dtype",
    [
        ("prefill", 64, "bfloat16", "bfloat16"),
        ("decode", 4, "bfloat16", "bfloat16"),
        ("decode", 1, "float16", "float16"),
        ("decode", 4, "float32", "int8"),
        ("copy", None, "bfloat16", "bfloat16"),
    ],
)
def test_no_step_converts_the_pool(kind, bucket, dtype, kv_dtype):
    """XLA:CPU would gather and scatter 16-bit floats as float32, all of them (see LayerKV): one layer's keys would be
    half of the pool, scales of int8 a 17th."""
    buckets = (bucket,) if kind == "decode" else (4,)
    memory, cache_bytes = analysis(kind, bucket, **SMALL, dtype=dtype, kv_dtype=kv_dtype, decode_buckets=buckets)
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes / 20


@pytest.mark.parametrize("kind, bucket", [("prefill", 64), ("decode", 4)])
def test_no_step_copies_or_converts_the_embedding(kind, bucket):
    """16-bit floats again: XLA:CPU has no gather of them."""
    config = parse(tiny_config(vocab_size=30_011, num_hidden_layers=1, hidden_size=512))
    programs = make_programs(config, dtype="bfloat16", num_blocks=33)
    assert programs.lower(kind, bucket).compile().memory_analysis().temp_size_in_bytes < 30_011 * 512 * 2


def test_decode_state_is_updated_in_place():
    memory, _ = analysis("update", None, **SMALL)
    table_bytes = 5 * (512 // 16) * 4
    assert memory.alias_size_in_bytes > table_bytes and memory.temp_size_in_bytes < 64 * 1024


@pytest.mark.parametrize("kind, bucket", [("prefill", 64), ("decode", 4)])
def test_temporaries_do_not_grow_with_the_pool(kind, bucket):
    small, _ = analysis(kind, bucket, **SMALL)
    doubled, _ = analysis(kind, bucket, num_blocks=2 * 2049, max_model_len=512)
    assert doubled.temp_size_in_bytes == small.temp_size_in_bytes


@pytest.mark.parametrize("kind, bucket", [("prefill", 64), ("decode", 4)])
def test_temporaries_do_not_grow_with_max_model_len(kind, bucket):
    """Beyond copies of the block tables themselves: 4 bytes for each of rows x blocks, against 8 KiB of KV a block."""
    small, _ = analysis(kind, bucket, **SMALL)
    long, _ = analysis(kind, bucket, num_blocks=2049, max_model_len=8192)
    table_growth = 4 * (8192 - 512) // 16 * 4
    assert long.temp_size_in_bytes - small.temp_size_in_bytes <= 4 * table_growth
    kv_growth = 4 * (8192 - 512) * 2 * 2 * 32 * 4  # one layer's KV of all rows
    assert 4 * table_growth < kv_growth / 100


@pytest.mark.parametrize("kind, bucket", [("decode", 4), ("first", None), ("adjust", None), ("mask", None)])
def test_counts_and_masks_are_updated_in_place(kind, bucket):
    """They are the biggest part of the decode state, 1.9 and 0.1 MB here: no step may copy them, in its loop or around it."""
    config = parse(tiny_config(vocab_size=30_011, num_hidden_layers=1))
    programs = make_programs(config, num_blocks=33, max_num_seqs=31, decode_buckets=(4,))
    state = programs.abstract_state
    counts = state.adjustments.token_counts
    assert (counts.shape, counts.dtype.itemsize) == ((32, 30_011), 2)
    compiled = programs.lower(kind, bucket).compile()
    state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert compiled.memory_analysis().alias_size_in_bytes >= state_bytes
    assert state.adjustments.mask.shape == (32, 938)
    for array, is_written in (("u16[32,30011]", kind != "mask"), ("u32[32,938]", kind == "mask")):
        results = [line.split(" = ", 1)[1] for line in compiled.as_text().splitlines() if f" = {array}" in line]
        kinds = {re.match(rf"{re.escape(array)}\{{[\d,]*\}} ([\w-]+)\(", result)[1] for result in results}
        assert "copy" not in kinds and "copy-start" not in kinds, kinds
        assert bool(kinds - {"parameter", "get-tuple-element"}) == is_written, kinds
