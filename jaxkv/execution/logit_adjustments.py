"""min_tokens, logit_bias, penalties and masks: what changes a row's logits before a token is chosen.

The order is vLLM's: min_tokens, logit_bias, then repetition, frequency and presence penalty; a mask has the last word. A
batch in which no row asks for any of them runs one predicate, and adds nothing but the sampled token's place in the dead
row's counts.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.core.plan import Admission, TokenMask
from jaxkv.core.request import MAX_LOGIT_BIASES
from jaxkv.execution.decode_state import NO_TOKEN, Adjustments, DecodeState, RowSampling
from jaxkv.execution.sampling import forbid

# Different tokens of a history that one call takes; a longer one takes more calls. 16 KiB to upload.
COUNTS_A_CALL = 2048
# Masks that one call takes: 0.5 MB to upload for V = 128k, 49 KB for the demo model with 8 rows.
MASKS_A_CALL = 32
_MOST_COUNTS = np.iinfo(np.uint16).max // 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdjustmentUpdate:
    """A part of what one new owner's row must hold, in one fixed shape."""

    row: np.ndarray  # i32[]
    is_first: np.ndarray  # bool[] forget what the row's last owner left
    token_ids: np.ndarray  # i32[COUNTS_A_CALL] different tokens of the history, rising; padding is out of range
    counts: np.ndarray  # u16[COUNTS_A_CALL]
    bias_ids: np.ndarray  # i32[MAX_LOGIT_BIASES]
    bias: np.ndarray  # f32[MAX_LOGIT_BIASES]


def pack_adjustments(row: int, admission: Admission | None) -> list[AdjustmentUpdate]:
    """The calls that prepare `row`; none where the request changes no logits. `None` packs an example that does nothing
    but reset the row."""
    biases: dict[int, float] = {}
    token_ids = counts = np.zeros((0,), np.int64)
    if admission is not None:
        biases = dict(admission.sampling.logit_bias)
        if not biases and not admission.sampling.has_penalties:
            return []
        token_ids, counts = _count(admission.prompt_token_ids, admission.output_token_ids)
    bias_ids = np.full((MAX_LOGIT_BIASES,), NO_TOKEN, np.int32)
    bias = np.zeros((MAX_LOGIT_BIASES,), np.float32)
    bias_ids[: len(biases)], bias[: len(biases)] = list(biases), list(biases.values())
    updates = []
    for start in range(0, max(len(token_ids), 1), COUNTS_A_CALL):
        some = slice(start, start + COUNTS_A_CALL)
        length = len(token_ids[some])
        # Rising beyond every vocabulary, so that the indices of a call differ.
        padded_ids = np.iinfo(np.int32).max - np.arange(COUNTS_A_CALL, dtype=np.int32)[::-1]
        padded_counts = np.zeros((COUNTS_A_CALL,), np.uint16)
        padded_ids[:length], padded_counts[:length] = token_ids[some], counts[some]
        updates.append(AdjustmentUpdate(np.int32(row), np.bool_(start == 0), padded_ids, padded_counts, bias_ids, bias))
    return updates


def _count(prompt: tuple[int, ...], output: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Different ids of both, rising, and their token_counts."""
    output_ids, times = np.unique(np.asarray(output, np.int64), return_counts=True)
    ids = np.union1d(np.asarray(prompt, np.int64), output_ids)
    counts = np.isin(ids, np.asarray(prompt, np.int64)).astype(np.int64)
    counts[np.searchsorted(ids, output_ids)] += 2 * np.minimum(times, _MOST_COUNTS)
    return ids, counts


def apply_adjustments(state: DecodeState, update: AdjustmentUpdate) -> DecodeState:
    old, row = state.adjustments, update.row
    token_counts = old.token_counts.at[row].set(jnp.where(update.is_first, 0, old.token_counts[row]))
    token_counts = token_counts.at[row, update.token_ids].set(
        update.counts, mode="drop", unique_indices=True, indices_are_sorted=True
    )
    adjustments = dataclasses.replace(
        old,
        token_counts=token_counts,
        bias_ids=old.bias_ids.at[row].set(update.bias_ids),
        bias=old.bias.at[row].set(update.bias),
    )
    return dataclasses.replace(state, adjustments=adjustments)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MaskUpdate:
    """New masks of some rows, in one fixed shape."""

    rows: np.ndarray  # i32[K]; padding is the dead row
    masks: np.ndarray  # u32[K, ceil(V / 32)]


def pack_masks(masks: Sequence[TokenMask], *, dead_row: int, num_words: int) -> list[MaskUpdate]:
    """As few as hold all masks; at least one."""
    most = min(dead_row, MASKS_A_CALL)
    updates = []
    for start in range(0, max(len(masks), 1), most):
        some = masks[start : start + most]
        update = MaskUpdate(np.full((most,), dead_row, np.int32), np.zeros((most, num_words), np.uint32))
        for i, (row, mask) in enumerate(some):
            update.rows[i], update.masks[i] = row, np.frombuffer(mask, "<u4")
        updates.append(update)
    return updates


def apply_masks(state: DecodeState, update: MaskUpdate) -> DecodeState:
    mask = state.adjustments.mask.at[update.rows].set(update.masks, mode="promise_in_bounds")
    return dataclasses.replace(state, adjustments=dataclasses.replace(state.adjustments, mask=mask))


def adjust(
    logits: jax.Array, rows: DecodeState, adjustments: Adjustments, row_ids: jax.Array, forbids: jax.Array
) -> jax.Array:
    """Logits f32[B, V] to choose from.

    Args:
      rows: state of rows `row_ids` i32[B]. adjustments: of all rows.
      forbids: bool[B] stop ids may not be chosen yet.
    """

    def change(logits: jax.Array) -> jax.Array:
        logits = forbid(logits, rows.stop_ids, forbids)
        logits = jax.lax.cond(
            rows.sampling.adjusts.any(),
            lambda x: _penalised(_biased(x, adjustments, row_ids, rows.sampling), adjustments, row_ids, rows.sampling),
            lambda x: x,
            logits,
        )
        masked = rows.sampling.masked
        return jax.lax.cond(masked.any(), lambda x: _masked(x, adjustments, row_ids, masked), lambda x: x, logits)

    changes = forbids | rows.sampling.adjusts | rows.sampling.masked
    return jax.lax.cond(changes.any(), change, lambda x: x, logits)


def _masked(logits: jax.Array, adjustments: Adjustments, row_ids: jax.Array, masked: jax.Array) -> jax.Array:
    words = adjustments.mask.at[row_ids].get(mode="promise_in_bounds")  # u32[B, ceil(V / 32)]
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    allowed = bits.reshape(len(row_ids), -1)[:, : logits.shape[1]] > 0
    return jnp.where(allowed | ~masked[:, None], logits, -jnp.inf)


def _biased(logits: jax.Array, adjustments: Adjustments, row_ids: jax.Array, sampling: RowSampling) -> jax.Array:
    vocab = logits.shape[1]
    ids = adjustments.bias_ids.at[row_ids].get(mode="promise_in_bounds")
    bias = adjustments.bias.at[row_ids].get(mode="promise_in_bounds")
    ids = jnp.where(sampling.adjusts[:, None] & (ids != NO_TOKEN), ids, vocab)
    return logits.at[jnp.arange(logits.shape[0])[:, None], ids].add(bias, mode="drop")


def _penalised(logits: jax.Array, adjustments: Adjustments, row_ids: jax.Array, sampling: RowSampling) -> jax.Array:
    counts = adjustments.token_counts.at[row_ids].get(mode="promise_in_bounds")  # u16[B, V]
    penalty = sampling.repetition_penalty[:, None]
    times = (counts >> 1).astype(jnp.float32)
    penalised = jnp.where(counts > 0, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    penalised -= sampling.frequency_penalty[:, None] * times
    penalised -= sampling.presence_penalty[:, None] * (times > 0)
    return jnp.where(sampling.adjusts[:, None], penalised, logits)


def count_tokens(token_counts: jax.Array, rows: jax.Array, tokens: jax.Array) -> jax.Array:
    """token_counts u16[S, V] with one more output token i32[B] in each of `rows` i32[B], which differ but for the dead
    row."""
    old = token_counts.at[rows, tokens].get(mode="promise_in_bounds")
    new = jnp.where(old < 2 * _MOST_COUNTS, old + 2, old)  # full counts stay: their sum would start from 0 again
    return token_counts.at[rows, tokens].set(new, mode="promise_in_bounds")
