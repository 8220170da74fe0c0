"""Every token that was not found has one cause: that the sum is right, and each cause alone, on planted faults."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.core.request_record import RequestRecord
from jaxkv.insight.causes import Cause
from jaxkv.insight.diagnosis import compare
from jaxkv.insight.prompt_log import log_of_records, token_log
from jaxkv.insight.prompt_replay import Pool
from tests.insight.test_prompt_replay import random_rows
from tests.support.prompts import log_of, logged


def causes(log, pool=Pool(), **options):
    return [dict(one.causes) for one in compare(log, pool, **options).requests]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.booleans(), st.sampled_from([None, 14, 30]))
def test_causes_add_up(seed, share_partial, capacity):
    rows = random_rows(random.Random(seed), 30, 4)
    log = token_log([logged(i, tokens, salt=salt) for i, (tokens, salt) in enumerate(rows)], 4)
    diagnosis = compare(log, Pool(capacity, share_partial))
    for request, one in zip(log.requests, diagnosis.requests, strict=True):
        assert sum(one.causes.values()) + one.served.cached == request.num_tokens
        assert all(tokens > 0 for tokens in one.causes.values())
    assert sum(diagnosis.causes.values()) + diagnosis.cached == diagnosis.tokens


def fresh(rng, length):
    return [rng.randrange(10_000) for _ in range(length)]


def test_changed_text_counts_what_is_the_same_behind_it():
    rng = random.Random(0)
    head, behind = fresh(rng, 37), fresh(rng, 100)
    log = log_of([[*head, *fresh(rng, 5), *behind, *fresh(rng, 9)] for _ in range(6)])
    assert causes(log) == [{Cause.NEW_TEXT: 151}] + 5 * [{Cause.CHANGED_TEXT: 100, Cause.NEW_TEXT: 14}]


def test_two_requests_are_enough_to_see_it():
    rng = random.Random(1)
    head, behind = fresh(rng, 37), fresh(rng, 100)
    log = log_of([[*head, *fresh(rng, 5), *behind] for _ in range(2)])
    assert causes(log)[1] == {Cause.CHANGED_TEXT: 100, Cause.NEW_TEXT: 5}


def test_an_insertion_and_two_documents_turned_round():
    rng = random.Random(2)
    a, b, c = (fresh(rng, length) for length in (40, 50, 60))
    assert causes(log_of([[*a, *b], [*a, 1, 2, 3, *b]]))[1] == {Cause.CHANGED_TEXT: 50, Cause.NEW_TEXT: 3}
    # The one that comes first now is in order; the other has moved.
    assert causes(log_of([[*a, *b, *c], [*a, *c, *b]]))[1] == {Cause.CHANGED_TEXT: 60, Cause.REORDERED: 50}


def test_documents_in_other_orders_once_each_has_been_seen():
    rng = random.Random(3)
    head, a, b, c = fresh(rng, 20), *(fresh(rng, length) for length in (40, 50, 60))
    log = log_of([[*head, *x, *y, *z] for x, y, z in ((a, b, c), (b, c, a), (c, a, b), (c, b, a))])
    # Those that begin with another document find the head only, the last one two pieces.
    assert causes(log)[1:] == [{Cause.REORDERED: 150}, {Cause.REORDERED: 150}, {Cause.REORDERED: 90}]


def test_the_same_text_in_other_tokens():
    # Token 7 is "ab", 1 is "a", 2 is "b"; the rest are single letters.
    names = {7: b"ab", 8: b"cab"}
    token_bytes = lambda token: names.get(token) or bytes([96 + token])  # noqa: E731
    log = token_log([logged(0, [5, 5], output=[3, 1, 2, 3, 1, 2, 6]), logged(1, [5, 5, 8, 8, 11, 12])], 16)
    (_, second) = causes(log, token_bytes=token_bytes)
    assert second == {Cause.TOKEN_BOUNDARY: 2, Cause.NEW_TEXT: 2}
    assert causes(log)[1] == {Cause.NEW_TEXT: 4}  # without texts nobody can know


def test_shorter_than_a_block():
    log = log_of([[*range(30), *range(100, 120)], [*range(30), *range(200, 220)]])
    assert causes(log, Pool(share_partial=False))[1] == {Cause.SHORTER_THAN_BLOCK: 14, Cause.NEW_TEXT: 20}
    assert causes(log)[1] == {Cause.NEW_TEXT: 20}


def test_another_salt():
    rows = [(list(range(64)) + [500], "a"), (list(range(64)) + [600], "b"), (list(range(64)) + [700], "a")]
    log = token_log([logged(i, tokens, salt=salt) for i, (tokens, salt) in enumerate(rows)], 16)
    assert causes(log)[1:] == [{Cause.SALT: 64, Cause.NEW_TEXT: 1}, {Cause.NEW_TEXT: 1}]


def test_overwritten_even_when_the_engine_has_forgotten_it():
    documents = [[1000 * i + j for j in range(64)] for i in range(6)]
    log = log_of([[*document, 7] for document in documents * 2])
    diagnosis = compare(log, Pool(capacity_blocks=10))
    for one in diagnosis.requests[6:]:
        assert one.served.missed.get("evicted", 0) < 64  # ghosts are as many as blocks
        assert one.causes == {Cause.EVICTED: 65}
        assert one.needed_capacities[-1] == 6 * 4 + 1


def test_a_whole_prompt_again_lacks_its_last_token():
    assert causes(log_of([range(40), range(40)]))[1] == {Cause.LAST_TOKEN: 1}


def record(i, tokens, cached, missed, **fields):
    defaults = {"finish_reason": "stop", "output_tokens": 1, "block_size": 4, "computed_tokens": len(tokens) - cached}
    fields = defaults | fields
    return RequestRecord(
        str(i), float(i), prompt_tokens=len(tokens), cached_tokens=cached, missed=missed,
        prompt_token_ids=tuple(tokens), **fields,
    )  # fmt: skip


def test_what_the_server_counted_is_taken_as_it_is():
    a = list(range(12))
    records = [
        record(0, a, 0, {"first_seen": 12}),
        record(1, a, 0, {"first_seen": 12}),  # came while the first was not computed
        record(2, a, 4, {"evicted": 7, "last_token": 1}),
        record(3, a, 0, {"needs_logits": 11, "last_token": 1}),
    ]
    diagnosis = compare(log_of_records(records), Pool(capacity_blocks=100))
    assert not diagnosis.is_replayed
    assert [dict(one.causes) for one in diagnosis.requests] == [
        {Cause.NEW_TEXT: 12},
        {Cause.NOT_CACHED: 12},
        {Cause.EVICTED: 7, Cause.LAST_TOKEN: 1},
        {Cause.NEEDS_LOGITS: 11, Cause.LAST_TOKEN: 1},
    ]


@pytest.mark.parametrize(("has_evictions", "capacity"), [(True, 7), (False, None)])
def test_evictions_tell_the_most_that_the_capacity_can_be(has_evictions, capacity):
    documents = [[100 * i + j for j in range(8)] for i in range(4)]
    rows = [*documents, *documents[1:], documents[0]]  # the last one needs seven blocks and one to fill
    records = [record(i, [*tokens, 9000 + i], 0, {"first_seen": 9}) for i, tokens in enumerate(rows)]
    for i in range(4, 7):
        records[i] = dataclasses.replace(records[i], cached_tokens=8, missed={"first_seen": 1})
    if has_evictions:
        records[7] = dataclasses.replace(records[7], missed={"evicted": 8, "first_seen": 1})
    diagnosis = compare(log_of_records(records))
    assert (diagnosis.is_estimated, diagnosis.pool.capacity_blocks) == (has_evictions, capacity)
