"""The nearest earlier prompt, against a comparison with all of them."""

import os

from hypothesis import given
from hypothesis import strategies as st

from jaxkv.core.request_record import RequestRecord
from jaxkv.insight.nearest import find_partings
from jaxkv.insight.prompt_log import log_of_records, token_log
from tests.support.prompts import logged

SHORT = st.lists(st.integers(0, 2), max_size=7)


def common(a, b):
    return len(os.path.commonprefix([list(a), list(b)]))


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=7), SHORT, st.sampled_from([None, "a", "b"])))
)
def test_it_is_the_longest_of_all_earlier_ones(rows):
    log = token_log([logged(i, prompt, output, salt=salt) for i, (prompt, output, salt) in enumerate(rows)], 16)
    for number, parting in enumerate(find_partings(log)):
        prompt, _, salt = rows[number]
        lengths = {i: common(prompt, [*p, *o]) for i, (p, o, _) in enumerate(rows[:number])}
        assert parting.num_common == max(lengths.values(), default=0)
        assert parting.num_same_salt == max((lengths[i] for i in lengths if rows[i][2] == salt), default=0)
        if parting.num_common:
            assert lengths[parting.nearest] == parting.num_common
        else:
            assert parting.nearest is None


def record(request_id, arrival, blocks, prompt_tokens, **fields):
    defaults = {"finish_reason": "stop", "cached_tokens": 0, "computed_tokens": prompt_tokens, "output_tokens": 1}
    return RequestRecord(
        request_id, arrival, prompt_tokens=prompt_tokens, blocks=blocks, block_size=4, **defaults | fields
    )


def test_block_names_tell_the_block():
    a, b, c, d = ("a" * 16, "b" * 16, "c" * 16, "d" * 16)
    log = log_of_records([record("late", 2.0, (a, b, d), 14), record("first", 1.0, (a, b, c), 10)])
    assert [request.request_id for request in log.requests] == ["first", "late"]
    assert not log.has_tokens
    first, late = find_partings(log)
    assert (first.nearest, late.nearest, late.num_common) == (None, 0, 8)
    # The first prompt has two full blocks, its third is of prompt and output; both may be found.
    assert len(log.requests[0].prompt) == 16 and len(log.requests[0].output) == 8
