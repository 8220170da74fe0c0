"""Logits of every position through the paged cache: chunks of a prompt, then decode steps, in scattered blocks."""

import functools

import jax
import numpy as np
from flax import nnx

from jaxkv.execution.batch import DecodeAttention, PrefillAttention
from jaxkv.execution.kv_cache import empty_cache
from jaxkv.models.llama import Llama


@functools.partial(jax.jit, static_argnums=0)
def _prefill(graphdef, weights, layers, token_ids, positions, slots, table, query_len, context_len):
    model = nnx.merge(graphdef, weights)
    attention = PrefillAttention(
        slots=slots,
        block_table=table[None],
        cu_q_lens=jax.numpy.stack([jax.numpy.int32(0), query_len]),
        context_lens=context_len[None],
        implementation="xla",
    )
    hidden, layers = model(token_ids, positions, layers, attention)
    return model.logits(hidden), layers


@functools.partial(jax.jit, static_argnums=0)
def _decode(graphdef, weights, layers, token_ids, positions, slots, table):
    model = nnx.merge(graphdef, weights)
    attention = DecodeAttention(slots=slots, block_table=table[None], seq_lens=positions + 1, implementation="xla")
    hidden, layers = model(token_ids, positions, layers, attention)
    return model.logits(hidden), layers


def paged_logits(
    model: Llama,
    token_ids: tuple[int, ...],
    *,
    chunk: int = 64,
    num_decoded: int = 0,
    block_size: int = 16,
    dtype: str = "float32",
) -> np.ndarray:
    """f32[n, V] for each position of one sequence: chunks of `chunk` tokens, the last `num_decoded` one by one."""
    n = len(token_ids)
    num_blocks = -(-n // block_size)
    rng = np.random.default_rng(0)
    table = (1 + rng.permutation(num_blocks)).astype(np.int32)
    layers = empty_cache(model.config, num_blocks=num_blocks + 1, block_size=block_size, dtype=dtype).layers
    graphdef, weights = nnx.split(model)
    ids = np.asarray(token_ids, np.int32)
    position = np.arange(n, dtype=np.int32)
    slots = table[position // block_size] * block_size + position % block_size

    def padded(values: np.ndarray, start: int, end: int) -> np.ndarray:
        return np.pad(values[start:end], (0, chunk - (end - start)))  # padding goes to the null block

    logits = []
    prefilled = n - num_decoded
    for start in range(0, prefilled, chunk):
        end = min(start + chunk, prefilled)
        arrays = [padded(values, start, end) for values in (ids, position, slots)]
        out, layers = _prefill(graphdef, weights, layers, *arrays, table, np.int32(end - start), np.int32(start))
        logits.append(np.asarray(out[: end - start]))
    for i in range(prefilled, n):
        out, layers = _decode(graphdef, weights, layers, ids[i : i + 1], position[i : i + 1], slots[i : i + 1], table)
        logits.append(np.asarray(out))
    return np.concatenate(logits)
