"""The serial replay of prompts: as the engine counts, and as one counts by hand."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.control.executor import ExecutorLimits
from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.request import Request, SamplingParams
from jaxkv.core.request_record import RequestRecord
from jaxkv.insight.prompt_log import log_of_records, token_log
from jaxkv.insight.prompt_replay import Pool, Served, replay_prompts
from jaxkv.insight.reuse_distance import capacity_for, needed_capacities
from jaxkv.simulation.cost_model import ConstantCostModel
from jaxkv.simulation.replay import replay
from tests.support.prompts import log_of, logged


def random_rows(rng, count, size):
    """Prompts that share heads of one another, under three salts."""
    rows = []
    for _ in range(count):
        old = rng.choice(rows)[0] if rows else []
        tokens = old[: rng.randint(0, len(old))] + [rng.randrange(50) for _ in range(rng.randint(1, 4 * size))]
        rows.append((tokens[: 12 * size], rng.choice([None, None, "a", "b"])))
    return rows


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.booleans(), st.sampled_from([None, 12, 14, 30]), st.sampled_from(["lru", "fifo_leaves"]))
def test_equals_the_engine_that_serves_one_at_a_time(seed, share_partial, capacity, policy):
    rows = random_rows(random.Random(seed), 40, 4)
    log = token_log([logged(i, tokens, salt=salt) for i, (tokens, salt) in enumerate(rows)], 4)
    ours = replay_prompts(log, Pool(capacity, share_partial, policy))
    limits = ExecutorLimits((capacity or 2000) + 1, 4, 1, 512, 1, 64, 1)
    config = SchedulerConfig(share_partial_blocks=share_partial, eviction_policy=policy, eviction_lookahead=0)
    sampling = SamplingParams(max_tokens=1, ignore_eos=True)
    requests = [Request(str(i), tuple(t), sampling, 100.0 * i, cache_salt=salt) for i, (t, salt) in enumerate(rows)]
    theirs = replay(requests, limits, ConstantCostModel(), config, max_in_flight=1)
    assert [one.cached for one in ours.served] == [metrics.num_cached_tokens for metrics in theirs.requests]
    totals = {reason.value: n for reason, n in theirs.stats.prefix_cache.missed.items() if n}
    assert totals == {k: n for k in totals if (n := sum(one.missed.get(k, 0) for one in ours.served))}
    assert ours.hit_rate == theirs.hit_rate


def test_outputs_are_there_for_the_next_turn():
    first, answer = list(range(20)), list(range(100, 120))
    log = token_log([logged(0, first, answer), logged(1, first + answer + [7, 8])], 8)
    # All but the answer's last token was computed; 39 tokens: four blocks, and seven of the fifth.
    assert [one.cached for one in replay_prompts(log).served] == [0, 39]
    assert [one.cached for one in replay_prompts(log, Pool(share_partial=False)).served] == [0, 32]


def test_a_prompt_that_the_pool_cannot_hold_counts_nowhere():
    log = log_of([range(100), range(20), range(20)], block_size=8)
    replayed = replay_prompts(log, Pool(capacity_blocks=4))
    assert replayed.served[0] is None and replayed.num_refused == 1
    assert replayed.hit_rate == 19 / 40


def test_block_names_find_full_blocks_under_their_salt():
    def record(i, blocks, salt=None):
        counts = {"prompt_tokens": 10, "cached_tokens": 0, "computed_tokens": 10, "output_tokens": 4}
        return RequestRecord(str(i), float(i), "stop", **counts, blocks=blocks, block_size=4, salt=salt)

    a, b, c, d = ("a" * 16, "b" * 16, "c" * 16, "d" * 16)
    log = log_of_records([record(0, (a, b, c)), record(1, (a, b, c)), record(2, (a, d)), record(3, (a, b), "s")])
    replayed = replay_prompts(log)
    assert replayed.served == (Served(0), Served(8), Served(4), Served(0))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32))
def test_so_many_blocks_keep_a_prefix_and_one_fewer_does_not(seed):
    rng = random.Random(seed)
    heads = [[rng.randrange(9000) for _ in range(4 * rng.randint(2, 5))] for _ in range(4)]
    # Every prompt ends within a block, so that each takes the one more that is counted for it.
    rows = [[*rng.choice(heads), *(rng.randrange(9000) for _ in range(4 * rng.randint(0, 2) + 1))] for _ in range(20)]
    log = log_of(rows, block_size=4)
    needed = needed_capacities(log)
    assert any(needed)
    largest = max(-(-len(row) // 4) for row in rows)
    for number, capacities in enumerate(needed):
        assert capacities == sorted(capacities)
        for place, capacity in list(enumerate(capacities))[:: max(1, len(capacities) - 1)]:  # the first and the last
            for usable in (capacity - 1, capacity):
                if usable >= largest:
                    found = replay_prompts(log, Pool(usable, share_partial=False)).served[number].cached // 4
                    assert (found > place) == (usable >= capacity)


def test_capacities_by_hand():
    needs = [(10, 40), (30, 50), (50, 10)]
    assert [capacity_for(needs, share) for share in (0.4, 0.5, 0.9, 1.0)] == [10, 30, 30, 50]
