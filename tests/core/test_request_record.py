"""The line of a request log."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.core.metrics import MissReason, RequestMetrics
from jaxkv.core.request import FinishReason
from jaxkv.core.request_record import RequestRecord, read_records, salt_name

seconds = st.none() | st.floats(0, 1e6)
records = st.builds(
    RequestRecord, request_id=st.text(), arrival=st.floats(0, 2e9), finish_reason=st.sampled_from(["stop", "error"]),
    prompt_tokens=st.integers(1, 10**6), cached_tokens=st.integers(0, 10**6), computed_tokens=st.integers(0, 10**6),
    output_tokens=st.integers(0, 10**6), missed=st.dictionaries(st.sampled_from(["first_seen", "salt"]), st.integers(0)),
    ttft=seconds, e2e=seconds, caller=st.none() | st.text(), blocks=st.lists(st.text("0f", min_size=16, max_size=16)).map(tuple),
    prompt_token_ids=st.none() | st.lists(st.integers(0, 9)).map(tuple),
)  # fmt: skip


@given(records)
def test_what_is_written_is_read(record):
    line = record.to_json()
    assert "\n" not in line and RequestRecord.from_json(line) == record


def test_lines_that_are_no_records():
    for line in ("[]", "{}", '{"schema": "other/1"}'):
        with pytest.raises(ValueError, match="expected a JSON object with schema 'jaxkv.request/1'"):
            RequestRecord.from_json(line)
    with pytest.raises(ValueError, match="lacks arrival, cached_tokens, .*output_tokens"):
        RequestRecord.from_json('{"schema": "jaxkv.request/1", "request_id": "a", "prompt_tokens": 3}')


@pytest.mark.parametrize(
    "field, value, expected",
    [
        ("arrival", "noon", "a finite number"),
        ("arrival", float("nan"), "a finite number"),
        ("prompt_tokens", "40", "a whole number"),
        ("prompt_tokens", -1, "a whole number"),
        ("prompt_tokens", True, "a whole number"),
        ("block_size", "x", "a whole number"),
        ("caller", {}, "str | None"),
        ("missed", [], "dict"),
        ("prompt_token_ids", [1, -2], "tuple"),
        ("blocks", [1, 2], "tuple"),
        ("blocks", "abc", "tuple"),
        ("blocks", ["abc"], "16 hexadecimal digits"),
    ],
)
def test_a_field_of_another_type_is_named(field, value, expected):
    row = json.loads(RequestRecord("a", 1.0, "stop", 2, 0, 2, 1).to_json()) | {field: value}
    with pytest.raises(ValueError, match=f"{field} .*{expected}".replace("|", r"\|")):
        RequestRecord.from_json(json.dumps(row))


def test_lines_that_were_broken_off_are_told_and_left_out(caplog):
    line = RequestRecord("a", 1.0, "stop", 2, 0, 2, 1).to_json()
    lines = [line, line[:40], "", line, line[:-1]]
    assert len(read_records(lines, "log")) == 2
    assert [record.getMessage()[:11] for record in caplog.records] == ["log, line 2", "log, line 5"]
    with pytest.raises(ValueError, match="log, line 2: no record of a request log .expected a JSON object"):
        read_records([line, "{}"], "log")
    for nothing, message in (([], "log: the log has no requests"), ([line[:9]], "log, line 1: no JSON")):
        with pytest.raises(ValueError, match=message):
            read_records(nothing, "log")


def test_a_later_versions_fields_are_passed_over():
    record = RequestRecord("a", 1.0, "stop", 2, 0, 2, 1)
    assert RequestRecord.from_json(json.dumps(json.loads(record.to_json()) | {"mood": "good"})) == record


def test_out_of_metrics():
    metrics = RequestMetrics(
        "a", arrival=10.0, finished=16.5, finish_reason=FinishReason.STOP, num_prompt_tokens=8, num_cached_tokens=4,
        num_generated_tokens=5, num_preemptions=1, first_scheduled=11.0, first_token=12.5, last_token=16.5, max_tokens=9,
        num_computed_tokens=12, missed={MissReason.SALT: 4}, longest_gap=2.0, caller="me", cache_salt="pepper",
    )  # fmt: skip
    record = RequestRecord.of(metrics, clock_start=1000.0)
    assert record == RequestRecord(
        "a", arrival=1010.0, finish_reason="stop", prompt_tokens=8, cached_tokens=4, computed_tokens=12, output_tokens=5,
        max_tokens=9, missed={"salt": 4}, preemptions=1, queue=1.0, prefill=1.5, decode=4.0, ttft=2.5, itl=1.0,
        itl_max=2.0, e2e=6.5, caller="me", salt=salt_name("pepper"),
    )  # fmt: skip
    assert record.ended == 1016.5 and record.hit_rate == 0.5 and "pepper" not in record.to_json()
