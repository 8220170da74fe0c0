"""Reading traces of three forms, and hit rates against an independent program's."""

import gzip
import json
import pathlib
import random

import pytest

from jaxkv.simulation.block_replay import OPT, replay_blocks
from jaxkv.simulation.traces import Trace, TraceError, TraceRequest, full_block_ids, read_trace

TRACES = pathlib.Path(__file__).parents[3] / "shared" / "traces"
FIRST_1000, WHOLE = "mooncake_conversation_first1000.jsonl.gz", "mooncake_conversation.jsonl.gz"


def shared_trace(name):
    path = TRACES / name
    if not path.exists():
        pytest.skip(f"needs the shared trace {name}, which lies beside the checkout")
    return path


def write(path, text):
    if path.suffix == ".gz":
        with gzip.open(path, "wt", encoding="utf-8") as file:
            file.write(text)
    else:
        path.write_text(text)
    return path


def lines(rows):
    return "\n".join(map(json.dumps, rows)) + "\n"


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_mooncake_form(tmp_path, name):
    rows = [
        {"timestamp": 3000, "input_length": 1025, "output_length": 7, "hash_ids": [0, 1, 2]},
        {"timestamp": 4500, "input_length": 1024, "output_length": 8, "hash_ids": [0, 1]},
    ]
    trace = read_trace(write(tmp_path / name, lines(rows)))
    assert trace.block_size == 512 and trace.name == name
    assert trace.requests == (TraceRequest(0.0, 1025, 7, (0, 1, 2)), TraceRequest(1.5, 1024, 8, (0, 1)))
    assert list(full_block_ids(trace)) == [(0, 1), (0, 1)]


def test_bailian_form(tmp_path):
    row = {"chat_id": 9, "parent_chat_id": -1, "timestamp": 61.25, "input_length": 33, "output_length": 2}
    path = write(tmp_path / "t.jsonl", lines([{**row, "type": "text", "turn": 1, "hash_ids": [5, 6, 7]}] * 2))
    trace = read_trace(path, limit=1)
    assert trace.block_size == 16 and trace.requests == (TraceRequest(0.0, 33, 2, (5, 6, 7), 9, -1),)


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_azure_form_without_final_newline(tmp_path, name):
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50,396,109"
    trace = read_trace(write(tmp_path / name, text))
    assert [request.arrival for request in trace.requests] == pytest.approx([0, 3.31941])
    assert [(request.input_length, request.output_length) for request in trace.requests] == [(374, 44), (396, 109)]
    assert trace.block_size is None and trace.requests[0].block_ids is None


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "no rows"),
        ("{}\n", "line 1: expected a JSON object with timestamp"),
        ("[1]\n", "its first line is neither a JSON object nor the header TIMESTAMP,"),
        ("2023-11-16 18:15:46,374,44\n", "its first line is neither"),
        ('{"timestamp": NaN, "input_length": 9, "output_length": 1}\n', "line 1: .*the time is nan"),
        ('{"timestamp": 1e999, "input_length": 9, "output_length": 1}\n', "line 1: .*the time is inf"),
        ('{"timestamp": 0, "input_length": -9, "output_length": 1}\n', "line 1: .*prompt has -9 tokens"),
        ('{"timestamp": 0, "input_length": 9, "output_length": 1000000000000}\n', "line 1: .*output has 1000000000000"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,-374,44\n", "line 2: .*prompt has -374"),
        ('{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1, 2]}\nnonsense\n', "line 2"),
        ('{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": []}\n', "give block_size"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnow,1,1\n", "line 2: expected TIMESTAMP"),
    ],
)
def test_damaged_traces_are_refused_by_line(tmp_path, text, message):
    with pytest.raises(TraceError, match=message):
        read_trace(write(tmp_path / "t.jsonl", text))


def test_a_byte_order_mark_is_no_harm(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xef\xbb\xbfTIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46,374,44\r\n")
    assert read_trace(path).requests[0].input_length == 374


def test_a_block_size_that_is_not_the_rows_is_refused(tmp_path):
    row = '{"timestamp": 0, "input_length": 40, "output_length": 1, "hash_ids": [1, 2, 3]}\n'
    path = write(tmp_path / "t.jsonl", row)
    assert read_trace(path, block_size=16).block_size == 16
    with pytest.raises(TraceError, match="row 1: 3 hash_ids for 40 tokens are not of blocks of 512"):
        read_trace(path, block_size=512)


def test_damaged_gzip_is_refused(tmp_path):
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(b"not gzip")
    with pytest.raises(TraceError, match="t.jsonl.gz"):
        read_trace(path)


def chains(*prompts, block_size=4):
    return Trace("made", tuple(TraceRequest(0.0, len(ids) * block_size, 1, tuple(ids)) for ids in prompts), block_size)


def test_hits_by_hand():
    trace = chains([1, 2, 3], [1, 2, 3], [1, 7, 8], [1, 2, 3])
    report = replay_blocks(trace, "lru")
    assert (report.hit_blocks, report.total_blocks, report.evictions) == (3 + 1 + 3, 12, 0)
    assert report.block_hit_rate == report.token_hit_rate == 7 / 12
    # Room for three: the third prompt evicts 3 and 2, which the fourth must compute anew.
    report = replay_blocks(trace, "lru", 3)
    assert (report.hit_blocks, report.evictions) == (3 + 1 + 1, 4)
    # 2 and 3 are used again, 7 and 8 are not; but all of a running request's blocks must be there.
    assert replay_blocks(trace, OPT, 3).hit_blocks == 5 and replay_blocks(trace, OPT, 5).hit_blocks == 7
    assert replay_blocks(trace, "lru", 3, skip=3).hit_blocks == 1


def test_a_prompt_longer_than_the_pool_caches_what_fits():
    report = replay_blocks(chains([1, 2, 3, 4], [1, 2, 3, 4]), "lru", 2)
    assert (report.hit_blocks, report.evictions) == (2, 0)


def test_partial_blocks_count_only_when_asked_for():
    requests = tuple(TraceRequest(0.0, 6, 1, (1, 2)) for _ in range(2))
    trace = Trace("made", requests, 4)
    assert replay_blocks(trace, "lru").hit_blocks == 1
    report = replay_blocks(trace, "lru", full_blocks_only=False)
    assert (report.hit_blocks, report.token_hit_rate) == (2, 0.5)


def test_no_policy_beats_the_optimum_on_random_conversations():
    rng, prompts, next_id = random.Random(1), [], 0
    talks = []
    for _ in range(400):
        talk = rng.choice(talks) if talks and rng.random() < 0.5 else [0]
        talk = talk + list(range(next_id + 1, next_id + 1 + rng.randint(1, 5)))
        next_id = talk[-1]
        talks.append(talk)
        prompts.append(talk)
    trace = chains(*prompts)
    best = replay_blocks(trace, OPT, 150).hit_blocks
    hits = {name: replay_blocks(trace, name, 150).hit_blocks for name in ("lru", "lfu", "fifo", "fifo_leaves")}
    assert 0 < max(hits.values()) < best <= replay_blocks(trace, "lru").hit_blocks


def reference_rows(name):
    rows = json.loads(shared_trace("reference_hit_rates.json").read_text())
    return [row for row in rows if row["trace"] == name and row["full_blocks_only"]]


def check_reference(name):
    trace = read_trace(shared_trace(name))
    rows = reference_rows(name)
    assert len(rows) > 20
    for row in rows:
        policy = row["policy"] + "_leaves" * row["leaf_only"]
        report = replay_blocks(trace, policy, row["capacity_blocks"])
        got = {key: getattr(report, key) for key in row}
        expected = {**row, "block_hit_rate": pytest.approx(row["block_hit_rate"], abs=1e-6)}
        assert got == {**expected, "token_hit_rate": pytest.approx(row["token_hit_rate"], abs=1e-6)}


@pytest.mark.slow
def test_reference_hit_rates_of_the_whole_trace():
    check_reference(WHOLE)


def test_reference_hit_rates_of_the_first_1000_rows():
    check_reference(FIRST_1000)


def test_the_azure_trace_is_read_whole():
    trace = read_trace(shared_trace("azure2023_conv.csv.gz"))
    assert len(trace.requests) == 19_366 and 3500 < trace.requests[-1].arrival < 3504
