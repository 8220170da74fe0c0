"""A prompt's cached K/V are the same bit for bit, however it was cut, whatever was found and whoever came along.

It rests on a property of XLA:CPU that each JAX must keep: the rows of a matmul do not depend on how many there are, from
64 on (prefill pads to that), nor on where they stand.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.control.engine import Engine
from jaxkv.control.prefix_index import hash_blocks, root_hash
from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.clock import MonotonicClock
from jaxkv.core.progress import SilentProgress
from jaxkv.core.request import Request, SamplingParams
from jaxkv.execution.jax_executor import JaxExecutor
from jaxkv.execution.programs import Programs
from tests.support.tiny_models import TINY, random_tokens
from tests.support.tiny_programs import LIMITS, LimitedExecutor, make_programs, run_requests, tiny_llama, weights

PROMPT = random_tokens(208, seed=21)  # 13 full blocks
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)


@functools.lru_cache
def programs(dtype: str, kv_dtype: str) -> Programs:
    made = make_programs(
        tiny_llama(), dtype=dtype, kv_dtype=kv_dtype, prefill_buckets=(64, 128, 256), max_num_batched_tokens=256
    )
    made.compile(SilentProgress())
    return made


def cached_bits(
    dtype: str,
    chunk: int,
    *,
    kv_dtype: str | None = None,
    earlier: tuple[Request, ...] = (),
    company: tuple[Request, ...] = (),
):
    """uint8 [13, bytes a block in all layers, scales too] of PROMPT's blocks, and the prompt tokens that were found."""
    cast = tuple(w.astype(dtype) for w in weights(tiny_llama()))
    executor = JaxExecutor(programs(dtype, kv_dtype or dtype), cast, MonotonicClock())
    limits = dataclasses.replace(executor.limits, max_num_batched_tokens=chunk)
    engine = Engine(LimitedExecutor(executor, limits), SchedulerConfig(vocab_size=TINY["vocab_size"]))
    if earlier:
        run_requests(engine, list(earlier))
    news = run_requests(engine, [*company, Request("it", PROMPT, ONE_TOKEN)])
    hashes = hash_blocks(root_hash(engine.scheduler.config.cache_root, None), PROMPT, LIMITS.block_size)
    blocks = list(engine.scheduler.blocks.match(hashes).blocks)
    assert len(blocks) == 13
    leaves = jax.tree.leaves(executor._cache)
    parts = [np.asarray(leaf)[blocks].view(np.uint8).reshape(len(blocks), -1) for leaf in leaves]
    return np.concatenate(parts, axis=1), news["it"][-1].num_cached_tokens


def other(common: int) -> Request:
    return Request(f"other {common}", PROMPT[:common] + random_tokens(100, seed=22), ONE_TOKEN)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [("float32",) * 2, ("bfloat16",) * 2, ("float32", "int8"), ("float32", "int8,int4"), ("bfloat16", "fp8_e4m3")],
)
def test_bits_depend_on_nothing_but_the_tokens(dtype, kv_dtype):
    whole, found = cached_bits(dtype, 256, kv_dtype=kv_dtype)
    assert found == 0 and whole.any()
    cases = {
        "100 tokens a chunk": ({"chunk": 100}, 0),
        "64": ({"chunk": 64}, 0),
        "33": ({"chunk": 33}, 0),
        "7": ({"chunk": 7}, 0),
        "blocks found": ({"chunk": 256, "earlier": (other(96),)}, 96),
        "a block's head found": ({"chunk": 100, "earlier": (other(107),)}, 107),
        "in company": ({"chunk": 256, "company": (Request("a", random_tokens(41, seed=23), ONE_TOKEN),)}, 0),
        "in flight": ({"chunk": 256, "company": (other(50),)}, 48),
    }
    for name, (how, expected) in cases.items():
        bits, found = cached_bits(dtype, **how, kv_dtype=kv_dtype)
        assert found == expected, name
        assert np.array_equal(bits, whole), name


def test_other_tokens_give_other_bits():
    """The comparison above can fail."""
    changed = Request("changed", (PROMPT[0] ^ 1, *PROMPT[1:]), ONE_TOKEN)
    whole, _ = cached_bits("float32", 256)
    again, found = cached_bits("float32", 256, earlier=(changed,))
    assert found == 0 and np.array_equal(again, whole)
    assert not np.array_equal(whole[0], whole[1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("rows", "columns"), [(576, 1536), (192, 576), (96, 64)])
def test_matmul_rows_do_not_depend_on_how_many_there_are(dtype, rows, columns):
    rng = np.random.default_rng(0)
    weight = jnp.asarray(rng.standard_normal((rows, columns)), dtype)
    x = jnp.asarray(rng.standard_normal((512, columns)), dtype)
    multiply = jax.jit(lambda x, w: jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=dtype))
    whole = np.asarray(multiply(x, weight))
    for start, count in ((0, 64), (3, 64), (100, 128), (17, 65), (256, 256)):
        part = np.asarray(multiply(x[start : start + count], weight))
        assert np.array_equal(part.view(np.uint8), whole[start : start + count].view(np.uint8)), (start, count)
