"""Masks, and constraints that are lists of tokens."""

import hypothesis
import pytest
from hypothesis import strategies as st

from jaxkv.constraints.token_lists import TokenLists
from jaxkv.core.token_constraint import ConstraintError, allows, full_mask, is_empty, mask_bytes, mask_of, without


def ids_in(mask, vocab_size):
    return {i for i in range(vocab_size) if allows(mask, i)}


@hypothesis.given(st.integers(1, 200).flatmap(lambda v: st.tuples(st.just(v), *[st.sets(st.integers(0, v - 1))] * 2)))
def test_masks_are_sets(drawn):
    vocab_size, some, others = drawn
    mask = mask_of(some, vocab_size)
    assert len(mask) == mask_bytes(vocab_size) == -(-vocab_size // 32) * 4
    assert ids_in(mask, vocab_size) == some and is_empty(mask) == (not some)
    assert ids_in(without(mask, others), vocab_size) == some - others
    assert full_mask(vocab_size) == mask_of(range(vocab_size), vocab_size)


def test_allowed_ids_alone_are_fixed():
    lists = TokenLists((3, 5), (), 40)
    assert lists.is_fixed and ids_in(lists.mask(), 40) == {3, 5}
    lists.accept((5,))
    assert ids_in(lists.mask(), 40) == {3, 5}


def test_a_bad_word_of_one_token_is_fixed():
    lists = TokenLists(None, [(7,), (9,)], 40)
    assert lists.is_fixed and ids_in(lists.mask(), 40) == set(range(40)) - {7, 9}


def test_the_last_token_of_a_bad_sequence_is_forbidden_after_its_head():
    lists = TokenLists(range(10), [(1, 2, 3), (2, 4), (8,)], 10)
    everything = set(range(10)) - {8}
    assert not lists.is_fixed and ids_in(lists.mask(), 10) == everything
    lists.accept((1,))
    assert ids_in(lists.mask(), 10) == everything
    copy = lists.copy()
    lists.accept((2,))
    assert ids_in(lists.mask(), 10) == everything - {3, 4}
    assert ids_in(copy.mask(), 10) == everything, "a copy moved with the original"
    lists.accept((5, 6))
    assert ids_in(lists.mask(), 10) == everything


@hypothesis.given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), max_size=4),
    st.lists(st.integers(0, 3), max_size=12),
)
def test_no_bad_sequence_ever_comes(bad, wishes):
    """Whatever is wished for, the output that the masks let through holds no bad sequence, and forbids nothing else."""
    lists, output = TokenLists(None, bad, 4), []
    for wish in wishes:
        completes = {s[-1] for s in bad if tuple([*output, s[-1]][-len(s) :]) == s}
        if len(completes) == 4:
            with pytest.raises(ConstraintError, match="bad_words forbid all"):
                lists.mask()
            return
        assert ids_in(lists.mask(), 4) == set(range(4)) - completes
        if wish in completes:
            continue
        lists.accept((wish,))
        output.append(wish)
