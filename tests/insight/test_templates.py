"""Varying spans: planted anywhere, of any length, in tokens without meaning; found exactly where they are."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.control.prefix_index import token_bytes
from jaxkv.insight.clusters import find_clusters
from jaxkv.insight.documents import sort_documents
from jaxkv.insight.packing import unpacked
from tests.support.prompts import log_of


def clusters_of(prompts):
    return list(find_clusters([token_bytes(tokens) for tokens in prompts], range(len(prompts))))


def as_lists(parts):
    return [unpacked(part) for part in parts]


def differ_at_both_ends(values):
    """Whether neither the first nor the last token of the values is the same in all."""
    return len({value[0] for value in values}) > 1 and len({value[-1] for value in values}) > 1


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocabulary=st.sampled_from([30, 500, 50_000]),
    count=st.integers(6, 40),
    head=st.integers(0, 200),
    longest=st.integers(1, 30),
    behind=st.integers(24, 300),
    rest=st.integers(0, 50),
    num_others=st.sampled_from([0, 8]),
)
def test_one_span(seed, vocabulary, count, head, longest, behind, rest, num_others):
    rng = random.Random(seed)

    def tokens(length):
        return [rng.randrange(vocabulary) for _ in range(length)]

    before, after = tokens(head), tokens(behind)
    values = [tokens(rng.randint(1, longest)) for _ in range(count)]
    while not differ_at_both_ends(values):
        values = [tokens(rng.randint(1, longest)) for _ in range(count)]
    rests = [tokens(rng.randint(0, rest)) for _ in range(count)]
    others = [tokens(rng.randint(50, 200)) for _ in range(num_others)]
    prompts = [[*before, *value, *after, *rest] for value, rest in zip(values, rests)]
    (cluster,) = clusters_of([*prompts, *others])
    assert cluster.members == tuple(range(count))
    assert cluster.start == head and not cluster.documents
    filled = [cluster.template.fill(token_bytes(prompt)) for prompt in prompts]
    assert [as_lists(one.values) for one in filled] == [[value] for value in values]
    # What all the rests begin with belongs to the template as well.
    segments = as_lists(cluster.template.segments)
    assert segments[0] == before and segments[1][:behind] == after
    (field,) = cluster.template.fields(filled)
    lengths = [len(value) for value in values]
    assert (field.start, field.min_length, field.max_length) == (head, min(lengths), max(lengths))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), num_fields=st.integers(2, 4))
def test_several_spans_and_what_moving_them_leaves(seed, num_fields):
    rng = random.Random(seed)

    def tokens(length):
        return [rng.randrange(5000) for _ in range(length)]

    segments = [tokens(rng.randint(16, 80)) for _ in range(num_fields + 1)]
    rows = [[tokens(rng.randint(2, 6)) for _ in range(num_fields)] for _ in range(12)]
    rests = [tokens(20) for _ in rows]
    prompts = [
        [*segments[0], *sum((v + s for v, s in zip(row, segments[1:])), []), *rest] for row, rest in zip(rows, rests)
    ]
    (cluster,) = clusters_of(prompts)
    assert as_lists(cluster.template.segments) == segments
    assert cluster.template.num_common_behind == sum(map(len, segments[1:]))
    for prompt, row, rest in zip(prompts, rows, rests):
        filled = cluster.template.fill(token_bytes(prompt))
        moved = as_lists([cluster.template.with_fields_last(filled, num_fields)])[0]
        assert moved == [*sum(segments, []), *sum(row, []), *rest]
        one = as_lists([cluster.template.with_fields_last(filled, 1)])[0]
        assert one[: len(segments[0] + segments[1])] == segments[0] + segments[1]
        assert sorted(one) == sorted(prompt)


def test_two_templates_of_one_caller_are_told_apart():
    rng = random.Random(0)

    def tokens(length):
        return rng.choices(range(9000), k=length)

    greeting = tokens(30)
    a, b = (tokens(50), tokens(100)), (tokens(70), tokens(90))
    prompts = [[*greeting, *h, *tokens(4), *t, *tokens(10)] for _ in range(10) for h, t in (a, b)]
    found = {cluster.start: cluster.members for cluster in clusters_of(prompts)}
    assert found == {80: tuple(range(0, 20, 2)), 100: tuple(range(1, 20, 2))}


def test_a_span_of_few_values_is_one_too():
    rng = random.Random(1)
    names = [rng.choices(range(9000), k=3) for _ in range(3)]
    head, tail = rng.choices(range(9000), k=40), rng.choices(range(9000), k=60)
    prompts = [[*head, *names[i % 3], *tail, *rng.choices(range(9000), k=9)] for i in range(15)]
    (cluster,) = clusters_of(prompts)
    filled = [cluster.template.fill(token_bytes(prompt)) for prompt in prompts]
    assert cluster.start == 40 and cluster.template.fields(filled)[0].num_values == 3


@pytest.mark.parametrize(
    "make",
    [
        lambda rng, common: common + rng.choices(range(9000), k=50),  # a system prompt, then questions
        lambda rng, common: rng.choices(range(9000), k=200),  # nothing in common
        lambda rng, common: common,  # all the same
        lambda rng, common: common + list(range(rng.randrange(1, 9))),  # one goes on where others end
    ],
)
def test_where_nothing_is_wrong_nothing_is_found(make):
    rng = random.Random(2)
    common = rng.choices(range(9000), k=100)
    assert clusters_of([make(rng, common) for _ in range(40)]) == []


@pytest.mark.parametrize(("behind", "is_found"), [(9, False), (15, False), (16, True), (60, True)])
def test_the_little_that_stands_behind_every_question_is_no_reason_to_move_it(behind, is_found):
    rng = random.Random(4)
    head, end = rng.choices(range(9000), k=60), rng.choices(range(9000), k=behind)
    prompts = [[*head, *rng.choices(range(9000), k=50), *end] for _ in range(12)]
    assert [cluster.start for cluster in clusters_of(prompts)] == ([60] if is_found else [])
    prompts = [[*head, *rng.choices(range(9000), k=500), *end] for _ in range(12)]
    assert clusters_of(prompts) == []


def test_documents_in_any_order_are_found_and_sorted():
    rng = random.Random(3)

    def tokens(length):
        return rng.choices(range(9000), k=length)

    head, documents = tokens(25), [tokens(rng.randint(20, 60)) for _ in range(5)]
    prompts = []
    for _ in range(30):
        rng.shuffle(documents)
        prompts.append([*head, *sum(documents[:3], []), *tokens(12)])
    (cluster,) = clusters_of(prompts)
    assert (cluster.start, len(cluster.members)) == (25, 30)
    assert {tuple(document) for document in as_lists(cluster.documents)} == set(map(tuple, documents))
    by_set = {}
    for prompt in prompts:
        mended = as_lists([sort_documents(token_bytes(prompt), cluster.documents)])[0]
        assert sorted(mended) == sorted(prompt) and mended[:25] == head and mended[-12:] == prompt[-12:]
        kept = frozenset(tuple(d) for d in documents if token_bytes(d) in token_bytes(prompt))
        assert by_set.setdefault(kept, mended[:-12]) == mended[:-12]  # the same documents: the same prefix


def test_a_few_documents_each_out_of_a_large_collection_are_one_cluster():
    rng = random.Random(5)
    head, documents = rng.choices(range(9000), k=50), [rng.choices(range(9000), k=60) for _ in range(30)]
    prompts = [[*head, *sum(rng.sample(documents, 4), []), *rng.choices(range(9000), k=15)] for _ in range(60)]
    clusters = clusters_of(prompts)
    assert clusters[0].start == 50 and len(clusters[0].members) >= 55
    found = {tuple(document) for document in as_lists(clusters[0].documents)}
    assert len(found & set(map(tuple, documents))) >= 27


def test_requests_keep_their_numbers_and_lengths_when_prompts_are_replaced():
    log = log_of([[1, 2, 3], [4, 5]])
    mended = log.replaced({1: token_bytes([7, 8, 9, 9])})
    assert [r.num_tokens for r in mended.requests] == [3, 4]
    assert mended.requests[0] is log.requests[0] and mended.requests[1].request_id == "1"
