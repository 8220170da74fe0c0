"""The memory plan: its numbers, and refusals whose suggestion works."""

import dataclasses
import re

import jax
import pytest

from jaxkv.core.config import EngineConfig
from jaxkv.core.errors import ConfigError
from jaxkv.execution.decode_state import empty_state, state_bytes
from jaxkv.execution.memory import GiB, MemoryNeeds, MemoryPlan, plan_memory

MiB = 2**20
NEEDS = MemoryNeeds(
    weights=500 * MiB,
    kv_per_token=40_000,
    decode_state=0,
    temporaries=100 * MiB,
    temporaries_per_seq=MiB,
    temporaries_per_token=50_000,
)


def plan(
    config: EngineConfig = EngineConfig(), *, needs=NEEDS, platform="gpu", available=2 * GiB, limit=2048, **more
) -> MemoryPlan:
    return plan_memory(config, needs, platform=platform, available=available, block_size=16, model_limit=limit, **more)


def test_gpu_takes_what_is_left():
    memory = plan()
    left = 2 * GiB - 600 * MiB
    assert memory.num_blocks == left // 640_000 - 1  # the null block is paid for out of the same budget
    assert (memory.num_blocks + 1) * 640_000 <= left < (memory.num_blocks + 2) * 640_000
    assert memory.max_model_len == 2048
    assert memory.num_tokens == memory.num_blocks * 16 and memory.kv_bytes == memory.num_tokens * 40_000
    assert memory.max_concurrency == pytest.approx(memory.num_blocks / 128)


def test_cpu_takes_a_quarter_and_no_more_than_one_gib():
    assert plan(platform="cpu", available=2 * GiB).num_blocks == GiB // 2 // 640_000 - 1
    assert plan(platform="cpu", available=100 * GiB).num_blocks == GiB // 640_000 - 1
    # A quarter is more than the weights leave: what is left.
    assert plan(platform="cpu", available=700 * MiB).num_blocks == 100 * MiB // 640_000 - 1


def test_no_more_blocks_than_the_kernels_address():
    assert plan(most_blocks=201).num_blocks == 200
    assert plan(most_blocks=10**6).num_blocks == plan().num_blocks
    assert plan(EngineConfig(num_gpu_blocks_override=200), most_blocks=201).num_blocks == 200
    with pytest.raises(
        ConfigError, match="num_gpu_blocks_override is 201, but .* address at most 200 blocks of 16 tokens"
    ):
        plan(EngineConfig(num_gpu_blocks_override=201), most_blocks=201)


def test_the_state_of_the_rows_is_paid_for_before_the_pool():
    needs = dataclasses.replace(NEEDS, decode_state=300 * MiB)
    assert plan(needs=needs).num_blocks == (2 * GiB - 900 * MiB) // 640_000 - 1
    assert "token counts of the rows): 300.00 MiB" in "\n".join(plan(needs=needs).lines())
    # Too many rows: half of what stands in the way is theirs.
    config = EngineConfig(max_num_seqs=99, max_num_batched_tokens=512)
    text = refusal(config, needs=needs, available=650 * MiB)
    assert number_after(text, "lower max_num_seqs to less than") == (150 * MiB - 2 * 640_000) // (4 * MiB)


def test_the_state_of_the_rows_is_what_the_executor_allocates():
    state = empty_state(7, 5, 80, 1000)
    assert state_bytes(7, 5, 80, 1000) == sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    counts, masks = 2 * 256 * 128_256, 256 * 128_256 / 8
    assert counts + masks < state_bytes(256, 2048, 80, 128_256) < counts + masks + 4e6


def test_settings_are_taken_exactly():
    assert plan(EngineConfig(kv_cache_memory_bytes=64 * MiB)).num_blocks == 64 * MiB // 640_000 - 1
    memory = plan(EngineConfig(num_gpu_blocks_override=200, max_model_len=3200))
    assert (memory.num_blocks, memory.max_model_len) == (200, 3200)


def test_the_models_limit_is_lowered_to_what_the_pool_holds():
    assert plan(EngineConfig(num_gpu_blocks_override=100)).max_model_len == 1600
    assert plan(EngineConfig(num_gpu_blocks_override=1000)).max_model_len == 2048


def test_lines_tell_the_numbers():
    lines = plan(EngineConfig(num_gpu_blocks_override=200, max_model_len=1000)).lines()
    text = "\n".join(lines)
    for expected in (
        "Memory available to the engine: 2.00 GiB",
        "Weights: 500.00 MiB",
        "Biggest temporary (from the compiler): 100.00 MiB",
        "40,000 bytes a token, 122.07 MiB in 200 blocks of 16 tokens",
        "KV cache size: 3,200 tokens",
        "Maximum concurrency for 1,000 tokens a request: 3.17x",  # 200 blocks / 63 blocks
    ):
        assert expected in text


def refusal(config: EngineConfig, **kwargs) -> str:
    with pytest.raises(ConfigError) as error:
        plan(config, **kwargs)
    return str(error.value)


def number_after(text: str, words: str) -> int:
    match = re.search(re.escape(words) + r" ([\d,]+)", text)
    assert match, f"{words!r} is not in {text!r}"
    return int(match[1].replace(",", ""))


@pytest.mark.parametrize("blocks", [7, 99, 127])
def test_a_length_that_does_not_fit(blocks):
    config = EngineConfig(num_gpu_blocks_override=blocks, max_model_len=2048)
    text = refusal(config)
    assert "max_model_len is 2,048 tokens, but the KV cache holds" in text and f"{16 * blocks:,}" in text
    longest = number_after(text, "max_model_len to at most")
    assert longest == 16 * blocks
    assert plan(dataclasses.replace(config, max_model_len=longest)).max_model_len == longest
    assert number_after(text, "num_gpu_blocks_override:") == 128
    assert plan(dataclasses.replace(config, num_gpu_blocks_override=128)).max_model_len == 2048


@pytest.mark.parametrize("kv_per_token", [40_000, 46_080, 12_345, 100_001])
def test_raising_the_pool_as_told_works(kv_per_token):
    needs = dataclasses.replace(NEEDS, kv_per_token=kv_per_token)
    config = EngineConfig(kv_cache_memory_bytes=20 * MiB, max_model_len=2048)
    text = refusal(config, needs=needs)
    told = number_after(text, "KV cache gets at least")
    bigger = dataclasses.replace(config, kv_cache_memory_bytes=told)
    assert plan(bigger, needs=needs).max_model_len == 2048


@pytest.mark.parametrize("available", [GiB, 1111 * MiB, 700 * MiB, 777_777_777])
@pytest.mark.parametrize("kv_per_token", [40_000, 46_080, 12_345])
def test_lowering_the_pool_as_told_works(available, kv_per_token):
    needs = dataclasses.replace(NEEDS, kv_per_token=kv_per_token)
    config = EngineConfig(kv_cache_memory_bytes=4 * GiB, max_model_len=64)
    text = refusal(config, needs=needs, available=available, limit=10**9)
    assert "500.00 MiB for weights, 100.00 MiB for temporaries, 0 B for the rows' state" in text
    told = number_after(text, "lower kv_cache_memory_bytes to at most")
    smaller = plan(dataclasses.replace(config, kv_cache_memory_bytes=told), needs=needs, available=available)
    # Never more than the model allows: that advice would be refused in turn.
    assert number_after(refusal(config, needs=needs, available=available, limit=100), "max_model_len at most") == 100
    longest = number_after(text, "max_model_len at most")
    # The suggestion is the largest that fits, not just any.
    assert smaller.num_tokens == longest and told + 16 * kv_per_token > available - 600 * MiB
    assert (
        plan(
            EngineConfig(num_gpu_blocks_override=longest // 16, max_model_len=longest), needs=needs, available=available
        ).max_model_len
        == longest
    )


def test_too_many_blocks():
    config = EngineConfig(num_gpu_blocks_override=100_000)
    text = refusal(config)
    most = number_after(text, "lower num_gpu_blocks_override to at most")
    assert plan(dataclasses.replace(config, num_gpu_blocks_override=most)).num_blocks == most
    assert "at most" in refusal(dataclasses.replace(config, num_gpu_blocks_override=most + 1))


def test_a_pool_without_a_single_block():
    for max_model_len in (None, 64):
        config = EngineConfig(kv_cache_memory_bytes=MiB, max_model_len=max_model_len)
        text = refusal(config)
        assert "the KV cache holds 0 (0 blocks" in text and "lower max_model_len" not in text
        bigger = dataclasses.replace(config, kv_cache_memory_bytes=number_after(text, "KV cache gets at least"))
        assert plan(bigger).num_blocks == (1 if max_model_len is None else 4)


def test_no_room_for_a_single_block():
    config = EngineConfig(max_num_seqs=16, max_num_batched_tokens=512)
    for platform, knob in (("cpu", "take a smaller model or dtype"), ("gpu", "raise gpu_memory_utilization")):
        text = refusal(config, platform=platform, available=400 * MiB)
        assert knob in text and "500.00 MiB for weights" in text and "400.00 MiB are available" in text
    # Weights fit, temporaries do not: the setting that is to blame is named, with what would do, and no other.
    text = refusal(dataclasses.replace(config, max_num_seqs=100), platform="cpu", available=550 * MiB)
    assert number_after(text, "lower max_num_seqs to less than") == 48 and "max_num_batched_tokens" not in text
    text = refusal(dataclasses.replace(config, max_num_batched_tokens=10**9), platform="cpu", available=550 * MiB)
    assert number_after(text, "lower max_num_batched_tokens to less than") == 1022 and "max_num_seqs" not in text
