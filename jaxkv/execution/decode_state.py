"""DecodeState: what the device knows of each row, so that the decode loop runs without the host.

The arrays have one row more than `max_num_seqs`: the last is the dead row. It is never active, its table names the null
block only, and all padding points at it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.core.plan import Masking, RowUpdate
from jaxkv.core.request import MAX_LOGIT_BIASES
from jaxkv.core.token_constraint import mask_bytes

NO_TOKEN = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowSampling:
    """How each row chooses tokens."""

    temperature: jax.Array  # f32[S]; 0 is greedy
    top_k: jax.Array  # i32[S]; 0 keeps all
    top_p: jax.Array  # f32[S]
    min_p: jax.Array  # f32[S]
    repetition_penalty: jax.Array  # f32[S]; 1 changes nothing
    presence_penalty: jax.Array  # f32[S]; 0 changes nothing
    frequency_penalty: jax.Array  # f32[S]; 0 changes nothing
    adjusts: jax.Array  # bool[S] penalties or logit_bias change the row's logits
    masked: jax.Array  # bool[S] only ids of the row's mask can be chosen
    seed: jax.Array  # u32[S]
    num_logprobs: jax.Array  # i32[S]; -1 for none


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adjustments:
    """What changes each row's logits: of penalties and logit_bias, defined only for rows with `sampling.adjusts`, and the
    masks of rows with `sampling.masked`.

    Counts of every id in 16 bits make a row's penalties cost the same after any history: 2 V bytes a row, 66 MB at
    S = 256 and V = 128k, 1.7 MB for the demo model at S = 16. Counting each row's tokens anew every step would take
    max_model_len scattered additions a row instead.
    """

    token_counts: jax.Array  # u16[S, V] 2 * occurrences in the output (at most 32,767) + 1 if in the prompt
    bias_ids: jax.Array  # i32[S, MAX_LOGIT_BIASES] padded with NO_TOKEN
    bias: jax.Array  # f32[S, MAX_LOGIT_BIASES]
    mask: jax.Array  # u32[S, ceil(V / 32)] the lowest bit is the smallest id's


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    last_token: jax.Array  # i32[S] newest token, whose KV is not written yet
    seq_len: jax.Array  # i32[S] tokens in cache = position of last_token
    block_table: jax.Array  # i32[S, M]
    active: jax.Array  # bool[S]
    budget: jax.Array  # i32[S] tokens the row may still produce
    min_left: jax.Array  # i32[S] tokens before a stop id may be chosen
    one_a_call: jax.Array  # bool[S] the row takes one step a call, since each needs a mask of the host
    stop_ids: jax.Array  # i32[S, W] padded with NO_TOKEN
    sampling: RowSampling
    adjustments: Adjustments | None  # None in what `take` returns

    @property
    def dead_row(self) -> int:
        return self.last_token.shape[0] - 1

    def take(self, rows: jax.Array) -> "DecodeState":
        """Copies of `rows` i32[B], without the adjustments: these are too big, and stay in place."""
        small = dataclasses.replace(self, adjustments=None)
        return jax.tree.map(lambda x: x.at[rows].get(mode="promise_in_bounds"), small)


def empty_state(max_num_seqs: int, max_blocks_per_row: int, max_stop_ids: int, vocab_size: int) -> DecodeState:
    rows = max_num_seqs + 1

    def filled(value, dtype) -> jax.Array:
        return jnp.full((rows,), value, dtype)

    return DecodeState(
        last_token=filled(0, jnp.int32),
        seq_len=filled(0, jnp.int32),
        block_table=jnp.zeros((rows, max_blocks_per_row), jnp.int32),
        active=filled(False, jnp.bool_),
        budget=filled(0, jnp.int32),
        min_left=filled(0, jnp.int32),
        one_a_call=filled(False, jnp.bool_),
        stop_ids=jnp.full((rows, max_stop_ids), NO_TOKEN, jnp.int32),
        sampling=RowSampling(
            temperature=filled(0, jnp.float32),
            top_k=filled(0, jnp.int32),
            top_p=filled(1, jnp.float32),
            min_p=filled(0, jnp.float32),
            repetition_penalty=filled(1, jnp.float32),
            presence_penalty=filled(0, jnp.float32),
            frequency_penalty=filled(0, jnp.float32),
            adjusts=filled(False, jnp.bool_),
            masked=filled(False, jnp.bool_),
            seed=filled(0, jnp.uint32),
            num_logprobs=filled(-1, jnp.int32),
        ),
        adjustments=Adjustments(
            token_counts=jnp.zeros((rows, vocab_size), jnp.uint16),
            bias_ids=jnp.full((rows, MAX_LOGIT_BIASES), NO_TOKEN, jnp.int32),
            bias=jnp.zeros((rows, MAX_LOGIT_BIASES), jnp.float32),
            mask=jnp.zeros((rows, mask_bytes(vocab_size) // 4), jnp.uint32),
        ),
    )


def state_bytes(max_num_seqs: int, max_blocks_per_row: int, max_stop_ids: int, vocab_size: int) -> int:
    """Size of the state that `empty_state` makes of these."""
    state = jax.eval_shape(lambda: empty_state(max_num_seqs, max_blocks_per_row, max_stop_ids, vocab_size))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class UpdateBatch:
    """Row updates of a plan as fixed-size arrays: one compiled shape, applied as often as a plan needs."""

    entries: np.ndarray  # i32[U, 3] (row, column, block); padding is (dead row, 0, 0)
    rows: np.ndarray  # i32[A] admitted rows; padding is the dead row
    ints: np.ndarray  # i32[A, 7 + W] budget, min_left, top_k, seed, num_logprobs, adjusts, masking, stop ids
    floats: np.ndarray  # f32[A, 6] temperature, top_p, min_p, repetition, presence and frequency penalty


def pack_updates(
    updates: tuple[RowUpdate, ...], *, dead_row: int, max_entries: int, max_admissions: int, max_stop_ids: int
) -> list[UpdateBatch]:
    """As few UpdateBatches as hold all updates, in order."""
    entries = [(u.row, u.first_column + i, block) for u in updates for i, block in enumerate(u.blocks)]
    admissions = [(u.row, u.admission) for u in updates if u.admission is not None]
    batches = []
    while entries or admissions or not batches:
        batch = UpdateBatch(
            entries=np.zeros((max_entries, 3), np.int32),
            rows=np.full((max_admissions,), dead_row, np.int32),
            ints=np.zeros((max_admissions, 7 + max_stop_ids), np.int32),
            floats=np.zeros((max_admissions, 6), np.float32),
        )
        batch.entries[:, 0] = dead_row
        batch.ints[:, [4, *range(7, 7 + max_stop_ids)]] = NO_TOKEN  # no logprobs, no stop ids
        some, entries = entries[:max_entries], entries[max_entries:]
        if some:
            batch.entries[: len(some)] = some
        for i, (row, a) in enumerate(admissions[:max_admissions]):
            s = a.sampling
            batch.rows[i] = row
            logprobs = -1 if s.logprobs is None else s.logprobs
            seed = np.uint32(s.seed & 0xFFFFFFFF).view(np.int32)
            adjusts = s.has_penalties or bool(s.logit_bias)
            counts = (a.max_new_tokens, a.min_new_tokens, max(s.top_k, 0), seed, logprobs)
            batch.ints[i, :7] = (*counts, adjusts, a.masking)
            batch.ints[i, 7 : 7 + len(a.stop_ids)] = a.stop_ids
            penalties = (s.repetition_penalty, s.presence_penalty, s.frequency_penalty)
            batch.floats[i] = (s.temperature, s.top_p, s.min_p, *penalties)
        admissions = admissions[max_admissions:]
        batches.append(batch)
    return batches


def apply_updates(state: DecodeState, batch: UpdateBatch) -> DecodeState:
    """Rows with a new owner are reset and stay inactive until their last prefill chunk; new blocks enter the tables."""
    rows, ints, floats = batch.rows, batch.ints, batch.floats
    row, column, block = batch.entries[:, 0], batch.entries[:, 1], batch.entries[:, 2]

    def put(old: jax.Array, new) -> jax.Array:
        return old.at[rows].set(new, mode="promise_in_bounds")

    s = state.sampling
    return DecodeState(
        last_token=put(state.last_token, 0),
        seq_len=put(state.seq_len, 0),
        block_table=state.block_table.at[row, column].set(block, mode="promise_in_bounds"),
        active=put(state.active, False),
        budget=put(state.budget, ints[:, 0]),
        min_left=put(state.min_left, ints[:, 1]),
        one_a_call=put(state.one_a_call, ints[:, 6] == Masking.EACH_TOKEN),
        stop_ids=put(state.stop_ids, ints[:, 7:]),
        sampling=RowSampling(
            temperature=put(s.temperature, floats[:, 0]),
            top_k=put(s.top_k, ints[:, 2]),
            top_p=put(s.top_p, floats[:, 1]),
            min_p=put(s.min_p, floats[:, 2]),
            repetition_penalty=put(s.repetition_penalty, floats[:, 3]),
            presence_penalty=put(s.presence_penalty, floats[:, 4]),
            frequency_penalty=put(s.frequency_penalty, floats[:, 5]),
            adjusts=put(s.adjusts, ints[:, 5] > 0),
            masked=put(s.masked, ints[:, 6] != Masking.NONE),
            seed=put(s.seed, jax.lax.bitcast_convert_type(ints[:, 3], jnp.uint32)),
            num_logprobs=put(s.num_logprobs, ints[:, 4]),
        ),
        adjustments=state.adjustments,
    )
