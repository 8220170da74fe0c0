"""From the engine's own request log to the diagnosis: the real scheduler with many requests at once, a simulated device."""

import random

import pytest

from jaxkv.control.engine import Engine
from jaxkv.control.executor import ExecutorLimits
from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.clock import SimulatedClock
from jaxkv.core.request import Request, SamplingParams
from jaxkv.core.request_record import RequestRecord
from jaxkv.insight.causes import Cause
from jaxkv.insight.diagnosis import compare
from jaxkv.insight.prompt_log import log_of_records, read_records
from jaxkv.insight.prompt_replay import Pool
from jaxkv.insight.proposals import find_faults
from jaxkv.insight.request_log import RequestLog
from jaxkv.simulation.cost_model import ConstantCostModel
from jaxkv.simulation.sim_executor import SimExecutor

NUM_BLOCKS = 500


def serve(path, requests, token_ids):
    """Write the log of these requests, served at their arrival times; returns the engine's counters."""
    clock = SimulatedClock(0.0)
    limits = ExecutorLimits(NUM_BLOCKS + 1, 16, 8, 256, 8, 1024, 8)
    engine = Engine(SimExecutor(limits, ConstantCostModel(), clock), SchedulerConfig(), clock=clock)
    log = RequestLog(str(path), token_ids=token_ids)
    engine.on_end = lambda state, metrics: log.put(RequestRecord.of(metrics), state, limits.block_size)
    waiting = sorted(requests, key=lambda request: request.arrival_time, reverse=True)
    while waiting or engine.has_work():
        if not engine.has_work():
            clock.advance_to(max(clock.now(), waiting[-1].arrival_time))
        while waiting and waiting[-1].arrival_time <= clock.now():
            engine.add(waiting.pop())
        engine.step()
    log.close()
    return engine.stats


def traffic():
    """A template with a varying span at token 90, and thirty documents that the pool cannot hold."""
    rng = random.Random(0)

    def tokens(count):
        return rng.choices(range(30_000), k=count)

    head, behind, documents = tokens(90), tokens(200), [tokens(400) for _ in range(30)]
    for i in range(160):
        if i % 2:
            caller, prompt = "template", [*head, *tokens(4), *behind, *tokens(20)]
        else:
            caller, prompt = "documents", [*documents[i // 2 % 30], *tokens(20)]
        sampling = SamplingParams(max_tokens=rng.randint(5, 60), ignore_eos=True, seed=i)
        yield Request(f"r{i}", tuple(prompt), sampling, arrival_time=0.2 * i, caller=caller)


@pytest.mark.parametrize("token_ids", [True, False])
def test_the_engine_s_log_is_diagnosed(tmp_path, token_ids):
    path = tmp_path / "requests.jsonl"
    stats = serve(path, traffic(), token_ids)
    log = log_of_records(read_records(path))
    assert log.has_tokens is token_ids
    diagnosis = find_faults(compare(log, Pool(NUM_BLOCKS)))
    assert not diagnosis.is_replayed
    assert diagnosis.hit_rate == pytest.approx(stats.hit_rate) and diagnosis.tokens == stats.prompt_tokens
    assert sum(diagnosis.causes.values()) == stats.prefix_cache.num_missed
    found = {finding.cause: finding for finding in diagnosis.findings}
    # The second and third time that the documents are asked for, none is there any more.
    evicted = found["evicted"]
    assert evicted.callers[0][:2] == ("documents", 50) and evicted.tokens_lost >= 50 * 400
    assert evicted.needed_blocks[2] > NUM_BLOCKS and evicted.gain.after > evicted.gain.before
    if token_ids:
        changed = found["changed_text"]
        assert (changed.position, changed.callers, changed.common_behind) == (90, (("template", 80, 80),), 200)
        assert diagnosis.causes[Cause.CHANGED_TEXT] == 79 * 200
    else:
        unknown = [f for f in diagnosis.findings if f.cause == "unknown" and f.callers[0][0] == "template"]
        assert [finding.position for finding in unknown] == [80]
