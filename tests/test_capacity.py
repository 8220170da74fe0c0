"""The planner says what the engine says: the same memory plan, the same lines, the same bytes allocated."""

import dataclasses
import os

import jax
import pytest
from gpulib.step_programs import MODELS

from jaxkv import program_plan, startup
from jaxkv.capacity import mean_waste, plan_capacity, shard
from jaxkv.core.config import EngineConfig
from jaxkv.core.errors import ConfigError
from jaxkv.core.progress import SilentProgress
from jaxkv.device import DEVICES, local_device
from jaxkv.execution.kv_cache import empty_cache
from jaxkv.execution.memory import gpu_share
from jaxkv.execution.programs import Programs
from jaxkv.program_plan import plan_programs
from jaxkv.settings import resolve_settings
from pallas_kernels.kv_format import FORMATS
from pallas_kernels.triton_compat import MAX_ONE_BYTE_ELEMENTS
from tests.support.tiny_models import model_of, parse, random_tensors, tiny_config

LLAMA_3, LLAMA_2 = MODELS["llama-3-8b"], MODELS["llama-2-7b"]
H200, A100 = DEVICES["h200"], DEVICES["a100-80g"]


def from_the_compiler(programs: Programs) -> int:
    programs.start(SilentProgress(), programs.largest())
    return programs.temporaries()


def test_a_started_engine_says_the_same(monkeypatch, tmp_path):
    model, available = parse(tiny_config(num_hidden_layers=1)), 40 * 2**20
    monkeypatch.setattr(program_plan, "available_memory", lambda: available)
    config = EngineConfig(
        max_num_seqs=1, max_num_batched_tokens=64, enforce_eager=True, compilation_cache_dir=str(tmp_path)
    )

    def load(dtype: str):
        return model_of(model, random_tensors(model))

    started = startup.build_engine(config, model, load, origin="tiny", progress=SilentProgress())
    planned = plan_capacity(config, model, local_device(), available=available, temporaries=from_the_compiler)
    assert planned.memory == started.memory and planned.memory.lines() == started.memory.lines()
    assert planned.memory.needs.temporaries > 0 and planned.memory.num_blocks > 1000
    # And that is what is allocated, the null block on top.
    cache = started.engine.executor._cache
    block = planned.memory.block_size * planned.memory.needs.kv_per_token
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(cache)) == (planned.memory.num_blocks + 1) * block
    assert planned.memory.kv_bytes == planned.memory.num_blocks * block
    # Before the compiler has run, less is known of temporaries.
    bound = plan_capacity(config, model, local_device(), available=available)
    assert bound.memory.needs.temporaries < planned.memory.needs.temporaries
    assert "at least; the compiler has not run" in "\n".join(bound.memory.lines())


def test_a_gpu_that_is_not_here_is_planned_as_by_an_engine_on_it(monkeypatch):
    config = EngineConfig(kv_cache_dtype="int8", gpu_memory_utilization=0.85, compilation_cache_dir="")
    monkeypatch.setattr(program_plan, "available_memory", lambda: gpu_share(H200.memory, 0.85))
    monkeypatch.setattr(Programs, "start", lambda *_: None)
    monkeypatch.setattr(Programs, "stop", lambda _: None)
    monkeypatch.setattr(Programs, "temporaries", lambda _: 2**30)
    resolved = resolve_settings(config, LLAMA_3, H200)
    programs, memory = plan_programs(resolved, LLAMA_3, H200, SilentProgress())
    asked = []
    planned = plan_capacity(config, LLAMA_3, H200, temporaries=lambda p: asked.append(p.shapes) or 2**30)
    assert planned.memory == memory and planned.config == resolved
    # The step functions asked about are the engine's but for the number of blocks.
    blocks = {"num_blocks": programs.shapes.limits.num_blocks}
    (shapes,) = asked
    assert dataclasses.replace(shapes, limits=dataclasses.replace(shapes.limits, **blocks)) == programs.shapes
    assert (resolved.attention_implementation, resolved.dtype, resolved.block_size) == ("pallas_triton", "bfloat16", 64)


def test_the_share_is_what_the_allocator_is_told(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    startup._reserve_gpu_memory(EngineConfig(gpu_memory_utilization=0.9125))
    told = float(os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"])
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION")
    assert gpu_share(A100.memory, 0.9125) == int(A100.memory * told)
    assert plan_capacity(EngineConfig(), LLAMA_2, A100).memory.available == int(A100.memory * 0.9)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("model", [LLAMA_2, LLAMA_3], ids=["llama-2", "llama-3"])
def test_bytes_a_token_are_those_of_the_arrays(model, kv_format):
    memory = plan_capacity(EngineConfig(kv_cache_dtype=kv_format), model, H200).memory
    cache = jax.eval_shape(lambda: empty_cache(model, num_blocks=10, block_size=64, dtype=kv_format))
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)) == 10 * 64 * memory.needs.kv_per_token
    assert memory.available - memory.needs.fixed - memory.kv_bytes < 2 * 64 * memory.needs.kv_per_token


def test_llamas_by_hand():
    memory = plan_capacity(EngineConfig(dtype="float16"), LLAMA_2, A100).memory
    assert memory.needs.weights == 2 * 6_738_415_616  # parameters as Hugging Face counts them
    assert memory.needs.kv_per_token == 2 * 32 * 32 * 128 * 2
    assert plan_capacity(EngineConfig(), LLAMA_3, A100).memory.needs.weights == 2 * 8_030_261_248
    tokens = {
        kv_format: plan_capacity(EngineConfig(kv_cache_dtype=kv_format), LLAMA_3, A100).memory.num_tokens
        for kv_format in ("bfloat16", "int8")
    }
    assert tokens["int8"] / tokens["bfloat16"] == pytest.approx(256 / 130, rel=1e-3)


def test_requests_at_once():
    planned = plan_capacity(EngineConfig(num_gpu_blocks_override=1000), LLAMA_2, A100)
    assert planned.concurrency(64) == 1000 and planned.concurrency(65) == 500
    assert planned.concurrency(4096) == planned.memory.max_concurrency == 1000 / 64
    assert planned.concurrency(4097) is None  # longer than the model


def test_kernels_may_address_fewer_blocks_than_fit():
    large = dataclasses.replace(H200, memory=2**39)
    planned = plan_capacity(EngineConfig(kv_cache_dtype="int8"), LLAMA_2, large)
    assert planned.capped and planned.memory.num_blocks == MAX_ONE_BYTE_ELEMENTS // (32 * 64 * 128) - 1
    assert not plan_capacity(EngineConfig(), LLAMA_2, large).capped


@pytest.mark.parametrize("block_size", [16, 64])
def test_waste_is_the_mean_of_what_blocks_leave_empty(block_size):
    lengths = range(1, 20 * block_size + 1)
    empty = [-(-length // block_size) * block_size - length for length in lengths]
    assert sum(empty) / len(empty) == mean_waste(block_size)


def test_a_part_of_the_model():
    half = plan_capacity(EngineConfig(), shard(LLAMA_3, 2), A100).memory
    whole = plan_capacity(EngineConfig(), LLAMA_3, A100).memory
    assert half.needs.kv_per_token == whole.needs.kv_per_token // 2
    # Embeddings, head and norms are whole on each.
    replicated = 2 * (2 * 128_256 * 4096 + 65 * 4096)
    assert whole.needs.weights - replicated == 2 * (half.needs.weights - replicated)
    with pytest.raises(ConfigError, match="16 devices cannot share the model: num_kv_heads 8 is no multiple of it"):
        shard(LLAMA_3, 16)


def test_what_the_engine_refuses_is_refused():
    with pytest.raises(ConfigError, match="gpu_memory_utilization is 1.5"):
        plan_capacity(EngineConfig(gpu_memory_utilization=1.5), LLAMA_2, A100)
    with pytest.raises(ConfigError, match="the engine needs 12.55 GiB for weights.* raise gpu_memory_utilization"):
        plan_capacity(EngineConfig(gpu_memory_utilization=0.5), LLAMA_2, DEVICES["24g"])


def test_windows_let_more_requests_in():
    """Mistral-7B-v0.1: 4,096 tokens of window and a chunk of 8,192 are all that a request of 32,768 holds."""
    mistral = dataclasses.replace(LLAMA_3, window_sizes=(4096,) * LLAMA_3.num_layers, max_position_embeddings=32_768)
    whole = dataclasses.replace(mistral, window_sizes=LLAMA_3.window_sizes)
    config = EngineConfig(max_num_batched_tokens=2048)
    windowed, plain = (plan_capacity(config, model, A100).memory for model in (mistral, whole))
    assert windowed.num_blocks == plain.num_blocks
    # 6,142 tokens behind each other touch 97 blocks of 64.
    assert windowed.concurrency(32_768) == windowed.num_blocks / 97 and plain.concurrency(32_768) == plain.num_blocks / 512
    assert windowed.concurrency(4096) == plain.concurrency(4096)
    assert "a request keeps at most 6,208 tokens (97 blocks)" in windowed.lines()[-1]
    # As a policy, with the sinks' block; and a request may be longer than the model's own limit and than the pool.
    config = dataclasses.replace(config, kv_window=4096, max_model_len=2**20)
    policy = plan_capacity(config, whole, A100).memory
    assert policy.max_model_len == 2**20 > policy.num_tokens and policy.max_concurrency == policy.num_blocks / 98


@pytest.mark.parametrize("settings, told", [
    ({"kv_window": 0}, "kv_window is 0"),
    ({"kv_sinks": -1}, "kv_sinks is -1"),
    ({"kv_window": 8192}, "lower kv_window to at most 8,188"),
    ({"kv_window": 1024, "max_model_len": 2**20 + 1}, "at most 1,048,576"),
    ({"max_model_len": 8193}, "with a kv_window"),
    ({"kv_window": 1024, "cascade": "on"}, "kv_window's window"),
])  # fmt: skip
def test_windows_that_cannot_be(settings, told):
    with pytest.raises(ConfigError, match=told):
        plan_capacity(EngineConfig(**settings), LLAMA_3, A100)
