"""The request log behind the real scheduler: every field, and what a full disk or a slow one does to the engine."""

import dataclasses
import json
import logging
import os
import stat
import threading

import pytest

from jaxkv.control.engine import Engine
from jaxkv.control.executor import ExecutorLimits
from jaxkv.control.prefix_index import hash_blocks, root_hash
from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.clock import SimulatedClock
from jaxkv.core.errors import ConfigError
from jaxkv.core.request import Request, SamplingParams
from jaxkv.core.request_record import RequestRecord, block_name, salt_name
from jaxkv.insight import request_log
from jaxkv.insight.request_log import RequestLog
from jaxkv.insight.traffic import Traffic
from jaxkv.simulation.cost_model import ConstantCostModel
from jaxkv.simulation.sim_executor import SimExecutor

LIMITS = ExecutorLimits(
    num_blocks=41, block_size=16, max_num_seqs=4, max_num_batched_tokens=64, max_prefill_seqs=4, max_model_len=256,
    max_decode_steps=1,
)  # fmt: skip


def run(log, requests, *, limits=LIMITS, abort=(), **config):
    """Serve one after another what has no arrival time, the others together."""
    clock = SimulatedClock(100.0)
    engine = Engine(SimExecutor(limits, ConstantCostModel(), clock), SchedulerConfig(**config), clock=clock)
    Traffic(log, unix_time=clock.now).attach(engine)
    for request in requests:
        engine.add(request)
        if request.request_id in abort:
            engine.step()
            engine.abort(request.request_id)
        while request.arrival_time is None and engine.has_work():
            engine.step()
    while engine.has_work():
        engine.step()
        engine.scheduler.check()
    log.close()
    return engine


def ask(name, prompt, max_tokens=5, together=False, **fields):
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1, n=fields.pop("n", 1))
    return Request(name, tuple(prompt), sampling, arrival_time=100.0 if together else None, **fields)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "requests.jsonl"


def read(path):
    return {record.request_id: record for record in map(RequestRecord.from_json, path.read_text().splitlines())}


def test_every_field(path):
    prompt = range(10, 50)  # 2.5 blocks
    run(
        RequestLog(str(path)),
        [
            ask("a", prompt, caller="me"),
            ask("b", prompt),
            ask("salted", prompt, 9, cache_salt="pepper"),
            ask("one", [7], 1),
        ],
    )
    records = read(path)
    a, b, salted, one = (records[name] for name in ("a", "b", "salted", "one"))
    assert (a.prompt_tokens, a.cached_tokens, a.computed_tokens, a.output_tokens, a.max_tokens) == (40, 0, 40, 5, 5)
    assert a.missed == {"first_seen": 40} and a.caller == "me" and a.salt is None and a.finish_reason == "length"
    # 0.5 ms a call and 20 us a prefilled token; 4 decode steps of 4.01 ms after the first token.
    assert (a.arrival, a.queue) == (100.0, 0.0)
    assert a.prefill == a.ttft == pytest.approx(0.0005 + 40 * 0.00002) and a.decode == pytest.approx(4 * 0.00451)
    assert a.itl == a.itl_max == pytest.approx(0.00451) and a.e2e == pytest.approx(a.ttft + a.decode)
    # All but the last token, of blocks and of the tail.
    assert (b.cached_tokens, b.computed_tokens, b.missed) == (39, 1, {"last_token": 1})
    assert (
        salted.salt == salt_name("pepper")
        and salted.missed == {"salt": 32, "first_seen": 8}
        and "pepper" not in path.read_text()
    )
    assert (one.itl, one.itl_max, one.decode, one.blocks) == (None, None, 0.0, ())
    for record in records.values():
        assert record.cached_tokens + sum(record.missed.values()) == record.prompt_tokens
        assert record.queue + record.prefill + record.decode == pytest.approx(record.e2e)
        assert record.block_size == 16 and record.prompt_token_ids is None is record.output_token_ids
    names = [block_name(name) for name in hash_blocks(root_hash(b"", None), tuple(prompt), 16)]
    assert list(a.blocks) == names and a.blocks == b.blocks  # 45 tokens: two full blocks
    # 49 tokens make three full blocks, the last with outputs in it; without its salt it is like the others.
    assert salted.blocks[:2] == a.blocks and len(salted.blocks) == 3


def test_token_ids_only_when_asked_for(path):
    run(RequestLog(str(path), token_ids=True), [ask("a", [3, 4, 5], 4)])
    (record,) = read(path).values()
    assert record.prompt_token_ids == (3, 4, 5) and len(record.output_token_ids) == 4


def test_blocks_are_named_without_a_prefix_cache_too(path):
    run(RequestLog(str(path)), [ask("a", range(40)), ask("b", range(40))], enable_prefix_caching=False)
    records = read(path)
    assert records["a"].blocks == records["b"].blocks and len(records["a"].blocks) == 2
    assert records["b"].cached_tokens == 0 and records["b"].missed == {}


def test_preempted_aborted_and_forked_requests(path):
    small = dataclasses.replace(LIMITS, num_blocks=10)
    requests = [
        ask(name, range(1000 * number, 1000 * number + 30), 60, together=True) for number, name in enumerate("ab")
    ]
    engine = run(RequestLog(str(path)), [*requests, ask("n", range(20), 3, n=2), ask("gone", [1] * 20, 50)],
                 limits=small, abort={"gone"})  # fmt: skip
    records = read(path)
    assert engine.stats.preemptions > 0 and records.keys() == {"a", "b", "n", "n#1", "gone"}
    victim = next(record for record in records.values() if record.preemptions)
    assert victim.computed_tokens > victim.prompt_tokens and "recomputed" not in victim.missed
    assert records["gone"].finish_reason == "abort" and records["gone"].output_tokens < 50
    fork = records["n#1"]
    assert fork.cached_tokens >= 16 and fork.cached_tokens + fork.computed_tokens == 20
    assert sum(record.computed_tokens for record in records.values()) == engine.stats.computed_tokens
    assert sum(record.preemptions for record in records.values()) == engine.stats.preemptions


def test_a_file_that_cannot_be_written_is_a_users_error(tmp_path):
    with pytest.raises(ConfigError, match=r"request_log is .*no/such.*No such file or directory; choose another file"):
        RequestLog(str(tmp_path / "no" / "such"))


def test_the_file_is_its_owners_and_grows(path):
    for name in ("first", "second"):
        run(RequestLog(str(path)), [ask(name, [1, 2, 3])])
    assert list(read(path)) == ["first", "second"] and stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_line_that_a_full_disk_broke_off_is_ended_first(path):
    path.write_text('{"schema": "jaxkv')
    run(RequestLog(str(path)), [ask("next", [1, 2, 3])])
    first, *records = path.read_text().splitlines()
    assert first == '{"schema": "jaxkv' and [RequestRecord.from_json(line).request_id for line in records] == ["next"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
def test_a_full_disk_ends_the_log_and_nothing_else(caplog):
    log = RequestLog("/dev/full")
    with caplog.at_level(logging.ERROR):
        engine = run(log, [ask(str(number), [number] * 30) for number in range(20)])
    assert sum(engine.stats.num_finished.values()) == 20 and engine.failed is None
    assert log.failed == "No space left on device"
    assert [entry.message for entry in caplog.records] == [
        "the request log /dev/full ends here: No space left on device"
    ]


def test_a_slow_disk_holds_nobody_up(path, monkeypatch, caplog):
    monkeypatch.setattr(request_log, "MOST_WAITING", 5)
    gate, log = threading.Event(), RequestLog(str(path))
    write = log._write
    monkeypatch.setattr(log, "_write", lambda entries: (gate.wait(20), write(entries)))
    monkeypatch.setattr(log, "close", lambda: None)
    with caplog.at_level(logging.WARNING):
        engine = run(log, [ask(str(number), [number] * 30) for number in range(40)])
    assert sum(engine.stats.num_finished.values()) == 40 and log.num_lost >= 28
    assert [entry.message for entry in caplog.records] == [
        f"the request log {path} loses records: the disk is too slow"
    ]
    monkeypatch.undo()
    gate.set()
    log.close()
    assert len(read(path)) == 40 - log.num_lost


def test_lines_are_there_before_the_end(path, until):
    """Whoever follows the file sees a request as soon as it has ended."""
    log = RequestLog(str(path))
    clock = SimulatedClock()
    engine = Engine(SimExecutor(LIMITS, ConstantCostModel(), clock), clock=clock)
    Traffic(log, unix_time=clock.now).attach(engine)
    engine.add(ask("a", [1, 2]))
    while engine.has_work():
        engine.step()
    until(lambda: path.read_text().endswith("}\n"))
    assert json.loads(path.read_text())["request_id"] == "a"
    log.close()


def test_an_engine_that_fails_logs_its_requests(path):
    log, clock = RequestLog(str(path)), SimulatedClock()
    engine = Engine(SimExecutor(LIMITS, ConstantCostModel(), clock), clock=clock)
    Traffic(log).attach(engine)
    engine.add(ask("a", [1, 2]))
    engine.executor.submit = None
    engine.step()
    log.close()
    assert engine.failed and read(path)["a"].finish_reason == "error"
