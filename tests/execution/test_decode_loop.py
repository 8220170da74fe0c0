"""prefill_step and decode_steps on the device, plan by plan, against the dense model."""

import functools

import chex
import jax
import numpy as np
import pytest
from flax import nnx

from jaxkv.core.plan import Admission, Masking, PrefillChunk, RowUpdate, TokenMask
from jaxkv.core.request import SamplingParams
from jaxkv.core.token_constraint import mask_of
from jaxkv.execution.decode_loop import decode_steps
from jaxkv.execution.kv_cache import empty_cache
from jaxkv.execution.step_output import EXHAUSTED, STOPPED
from tests.support.dense_model import DenseModel
from tests.support.tiny_models import model_of, random_tensors, random_tokens
from tests.support.tiny_programs import LIMITS, NUM_TOP, compiled_programs, tiny_llama, weights

CONFIG = tiny_llama()
DEAD = LIMITS.max_num_seqs
GREEDY = SamplingParams(temperature=0.0, seed=0)
PROMPTS = {0: random_tokens(20, seed=1), 2: random_tokens(7, seed=2), 3: random_tokens(33, seed=3)}


@functools.lru_cache
def dense() -> DenseModel:
    return DenseModel(CONFIG, random_tensors(CONFIG))


@functools.lru_cache
def greedy(row: int, count: int = 10) -> tuple[int, ...]:
    return tuple(dense().generate(PROMPTS[row], count))


class Device:
    """A cache and a decode state, driven through the compiled step functions."""

    def __init__(self) -> None:
        self.programs = compiled_programs(CONFIG)
        self.cache = empty_cache(CONFIG, num_blocks=LIMITS.num_blocks, block_size=16, dtype="float32")
        self.state = self.programs.shapes.empty_state()

    @staticmethod
    def blocks(row: int) -> tuple[int, ...]:
        """Each row owns eight scattered blocks: room for 128 tokens."""
        return tuple(range(5 + row, 5 + row + 8 * 7, 7))

    def start(
        self, rows=tuple(PROMPTS), *, budget=100, min_tokens=0, stop_ids=(), sampling=GREEDY, masking=None, masks=None
    ) -> np.ndarray:
        """Admit and prefill rows in one call; returns the packed output [R, 3] of the prefill."""
        updates = tuple(
            RowUpdate(
                row,
                0,
                self.blocks(row),
                Admission(
                    sampling, budget, min_tokens, tuple(stop_ids), masking=(masking or {}).get(row, Masking.NONE)
                ),
            )
            for row in rows
        )
        for batch in self.programs.pack_updates(updates):
            self.state = self.programs.apply_updates(self.state, batch)
        self.tell(masks or {})
        return self.prefill([PrefillChunk(str(row), row, 0, PROMPTS[row], True) for row in rows])

    def tell(self, masks: dict) -> None:
        """Masks by row: the ids that they allow."""
        told = tuple(TokenMask(row, mask_of(ids, CONFIG.vocab_size)) for row, ids in masks.items())
        for update in self.programs.pack_masks(told):
            self.state = self.programs.apply_masks(self.state, update)

    def prefill(self, chunks: list[PrefillChunk]) -> np.ndarray:
        self.cache, self.state, output = self.programs.run_prefill(
            weights(CONFIG), self.cache, self.state, tuple(chunks)
        )
        return np.asarray(output.packed)

    def decode(self, rows: list[int], num_steps: int, bucket: int = 4) -> np.ndarray:
        """Packed output [B, 2 + C] of one call."""
        padded = np.full((bucket,), DEAD, np.int32)
        padded[: len(rows)] = rows
        self.cache, self.state, output = self.programs.decode[bucket](
            weights(CONFIG), self.cache, self.state, padded, np.int32(num_steps)
        )
        return np.asarray(output.packed)

    def snapshot(self):
        return jax.tree.map(np.array, (self.cache, self.state))


def test_prefill_then_decode_gives_the_greedy_tokens():
    device = Device()
    first = device.start()
    assert first[:3, 0].tolist() == [1, 1, 1] and first[3].tolist()[0] == 0
    assert first[:3, 2].tolist() == [greedy(row)[0] for row in PROMPTS]
    packed = device.decode([3, 0, 2], 8)
    assert packed[:3, 0].tolist() == [8, 8, 8] and packed[:, 1].tolist() == [0, 0, 0, 0]
    for place, row in enumerate([3, 0, 2]):
        assert tuple(packed[place, 2:]) == greedy(row)[1:9]
    assert packed[3, 0] == 0, "padding emits nothing"
    assert device.state.seq_len.tolist() == [28, 0, 15, 41, 0]
    assert device.state.last_token.tolist()[:4] == [greedy(0)[8], 0, greedy(2)[8], greedy(3)[8]]
    assert device.state.budget.tolist()[:4] == [91, 0, 91, 91]
    assert device.state.active.tolist() == [True, False, True, True, False]


def test_fewer_steps_than_compiled():
    device = Device()
    device.start()
    packed = device.decode([0, 2], 3)
    assert packed[:2, 0].tolist() == [3, 3]
    assert tuple(packed[0, 2:]) == (*greedy(0)[1:4], 0, 0, 0, 0, 0)
    assert tuple(device.decode([0], 2, bucket=1)[0, 2:4]) == greedy(0)[4:6]


def test_a_prompt_in_chunks_starts_only_with_its_last():
    device = Device()
    updates = (RowUpdate(0, 0, device.blocks(0), Admission(GREEDY, 100, 0, ())),)
    for batch in device.programs.pack_updates(updates):
        device.state = device.programs.apply_updates(device.state, batch)
    prompt = PROMPTS[0]
    packed = device.prefill([PrefillChunk("0", 0, 0, prompt[:9], False)])
    assert packed[0, 0] == 0 and not device.state.active.any() and device.state.budget[0] == 100
    packed = device.prefill([PrefillChunk("0", 0, 9, prompt[9:], True)])
    assert packed[0].tolist() == [1, 0, greedy(0)[0]]
    assert device.state.active[0] and device.state.seq_len[0] == 20
    assert tuple(device.decode([0], 4)[0, 2:6]) == greedy(0)[1:5]


def test_a_row_that_waits_for_masks_takes_one_step_a_call():
    """Its neighbours take all; masks hold from the step after they were told, and leave other rows alone."""
    device = Device()
    masks = {0: [greedy(0)[1]], 2: [5, 9], 3: range(CONFIG.vocab_size)}
    kinds = {0: Masking.EACH_TOKEN, 2: Masking.FIXED, 3: Masking.NONE}
    device.start(masking=kinds, masks={0: [greedy(0)[0]], 2: [5, 9]})
    device.tell(masks)
    packed = device.decode([3, 0, 2], 8)
    assert packed[:3, 0].tolist() == [8, 1, 8] and packed[:3, 1].tolist() == [0, 0, 0]
    assert tuple(packed[0, 2:]) == greedy(3)[1:9] and packed[1, 2] == greedy(0)[1]
    assert set(packed[2, 2:].tolist()) <= {5, 9}
    assert device.state.active.tolist() == [True, False, True, True, False], "the row that waits has not ended"
    device.tell({0: [greedy(0)[2]]})
    packed = device.decode([0], 8, bucket=1)
    assert packed[0, :3].tolist() == [1, 0, greedy(0)[2]]


def test_a_row_that_waits_for_masks_ends_like_others():
    device = Device()
    stop = greedy(0)[1]
    every = {0: range(CONFIG.vocab_size)}
    device.start((0,), stop_ids=(stop,), masking={0: Masking.EACH_TOKEN}, masks=every)
    assert device.decode([0], 8)[0, :3].tolist() == [1, STOPPED, stop] and not device.state.active[0]
    assert device.decode([0], 8)[0, 0] == 0
    device.start((0,), budget=2, masking={0: Masking.EACH_TOKEN}, masks=every)
    assert device.decode([0], 8)[0, :2].tolist() == [1, EXHAUSTED] and not device.state.active[0]


def test_budget_ends_a_row():
    device = Device()
    assert device.start(budget=3)[:3, 1].tolist() == [0, 0, 0]
    packed = device.decode([0, 2, 3], 8)
    assert packed[:3, 0].tolist() == [2, 2, 2] and packed[:3, 1].tolist() == [EXHAUSTED] * 3
    assert packed[:3, 2:4].tolist() == [list(greedy(row)[1:3]) for row in PROMPTS]
    assert not device.state.active.any() and device.state.seq_len.tolist()[:4] == [22, 0, 9, 35]
    assert device.start(budget=1)[:3].tolist() == [[1, EXHAUSTED, greedy(row)[0]] for row in PROMPTS]
    assert not device.state.active.any()


def test_a_stop_id_ends_its_row_and_no_other():
    device = Device()
    stop = greedy(2)[4]
    first_place = {row: greedy(row).index(stop) if stop in greedy(row) else None for row in PROMPTS}
    device.start(stop_ids=(stop,))
    packed = device.decode(list(PROMPTS), 8)
    for place, row in enumerate(PROMPTS):
        end = first_place[row] if first_place[row] is not None and first_place[row] <= 8 else None
        expected = greedy(row)[1:9] if end is None else greedy(row)[1 : end + 1]
        assert packed[place, 0] == len(expected) and tuple(packed[place, 2 : 2 + len(expected)]) == expected
        assert packed[place, 1] == (0 if end is None else STOPPED)
        assert device.state.active[row] == (end is None)
    assert first_place[2] is not None and any(place is None for place in first_place.values())


def test_a_first_token_that_stops_never_activates_the_row():
    device = Device()
    packed = device.start(rows=(2,), stop_ids=(greedy(2)[0],))
    assert packed[0].tolist() == [1, STOPPED, greedy(2)[0]] and not device.state.active.any()
    assert device.decode([2], 4)[0, 0] == 0


def test_min_tokens_forbids_stop_ids_for_so_long():
    """The chosen tokens are the best of those that are not forbidden."""
    device = Device()
    stop_ids = tuple(sorted({*greedy(0)[:6]}))
    packed = device.start(rows=(0,), min_tokens=4, stop_ids=stop_ids)
    tokens = [int(packed[0, 2])]
    packed = device.decode([0], 8)
    tokens += packed[0, 2 : 2 + packed[0, 0]].tolist()
    sequence = list(PROMPTS[0])
    for place, token in enumerate(tokens):
        logits = dense().logits(tuple(sequence))[-1]
        if place < 4:
            logits[list(stop_ids)] = -np.inf
        assert token == logits.argmax()
        sequence.append(token)
    assert not {*tokens[:4]} & {*stop_ids}
    assert {*greedy(0)[:4]} & {*stop_ids}, "without min_tokens a stop id would have come"


def test_the_loop_leaves_when_no_row_is_active():
    """A step after the last row's end would have written a token into the later columns."""
    device = Device()
    device.start(budget=4)
    packed = device.decode([0, 2], 8)
    assert packed[:2, 0].tolist() == [3, 3]
    assert not packed[:, 5:].any(), "the loop went on"
    assert device.decode([0, 2], 8)[:, 2:].any() == False, "no row was active, yet a step ran"  # noqa: E712


def test_ended_rows_and_padding_write_to_the_null_block_only():
    device = Device()
    device.start(budget=2)
    device.decode([0], 1)  # row 0 ends; rows 2 and 3 have one token left
    device.start(rows=(2,), budget=100)
    (cache_before, state_before) = device.snapshot()
    device.decode([0, 2], 8)
    (cache_after, state_after) = device.snapshot()
    written = {device.blocks(2)[7 // 16], 0}
    for before, after in zip(cache_before.layers, cache_after.layers, strict=True):
        changed = (before.k != after.k).any(axis=(1, 2, 3))
        assert set(np.flatnonzero(changed)) <= written and changed[device.blocks(2)[0]]
    assert not state_after.active[DEAD] and not state_after.block_table[DEAD].any()
    # Rows that the call does not name keep everything.
    for before, after in zip(jax.tree.leaves(state_before), jax.tree.leaves(state_after), strict=True):
        assert np.array_equal(before[[1, 3]], after[[1, 3]])


def test_prefill_padding_writes_to_the_null_block_only():
    device = Device()
    before, _ = device.snapshot()
    device.start(rows=(2,))
    after, state = device.snapshot()
    for old, new in zip(before.layers, after.layers, strict=True):
        changed = set(np.flatnonzero((old.k != new.k).any(axis=(1, 2, 3))))
        assert changed == {0, device.blocks(2)[0]}
        assert not new.k[device.blocks(2)[0], :, 7:].any(), "slots after the prompt stay untouched"
    assert not state.active[DEAD] and not state.block_table[DEAD].any()


def test_a_row_left_out_goes_on_later():
    device = Device()
    device.start()
    device.decode([0], 8)
    packed = device.decode([2, 3], 5)
    assert [tuple(packed[i, 2:7]) for i in (0, 1)] == [greedy(2)[1:6], greedy(3)[1:6]]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_row_does_not_depend_on_company_or_loop_length(temperature):
    sampling = SamplingParams(temperature=temperature, top_k=40, top_p=0.95, seed=11)
    together, alone = Device(), Device()
    first = together.start(sampling=sampling)
    tokens = [int(first[1, 2]), *together.decode([0, 2, 3], 8)[1, 2:]]
    first = alone.start(rows=(2,), sampling=sampling)
    one_by_one = [int(first[0, 2])]
    for _ in range(8):
        one_by_one.append(int(alone.decode([2], 1, bucket=1)[0, 2]))
    assert tokens == one_by_one
    assert (tuple(tokens) == greedy(2)[:9]) == (temperature == 0)


class DecodeTraces(chex.TestCase):
    def test_other_values_trace_nothing_again(self):
        """Lengths, rows, number of steps and sampling are values, not shapes."""
        model = model_of(CONFIG, random_tensors(CONFIG))
        graphdef, state_of_model = nnx.split(model)

        @jax.jit
        @chex.assert_max_traces(n=1)
        def decode(weights, cache, state, rows, num_steps):
            model = nnx.merge(graphdef, weights)
            options = {"max_steps": 2, "implementation": "xla", "num_top": NUM_TOP}
            return decode_steps(model, cache, state, rows, num_steps, **options)

        device = Device()
        for num_steps, rows, sampling in ((1, [0, 2], GREEDY), (2, [3, DEAD], SamplingParams(top_p=0.5, seed=3))):
            device.start(sampling=sampling)
            arguments = (np.asarray(rows, np.int32), np.int32(num_steps))
            _, _, output = decode(state_of_model, device.cache, device.state, *arguments)
            assert np.asarray(output.packed)[0, 0] == num_steps
