"""Requests out of traces: lengths, names of blocks of every size, and what the engine makes of tokens that nobody has seen."""

import dataclasses
import random

import pytest

from jaxkv.control.executor import ExecutorLimits
from jaxkv.control.prefix_index import hash_blocks, root_hash
from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.errors import ConfigError
from jaxkv.core.metrics import MissReason
from jaxkv.core.request import Request, SamplingParams
from jaxkv.core.request_record import RequestRecord, block_name
from jaxkv.core.unseen_tokens import UnseenTokens
from jaxkv.simulation.cost_model import ConstantCostModel
from jaxkv.simulation.replay import replay
from jaxkv.simulation.trace_requests import known_sequences, longest, most_blocks, trace_requests
from jaxkv.simulation.traces import Trace, TraceError, TraceRequest, read_trace

LIMITS = ExecutorLimits(
    num_blocks=61,
    block_size=4,
    max_num_seqs=4,
    max_num_batched_tokens=24,
    max_prefill_seqs=4,
    max_model_len=120,
    max_decode_steps=8,
)


def trace_of(*rows, block_size=8):
    return Trace("t", tuple(TraceRequest(float(i), *row) for i, row in enumerate(rows)), block_size)


def names_of(trace, block_size, **options):
    return [list(request.block_names) for request in trace_requests(trace, block_size, **options)]


def test_unseen_tokens_are_counted():
    tokens = UnseenTokens(5)
    part, copy = tokens[2:], tokens.copy()
    copy += (7, 8)
    assert (len(tokens), len(part), len(copy), list(part), tokens[-1]) == (5, 3, 7, [0, 0, 0], 0)
    assert tokens == UnseenTokens(5) != UnseenTokens(6) and len(tokens[9:]) == 0
    with pytest.raises(IndexError):
        tokens[5]


def test_blocks_of_the_traces_own_size_are_named_by_its_ids():
    trace = trace_of((20, 3, (7, 8, 9)), (16, 1, (7, 8)))
    assert names_of(trace, 8) == [[b"7", b"8"], [b"7", b"8"]]
    first, second = trace_requests(trace, 8, speed=2.0)
    assert (len(first.prompt_token_ids), first.sampling.max_tokens, second.arrival_time) == (20, 3, 0.5)
    assert first.sampling.ignore_eos
    # The last block counts as a full one.
    assert names_of(trace, 8, full_blocks_only=False) == [[b"7", b"8", b"9"], [b"7", b"8"]]
    assert [len(r.prompt_token_ids) for r in trace_requests(trace, 8, full_blocks_only=False)] == [24, 16]


def test_smaller_blocks_are_parts_of_an_id():
    trace = trace_of((21, 1, (7, 8, 9)))
    assert names_of(trace, 4) == [[b"7.0", b"7.1", b"8.0", b"8.1"]]
    assert names_of(trace, 4, full_blocks_only=False) == [[b"7.0", b"7.1", b"8.0", b"8.1", b"9.0", b"9.1"]]


def test_larger_blocks_are_named_by_their_last_id():
    trace = trace_of((37, 1, (1, 2, 3, 4, 5)))
    assert names_of(trace, 16) == [[b"2", b"4"]]
    assert names_of(trace, 16, full_blocks_only=False) == [[b"2", b"4", b"5"]]


@pytest.mark.parametrize("block_size", [3, 12])
def test_other_sizes_are_refused(block_size):
    with pytest.raises(ConfigError, match="divisor or a multiple of 8"):
        list(trace_requests(trace_of((20, 3, (7, 8, 9))), block_size))


def test_a_trace_of_lengths_shares_nothing():
    trace = trace_of((40, 0), (40, 5), block_size=None)
    requests = list(trace_requests(trace, 4))
    assert [request.block_names for request in requests] == [(), ()] and requests[0].sampling.max_tokens == 1
    assert (longest(trace, 4), most_blocks(trace, 4)) == (45, 11 + 12)
    limits = dataclasses.replace(LIMITS, num_blocks=24)
    report = replay(requests, limits, ConstantCostModel(), SchedulerConfig(unseen_tokens=True))
    assert (report.hit_rate, report.stats.generated_tokens, report.stats.computed_tokens) == (0, 6, 80)


def named(prompt, salt, block_size, number, sampling, arrival):
    """The same request without its tokens: blocks are named by the hashes that they have without the salt."""
    hashes = hash_blocks(root_hash(b"", None), prompt, block_size)
    return Request(number, UnseenTokens(len(prompt)), sampling, arrival, cache_salt=salt, block_names=tuple(hashes))


@pytest.mark.parametrize("num_blocks", [30, 61, 400])
@pytest.mark.parametrize("seed", range(3))
def test_names_find_what_tokens_find(num_blocks, seed):
    """Hits, misses by reason, times and preemptions of the two are the same, where whole blocks alone are shared."""
    rng = random.Random(seed)
    stems = [[rng.randrange(1, 500) for _ in range(rng.randrange(4, 60))] for _ in range(6)]
    seen, unseen = [], []
    for number in range(60):
        prompt = rng.choice(stems)[: rng.randrange(1, 60)]
        prompt = (*prompt, *(rng.randrange(1, 500) for _ in range(rng.randrange(20))))
        salt = rng.choice([None, None, "a"])
        sampling = SamplingParams(max_tokens=rng.randrange(1, 30), ignore_eos=True)
        seen.append(Request(str(number), prompt, sampling, number * 0.002, cache_salt=salt))
        unseen.append(named(prompt, salt, 4, str(number), sampling, number * 0.002))
    limits = dataclasses.replace(LIMITS, num_blocks=num_blocks)
    # Without the look-ahead, which among blocks that one waiting request needs lets hashes decide.
    config = SchedulerConfig(share_partial_blocks=False, unseen_tokens=True, eviction_lookahead=0)
    expected, got = (replay(load, limits, ConstantCostModel(), config) for load in (seen, unseen))
    assert got.requests == expected.requests and got.stats.prefix_cache.missed == expected.stats.prefix_cache.missed
    assert got.evictions == expected.evictions and got.hit_rate > 0.05
    assert got.stats.prefix_cache.missed[MissReason.SALT] > 0
    assert num_blocks > 30 or got.stats.preemptions > 0
    # The default shares heads too, of known tokens alone.
    partial = dataclasses.replace(config, share_partial_blocks=True)
    assert replay(unseen, limits, ConstantCostModel(), partial).stats.prefix_cache.hit_partial_block < 4 * 60


def records(block_size=4, **fields):
    prompts = [(1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 3, 4, 5, 6, 7, 8, 9, 20, 21, 22, 23, 24)]
    outputs = [(20, 21, 22), (30,)]
    lines = []
    for number, (prompt, output) in enumerate(zip(prompts, outputs)):
        hashes = hash_blocks(root_hash(b"", None), prompt + output, block_size)
        lines.append(
            RequestRecord(
                request_id=str(number),
                arrival=1000.0 + 5 * number,
                finish_reason="length",
                prompt_tokens=len(prompt),
                cached_tokens=0,
                computed_tokens=len(prompt),
                output_tokens=len(output),
                block_size=block_size,
                blocks=tuple(map(block_name, hashes)),
                **{name: value(prompt, output) for name, value in fields.items()},
            ).to_json()
        )
    return lines[::-1]  # as they end


def test_our_request_log_is_read_by_arrival_and_knows_the_blocks_of_outputs(tmp_path):
    path = tmp_path / "requests.jsonl"
    aborted = dataclasses.replace(RequestRecord.from_json(records()[0]), output_tokens=0).to_json()
    path.write_text("\n".join([*records(), aborted, '{"schema":"jaxkv.request/1","cut o']))
    trace = read_trace(path)
    assert trace.is_log and trace.block_size == 4 and [r.arrival for r in trace.requests] == [0, 5]
    first, second = trace_requests(trace, 4)
    assert list(first.block_names) == list(second.block_names)[:3]
    config = SchedulerConfig(unseen_tokens=True)
    report = replay([first, second], LIMITS, ConstantCostModel(), config)
    # The second prompt goes on where the first's output ended: its third block holds what the first generated.
    # (Of 9 + 3 tokens the last is never computed, so the third block is not there.)
    assert [m.num_cached_tokens for m in report.requests] == [0, 8]
    assert len(second.block_names) == 3 and names_of(trace, 8) == [[second.block_names[1]]] * 2


def test_a_log_with_tokens_gives_prompts_and_outputs(tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(records(prompt_token_ids=lambda p, o: p, output_token_ids=lambda p, o: o)) + "\n")
    trace = read_trace(path)
    requests, known = list(trace_requests(trace, 4)), known_sequences(trace)
    assert requests[0].prompt_token_ids == (1, 2, 3, 4, 5, 6, 7, 8, 9) and known["0"][9:] == (20, 21, 22)
    report = replay(requests, LIMITS, ConstantCostModel(), sequences=known)
    # Token by token: 9 of the prompt and the two output tokens whose K/V were computed.
    assert [m.num_cached_tokens for m in report.requests] == [0, 11]
    assert [m.num_cached_tokens for m in replay(requests, LIMITS, ConstantCostModel()).requests] == [0, 9]
    assert list(trace_requests(trace, 3))[0].block_names == ()  # any size will do


@pytest.mark.parametrize(
    "lines, message",
    [
        ([*records(), "{}", *records()], "line 3"),
        ([records()[0][:-1]], "line 1"),
        ([*records(4), *records(8)], "blocks of 4 and 8 tokens"),
        ([dataclasses.replace(RequestRecord.from_json(records()[0]), output_tokens=0).to_json()], "no request"),
    ],
)
def test_logs_that_cannot_be_replayed_are_refused(tmp_path, lines, message):
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(TraceError, match=message):
        read_trace(path)
