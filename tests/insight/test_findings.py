"""Findings: gains against replays counted by hand, the planted example, and what may be told."""

import dataclasses
import json
import random

import pytest
from benchlib.planted_faults import POOL, make_example

from jaxkv.insight.causes import Cause
from jaxkv.insight.diagnosis import compare
from jaxkv.insight.prompt_log import log_of_records, token_log
from jaxkv.insight.prompt_replay import Pool
from jaxkv.insight.proposals import Settings, find_faults
from jaxkv.insight.token_texts import looks_like, num_agreeing_tokens
from tests.support.prompts import log_of, logged


def faults_of(log, pool=Pool(), settings=Settings(), **options):
    return find_faults(compare(log, pool, **options), settings, **options).findings


def fresh(rng, length):
    return [rng.randrange(10_000) for _ in range(length)]


def test_the_gain_of_moving_a_span_is_what_one_counts_by_hand():
    rng = random.Random(0)
    head, behind, count = fresh(rng, 48), fresh(rng, 160), 10
    log = log_of([[*head, 20_000 + i, *behind, 30_000 + i] for i in range(count)])
    (finding,) = faults_of(log)
    # As it is, all but the first find the head; with the span moved, the head and what is the same behind it.
    tokens = count * (48 + 1 + 160 + 1)
    assert (finding.position, finding.common_behind, finding.num_requests) == (48, 160, 10)
    assert finding.tokens_lost == 9 * 160
    assert finding.gain.before == pytest.approx(9 * 48 / tokens)
    assert finding.gain.after == finding.gain.own_after == pytest.approx(9 * 208 / tokens)
    assert "part at token 48, in a span of 1 tokens with 10 values" in finding.sentence
    assert "from 20.6 % to 89.1 %" in finding.sentence


def test_each_of_two_spans_is_worth_what_lies_between():
    rng = random.Random(1)
    parts = [fresh(rng, length) for length in (32, 64, 128)]
    log = log_of([[*parts[0], 20_000 + i, *parts[1], 30_000 + i, *parts[2], 40_000 + i] for i in range(9)])
    (finding,) = faults_of(log)
    tokens = 9 * (32 + 64 + 128 + 3)
    rates = [rate for _, rate in finding.gain.steps]
    assert [field.start for field in finding.fields] == [32, 97]
    assert rates == [pytest.approx(8 * (32 + 64) / tokens), pytest.approx(8 * (32 + 64 + 128) / tokens)]


def test_one_fault_of_many_callers_is_one_finding():
    rng = random.Random(3)
    head, behind = fresh(rng, 16), fresh(rng, 64)
    prompts = [[*head, 20_000 + i, *behind] for i in range(40 * 25)]
    log = token_log([logged(i, tokens, caller=f"caller {i % 40}") for i, tokens in enumerate(prompts)], 16)
    (finding,) = faults_of(log)
    assert (finding.num_requests, len(finding.callers)) == (1000, 40) and "and 37 more" in finding.sentence


def test_the_gain_is_of_the_pool_that_there_is():
    rng = random.Random(2)
    head, behind = fresh(rng, 16), fresh(rng, 160)
    rows = [row for i in range(8) for row in ([*head, 20_000 + i, *behind, 30_000 + i], fresh(rng, 16 * 12))]
    log = log_of(rows)
    # Between two of them twelve other blocks are used, so that sixteen keep the first four of the template's eleven.
    tokens, gains = sum(map(len, rows)), {}
    for blocks in (16, 40):
        (finding,) = [f for f in faults_of(log, Pool(capacity_blocks=blocks)) if f.cause == Cause.CHANGED_TEXT.value]
        gains[blocks] = finding.gain
    assert gains[40].before == gains[16].before == pytest.approx(7 * 16 / tokens)
    assert gains[40].after == pytest.approx(7 * 176 / tokens)
    assert gains[16].after == pytest.approx(7 * 64 / tokens)


def test_one_salt():
    rng = random.Random(3)
    head = fresh(rng, 64)
    log = token_log([logged(i, [*head, *fresh(rng, 36)], salt=f"s{i}", caller="c") for i in range(5)], 16)
    (finding,) = faults_of(log)
    assert (finding.cause, finding.tokens_lost, finding.callers) == ("salt", 4 * 64, (("c", 4, 5),))
    assert (finding.gain.before, finding.gain.after) == (0, 4 * 64 / 500)


def test_so_many_more_blocks():
    documents = [[1000 * i + j for j in range(64)] for i in range(6)]
    rows = [[*document, 500_000 + i] for i, document in enumerate(documents * 2)]
    (finding,) = faults_of(log_of(rows), Pool(capacity_blocks=10))
    # Six documents of four blocks, and a block that the last request does not fill.
    assert (finding.cause, finding.needed_blocks[2], finding.tokens_lost) == ("evicted", 25, 6 * 64)
    assert finding.gain.steps[-1] == ("25 blocks", 0.5 * 64 / 65) and finding.gain.before == 0
    assert finding.more_blocks == finding.needed_blocks[1] - 10


def test_copying_heads():
    log = log_of([[*range(30), 100 + i, *range(1000 * i, 1000 * i + 9)] for i in range(1, 6)])
    (finding,) = faults_of(log, Pool(share_partial=False))
    assert (finding.cause, finding.tokens_lost) == ("shorter_than_block", 4 * 14)
    assert (finding.gain.before, finding.gain.after) == (4 * 16 / 200, 4 * 30 / 200)
    assert faults_of(log) == ()


@pytest.fixture(scope="module")
def example():
    return make_example(num_rounds=30, seed=5)


def test_every_planted_fault_is_found_and_nobody_else_accused(example):
    log = log_of_records(example.records)
    settings = Settings(most_replayed=20)
    findings = list(faults_of(log, POOL, settings, token_bytes=example.tokenizer.token_bytes))
    assert [problem for planted in example.planted for problem in planted.problems(findings)] == []
    of_texts = [f for f in findings if f.cause in ("changed_text", "reordered", "token_boundary")]
    assert not {name for f in of_texts for name, _, _ in f.callers} & set(example.clean_callers)
    lost = [finding.tokens_lost for finding in findings]
    assert lost == sorted(lost, reverse=True)


def test_a_planted_fault_that_is_not_found_is_told(example):
    planted = example.planted[0]
    assert planted.problems([]) == ["changed_text of clock was not found"]
    log = log_of_records([record for record in example.records if record.caller == "clock"])
    findings = list(faults_of(log, POOL, token_bytes=example.tokenizer.token_bytes))
    assert planted.problems(findings) == []
    for change in ({"position": 9}, {"looks_like": (None,)}, {"gain": None}, {"fields": ()}):
        assert len(planted.problems([dataclasses.replace(findings[0], **change)])) == 1


def test_no_text_is_told_unless_asked_for(example):
    log = log_of_records([record for record in example.records if record.caller == "codes"])
    token_bytes = example.tokenizer.token_bytes
    told = json.dumps([finding.as_json() for finding in faults_of(log, token_bytes=token_bytes)])
    assert "changed_text" in told and not set(told.split()) & set(example.tokenizer.words)
    findings = faults_of(log, settings=Settings(with_texts=True), token_bytes=token_bytes)
    (finding,) = [finding for finding in findings if finding.cause == "changed_text"]
    assert finding.examples[0][0].strip().split()[0] in example.tokenizer.words
    assert finding.examples[0][0] in finding.sentence


def test_block_names_alone_tell_the_block_and_what_to_log():
    log = log_of_records(
        [
            dataclasses.replace(record, prompt_token_ids=None, output_token_ids=None, blocks=names)
            for record, names in _with_names()
        ]
    )
    found = {finding.cause: finding for finding in faults_of(log)}
    assert found["unknown"].position == 32 and "request_log_tokens" in found["unknown"].remedy


def _with_names():
    example = make_example(num_rounds=8)
    for i, record in enumerate(r for r in example.records if r.caller == "clean"):
        yield record, ("a" * 16, "b" * 16, *(f"{i:08}{j:08}" for j in range(9)))


@pytest.mark.parametrize(
    ("values", "label"),
    [
        (["10:42", "10:57", "23:01"], "a timestamp"),
        (["2026-11-30", "2026-12-01"], "a date"),
        (["1", "2", "999"], "a number"),
        (["Ada Lovelace", "Alan Turing"], "a name"),
        (["3f2b8c1e-0000-4abc-9def-0123456789ab", "00000000-1111-4abc-9def-0123456789ab"], "a UUID"),
        (["req-8f3a91", "req-00b7c2"], "a request id"),
        (["a@b.org", "c.d@e.com"], "an e-mail address"),
        (["the quick brown fox", "jumps over it"], None),
        (["10:42", "lazy", "dog"], None),
    ],
)
def test_what_spans_look_like(values, label):
    assert looks_like([("It is ", value, ", go on.") for value in values]) == label


def test_a_label_may_reach_into_what_is_the_same():
    assert (
        looks_like([("since 2026-11-", "28T10", ":00 o'clock"), ("since 2026-11-", "29T11", ":00 o'clock")])
        == "a timestamp"
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "counts"),
    [(["ab", "c"], ["a", "bc"], (2, 2)), (["ab", "c"], ["ax"], (0, 0)), (["a"], ["b"], (0, 0)), ([], ["b"], (0, 0)),
     (["ab", "cd", "x"], ["a", "b", "cd", "y"], (2, 3)), (["abc"], ["ab"], (0, 1))],
)  # fmt: skip
def test_how_far_texts_agree(ours, theirs, counts):
    names = sorted({*ours, *theirs})
    tokens = [[names.index(name) for name in side] for side in (ours, theirs)]
    assert num_agreeing_tokens(*tokens, lambda token: names[token].encode()) == counts
