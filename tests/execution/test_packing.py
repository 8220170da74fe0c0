"""Plans as fixed-size arrays."""

import numpy as np
import pytest

from jaxkv.core.plan import Admission, BlockCopy, PrefillChunk, RowUpdate
from jaxkv.core.request import SamplingParams
from jaxkv.execution.batch import pack_prefill
from jaxkv.execution.decode_state import apply_updates, empty_state, pack_updates
from jaxkv.execution.programs import MAX_COPIES, bucket_for, geometric_buckets
from tests.support.tiny_programs import make_programs, tiny_llama


def test_prefill_chunks_follow_each_other_and_padding_is_dead():
    chunks = (PrefillChunk("a", 2, 5, (11, 12, 13), False), PrefillChunk("b", 0, 0, (21, 22), True))
    batch = pack_prefill(chunks, num_tokens=8, max_seqs=3, dead_row=4, block_size=16)
    assert batch.token_ids.tolist() == [11, 12, 13, 21, 22, 0, 0, 0]
    assert batch.positions.tolist() == [5, 6, 7, 0, 1, 5, 6, 7]
    assert batch.token_row.tolist() == [2, 2, 2, 0, 0, 4, 4, 4]
    assert batch.rows.tolist() == [2, 0, 4]
    assert batch.cu_q_lens.tolist() == [0, 3, 5, 5]
    assert batch.context_lens.tolist() == [5, 0, 0]
    assert batch.is_last.tolist() == [False, True, False]


def test_targets_stand_beside_the_tokens_that_they_follow():
    chunks = (
        PrefillChunk("a", 2, 5, (11, 12, 13), False, (13, 14), 1),
        PrefillChunk("b", 0, 0, (21, 22), False),
        PrefillChunk("c", 1, 0, (31, 32), True, (32,)),
    )
    batch = pack_prefill(chunks, num_tokens=10, max_seqs=3, dead_row=4, block_size=16)
    assert batch.targets.tolist() == [-1, 13, 14, -1, -1, 32, -1, -1, -1, -1]
    assert [chunk.has_result for chunk in chunks] == [True, False, True]


def test_an_empty_prefill_is_all_padding():
    batch = pack_prefill((), num_tokens=20, max_seqs=2, dead_row=4, block_size=8)
    assert set(batch.token_row.tolist()) == set(batch.rows.tolist()) == {4}
    assert batch.cu_q_lens.tolist() == [0, 0, 0] and not batch.is_last.any()
    assert batch.positions.max() == 7, "padding stays within the null block"


def admission(**fields) -> Admission:
    sampling = SamplingParams(temperature=0.5, top_k=-1, top_p=0.9, min_p=0.1, seed=2**32 + 2**31 + 7, logprobs=3)
    return Admission(**({"sampling": sampling, "max_new_tokens": 9, "min_new_tokens": 2, "stop_ids": (5, 6)} | fields))


def test_updates_reach_the_state():
    state = empty_state(max_num_seqs=4, max_blocks_per_row=8, max_stop_ids=3, vocab_size=50)
    updates = (RowUpdate(1, 0, (7, 8, 9), admission()), RowUpdate(3, 2, (5,)))
    (batch,) = pack_updates(updates, dead_row=4, max_entries=16, max_admissions=2, max_stop_ids=3)
    state = apply_updates(state, batch)
    assert state.block_table[1].tolist() == [7, 8, 9, 0, 0, 0, 0, 0]
    assert state.block_table[3].tolist() == [0, 0, 5, 0, 0, 0, 0, 0]
    assert state.budget.tolist() == [0, 9, 0, 0, 0] and state.min_left.tolist() == [0, 2, 0, 0, 0]
    assert state.stop_ids[1].tolist() == [5, 6, -1]
    assert (np.asarray(state.stop_ids)[[0, 2, 3, 4]] == -1).all()
    sampling = state.sampling
    assert sampling.temperature.tolist() == [0, 0.5, 0, 0, 0] and sampling.top_k.tolist() == [0] * 5
    assert sampling.top_p[1] == np.float32(0.9) and sampling.min_p[1] == np.float32(0.1)
    assert sampling.seed.tolist() == [0, 2**31 + 7, 0, 0, 0], "seeds wrap at 32 bits"
    assert sampling.num_logprobs.tolist() == [-1, 3, -1, -1, -1]
    assert not sampling.adjusts.any() and sampling.repetition_penalty.tolist()[:4] == [1] * 4
    assert not state.active.any()


def test_a_new_owner_replaces_all_of_the_old_ones_state():
    state = empty_state(max_num_seqs=2, max_blocks_per_row=4, max_stop_ids=3, vocab_size=50)
    for owner in (admission(), Admission(SamplingParams(temperature=0, seed=1), 3, 0, ())):
        (batch,) = pack_updates(
            (RowUpdate(0, 0, (1,), owner),), dead_row=2, max_entries=4, max_admissions=1, max_stop_ids=3
        )
        state = apply_updates(state, batch)
    assert (state.budget[0], state.min_left[0], state.sampling.temperature[0]) == (3, 0, 0)
    assert (state.stop_ids[0] == -1).all() and state.sampling.num_logprobs[0] == -1


def test_penalties_reach_their_row_and_mark_it():
    kinds = (
        {"repetition_penalty": 1.5},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -1.0},
        {"logit_bias": {3: 1.0}},
    )
    params = [SamplingParams(seed=1, **kind) for kind in kinds] + [SamplingParams(seed=1)]
    updates = tuple(RowUpdate(row, 0, (1,), admission(sampling=p)) for row, p in enumerate(params))
    state = empty_state(max_num_seqs=5, max_blocks_per_row=4, max_stop_ids=3, vocab_size=50)
    (batch,) = pack_updates(updates, dead_row=5, max_entries=8, max_admissions=7, max_stop_ids=3)
    sampling = apply_updates(state, batch).sampling
    assert sampling.adjusts.tolist() == [True] * 4 + [False, False], "padding must not mark the dead row"
    assert sampling.repetition_penalty.tolist()[:5] == [1.5, 1, 1, 1, 1]
    assert sampling.presence_penalty.tolist()[:5] == [0, 0.5, 0, 0, 0]
    assert sampling.frequency_penalty.tolist()[:5] == [0, 0, -1, 0, 0]


def test_many_updates_take_several_batches_and_lose_nothing():
    updates = tuple(RowUpdate(row, 0, tuple(range(10 * row + 1, 10 * row + 8)), admission()) for row in range(5))
    batches = pack_updates(updates, dead_row=5, max_entries=16, max_admissions=2, max_stop_ids=3)
    assert len(batches) == 3
    state = empty_state(max_num_seqs=5, max_blocks_per_row=8, max_stop_ids=3, vocab_size=50)
    for batch in batches:
        state = apply_updates(state, batch)
    for row in range(5):
        assert state.block_table[row].tolist() == [*range(10 * row + 1, 10 * row + 8), 0]
    assert state.budget.tolist() == [9] * 5 + [0], "the dead row is admitted with a budget of nothing"


def test_no_updates_change_no_row():
    state = empty_state(max_num_seqs=2, max_blocks_per_row=4, max_stop_ids=3, vocab_size=50)
    (batch,) = pack_updates((), dead_row=2, max_entries=4, max_admissions=2, max_stop_ids=3)
    after = apply_updates(state, batch)
    assert after.stop_ids.tolist() == state.stop_ids.tolist()
    assert not after.active.any() and not after.block_table.any() and not after.budget.any()


def test_block_copies_are_packed_in_order():
    programs = make_programs(tiny_llama())
    copies = tuple(BlockCopy(i, i + 20, i % 16) for i in range(1, MAX_COPIES + 4))
    batches = programs.pack_copies(copies)
    assert [batch[0].shape for batch in batches] == [(MAX_COPIES,)] * 2
    packed = np.concatenate([np.stack(batch, 1) for batch in batches])
    assert packed[: len(copies)].tolist() == [[c.src, c.dst, c.num_tokens] for c in copies]
    assert not packed[len(copies) :].any(), "padding copies nothing onto the null block"


@pytest.mark.parametrize("size, bucket", [(1, 64), (64, 64), (65, 128), (129, 200), (200, 200)])
def test_buckets(size, bucket):
    assert geometric_buckets(64, 200, 2) == (64, 128, 200)
    assert geometric_buckets(1, 16, 4) == (1, 4, 16) and geometric_buckets(7, 7, 2) == (7,)
    assert bucket_for(geometric_buckets(64, 200, 2), size) == bucket


def test_a_long_table_needs_one_update_entry_a_block():
    programs = make_programs(tiny_llama())
    updates = (RowUpdate(0, 0, tuple(range(1, 301)), admission()),)
    batches = programs.pack_updates(updates)
    assert sum((batch.entries[:, 0] == 0).sum() for batch in batches) == 300
