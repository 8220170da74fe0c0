"""A step's result comes when the step has run."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxkv.core.clock import MonotonicClock
from jaxkv.core.plan import Admission, PrefillChunk, RowUpdate, StepPlan
from jaxkv.core.request import SamplingParams
from jaxkv.execution.jax_executor import JaxExecutor
from tests.support.tiny_programs import compiled_programs, tiny_llama, weights


@jax.jit
def _slow(x: jax.Array) -> jax.Array:
    """x, after about half a second."""
    work = jax.lax.fori_loop(0, 1000, lambda _, y: jnp.tanh(y @ y), jnp.full((256, 256), 0.1))
    return x + 0 * work[0, 0].astype(x.dtype)


@pytest.mark.parametrize("is_last", [False, True])
def test_a_chunk_has_run_when_its_result_is_read(monkeypatch, is_last):
    """Also one that does not end its prompt, and so tells nothing."""
    config = tiny_llama()
    programs = compiled_programs(config)
    (bucket,) = programs.prefill
    fast = programs.prefill[bucket]

    def slow_prefill(*args):
        cache, hidden, logprobs = fast(*args)
        return cache, hidden, dataclasses.replace(logprobs, chosen=_slow(logprobs.chosen))

    _slow(jnp.zeros((bucket,))).block_until_ready()  # compiling it takes longer than what it does

    monkeypatch.setitem(programs.prefill, bucket, slow_prefill)
    executor = JaxExecutor(programs, weights(config), MonotonicClock())
    admission = Admission(SamplingParams(seed=0), max_new_tokens=4, min_new_tokens=0, stop_ids=())
    plan = StepPlan(
        0,
        updates=(RowUpdate(0, 0, (1, 2), admission),),
        prefill=(PrefillChunk("a", 0, 0, (5, 6, 7), is_last=is_last),),
    )
    handle = executor.submit(plan)
    output = handle.parts[0][0]
    assert not output.prompt_logprobs.chosen.is_ready(), "the step is not slow enough to be waited for"
    result = handle.result()
    assert output.prompt_logprobs.chosen.is_ready() and len(result.rows) == is_last
