"""OutputText: however the tokens are cut, the text is the same, nothing leaks and nothing is lost."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxkv.core.request import FinishReason, SamplingParams
from jaxkv.tokenization.output_text import OutputText

relaxed = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
texts = st.text(alphabet=st.sampled_from("abehlo wrd\n.é你👋🇩 "), max_size=40)


def run(tokenizer, ids, cuts=(), prompt=(), finish=FinishReason.LENGTH, stop_token_id=None, **params):
    """Feeds ids in pieces that end at `cuts`; returns (text, last delta, output tokens, pieces)."""
    output = OutputText(tokenizer, SamplingParams(**params), prompt)
    edges = sorted({min(cut, len(ids)) for cut in cuts} | {len(ids)})
    pieces, used, start = [], 0, 0
    for edge in edges:
        last = edge == len(ids)
        delta = output.feed(ids[start:edge], finish if last else None, stop_token_id if last else None)
        pieces.append(delta.text)
        used += delta.num_tokens
        start = edge
        if delta.finish_reason is not None:
            break
    return "".join(pieces), delta, used, pieces


@relaxed
@given(text=texts, cuts=st.lists(st.integers(0, 60)))
def test_pieces_join_to_decode_of_all(tokenizer, text, cuts):
    ids = tokenizer.encode(text, add_special_tokens=False)
    got, delta, used, _ = run(tokenizer, ids, cuts)
    assert got == tokenizer.decode(ids) == tokenizer.fast.decode(ids)
    assert (delta.finish_reason, delta.stop_reason, used) == (FinishReason.LENGTH, None, len(ids))


@relaxed
@given(ids=st.lists(st.integers(0, 330), max_size=30), cuts=st.lists(st.integers(0, 30)), skip=st.booleans())
def test_any_ids_whatever_the_cuts(tokenizer, ids, cuts, skip):
    """Also ids that are no text: half characters, stray bytes, control tokens, ids beyond the vocabulary."""
    got, *_ = run(tokenizer, ids, cuts, skip_special_tokens=skip)
    assert got == tokenizer.decode(ids, skip_special_tokens=skip)


@relaxed
@given(prompt=texts, text=texts, cuts=st.lists(st.integers(0, 60)))
def test_output_follows_the_prompt(tokenizer, prompt, text, cuts):
    """decode(prompt + output) == decode(prompt) + output text: a leading space is kept exactly where it belongs."""
    before = tokenizer.encode(prompt)
    ids = tokenizer.encode(text, add_special_tokens=False)
    got, *_ = run(tokenizer, ids, cuts, prompt=before)
    assert tokenizer.decode([*before, *ids]) == tokenizer.decode(before) + got


@relaxed
@given(
    text=texts,
    cuts=st.lists(st.integers(0, 60)),
    stops=st.lists(st.text(alphabet="ab lo你👋", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
)
def test_stop_strings_against_a_search_in_the_whole_text(tokenizer, text, cuts, stops, include):
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(ids)
    found = [(whole.find(stop) + len(stop), whole.find(stop), stop) for stop in stops if stop in whole]
    got, delta, used, _ = run(tokenizer, ids, cuts, stop=tuple(stops), include_stop_str_in_output=include)
    if not found:
        assert (got, delta.finish_reason, used) == (whole, FinishReason.LENGTH, len(ids))
        return
    end, start, stop = min(found)
    assert got == whole[: end if include else start]
    assert (delta.finish_reason, delta.stop_reason) == (FinishReason.STOP, stop)
    # The tokens counted are those up to the one that completed the stop string.
    assert len(tokenizer.decode(ids[:used])) >= end
    assert used == 0 or tokenizer.decode(ids[: used - 1])[:end] != whole[:end]


def test_a_held_tail_comes_out_at_the_end(byte_level):
    ids = byte_level.encode("I like sto", add_special_tokens=False)
    output = OutputText(byte_level, SamplingParams(stop=("stop!",)))
    assert output.feed(ids).text == "I like "
    assert output.feed((), FinishReason.LENGTH).text == "sto"


def test_only_what_may_become_a_stop_is_held(byte_level):
    output = OutputText(byte_level, SamplingParams(stop=("\n\nUser:",)))
    assert output.feed(byte_level.encode("abc", add_special_tokens=False)).text == "abc"
    assert output.feed(byte_level.encode("\n\n", add_special_tokens=False)).text == ""
    assert output.feed(byte_level.encode("x", add_special_tokens=False)).text == "\n\nx"


def test_half_an_emoji_is_held_then_replaced_at_the_end(byte_level):
    ids = byte_level.encode("a👋", add_special_tokens=False)
    assert len(ids) > 2, "the emoji must be cut into several tokens for this test"
    got, *_ = run(byte_level, ids[:-1], cuts=range(len(ids)))
    assert got == "a\ufffd"
    output = OutputText(byte_level, SamplingParams())
    assert [output.feed([i]).text for i in ids] == ["a", *[""] * (len(ids) - 2), "👋"]


def test_the_stop_token_is_no_text_unless_asked_for(byte_level):
    ids = byte_level.encode("ab", add_special_tokens=False)
    last = ids[-1]
    shown, hidden = byte_level.decode(ids), byte_level.decode(ids[:-1])
    got, delta, used, _ = run(byte_level, ids, finish=FinishReason.STOP, stop_token_id=last, stop_token_ids=(last,))
    assert (got, delta.stop_reason, used) == (hidden, last, len(ids))
    got, *_ = run(
        byte_level,
        ids,
        finish=FinishReason.STOP,
        stop_token_id=last,
        stop_token_ids=(last,),
        include_stop_str_in_output=True,
    )
    assert got == shown


def test_end_of_sequence_has_no_stop_reason_and_no_text(byte_level):
    ids = [*byte_level.encode("ab", add_special_tokens=False), byte_level.eos_token_id]
    for skip in (True, False):
        got, delta, *_ = run(
            byte_level, ids, finish=FinishReason.STOP, stop_token_id=byte_level.eos_token_id, skip_special_tokens=skip
        )
        assert (got, delta.finish_reason, delta.stop_reason) == ("ab", FinishReason.STOP, None)


@pytest.mark.parametrize("cuts", [(), (1,), (1, 2, 3, 4)])
def test_min_tokens_holds_for_stop_strings(byte_level, cuts):
    ids = [byte_level.fast.token_to_id(c) for c in "abab"]
    got, delta, used, _ = run(byte_level, ids, cuts, stop=("ab",), min_tokens=2)
    assert (got, delta.stop_reason, used) == ("ab", "ab", 4)


def test_feeding_after_the_end_is_a_mistake(byte_level):
    output = OutputText(byte_level, SamplingParams())
    output.feed((), FinishReason.LENGTH)
    with pytest.raises(AssertionError, match="finished"):
        output.feed((1,))


def test_long_invalid_output_costs_the_same_a_token(byte_level):
    """20,000 stray bytes: a decoder of windows of ids would be quadratic here (minutes)."""
    stray = byte_level.fast.token_to_id("Ģ")  # byte 0x80
    assert byte_level.token_bytes[stray] == b"\x80"
    output = OutputText(byte_level, SamplingParams())
    assert sum(len(output.feed([stray]).text) for _ in range(20_000)) == 20_000
