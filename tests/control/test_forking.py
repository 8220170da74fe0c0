"""Forks and n > 1: what is shared, copied and computed, when, and what happens when the parent is gone."""

import dataclasses

import pytest

from jaxkv.control.engine import Engine
from jaxkv.control.executor import ExecutorLimits
from jaxkv.control.scheduler import Scheduler
from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.clock import SimulatedClock
from jaxkv.core.errors import RequestError
from jaxkv.core.metrics import MissReason
from jaxkv.core.plan import BlockCopy
from jaxkv.core.request import FinishReason, Request, SamplingParams
from jaxkv.simulation.cost_model import ConstantCostModel
from jaxkv.simulation.sim_executor import SimExecutor
from tests.support.scheduling import LIMITS, add, chunks, decoded, make, run

OFF = SchedulerConfig(enable_prefix_caching=False)


def fork(scheduler, parent_id, request_id, max_tokens=20, **sampling):
    return scheduler.fork(parent_id, request_id, SamplingParams(max_tokens=max_tokens, **sampling))


def hits(scheduler):
    stats = scheduler.stats.prefix_cache
    assert stats.hit + stats.num_missed == stats.queried
    return stats.hit_full_block, stats.hit_partial_block, stats.missed[MissReason.LAST_TOKEN]


def simulated_engine(config=SchedulerConfig(), limits=LIMITS, **options):
    clock = SimulatedClock()
    return Engine(SimExecutor(limits, ConstantCostModel(), clock), config, clock=clock, **options)


def run_to_the_end(engine):
    """Tokens of each request; invariants are checked after every step."""
    tokens = {}
    for _ in range(500):
        if not engine.has_work():
            return tokens
        for output in engine.step():
            tokens[output.request_id] = tokens.get(output.request_id, ()) + output.token_ids
        engine.scheduler.check()
    raise AssertionError("the engine did not come to an end")


@pytest.mark.parametrize("config", [SchedulerConfig(), OFF, SchedulerConfig(share_partial_blocks=False)])
def test_n_sequences_compute_the_prompt_once(config):
    """500 tokens and 3 more, whatever the settings of the prefix cache: the last, partial block is shared too."""
    engine = simulated_engine(config, ExecutorLimits(200, 16, 8, 2048, 8, 1024, 8))
    engine.add(Request("a", tuple(range(500)), SamplingParams(n=4, max_tokens=10)))
    first, second = engine.scheduler.schedule(), engine.scheduler.schedule()
    assert chunks(first) == [("a", 0, 500, True)]
    assert chunks(second) == [(f"a#{i}", 499, 1, True) for i in (1, 2, 3)] and decoded(second) == ["a"]
    blocks = first.updates[0].blocks
    tables = [update.blocks for update in second.updates if update.admission]
    assert all(table[:31] == blocks[:31] for table in tables)
    assert second.block_copies == tuple(BlockCopy(blocks[31], table[31], 3) for table in tables)
    assert len({blocks[31], *[table[31] for table in tables]}) == 4
    engine.scheduler.check()
    assert engine.stats.computed_tokens == 500 + 3
    assert hits(engine.scheduler) == (3 * 496, 3 * 3, 3)
    assert engine.stats.cached_tokens == 3 * 499


@pytest.mark.parametrize("config", [SchedulerConfig(), OFF])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9])
def test_prompts_of_any_length_are_shared_whole(config, length):
    """Shorter than a block, ending at its edge, or within it (blocks of 4)."""
    engine = simulated_engine(config)
    engine.add(Request("a", tuple(range(length)), SamplingParams(n=3, max_tokens=6)))
    tokens = run_to_the_end(engine)
    assert {name: len(got) for name, got in tokens.items()} == {"a": 6, "a#1": 6, "a#2": 6}
    assert engine.stats.computed_tokens == length + 2
    full = (length - 1) // 4 * 4
    assert hits(engine.scheduler)[:2] == (2 * full, 2 * (length - 1 - full))


@pytest.mark.parametrize("config", [SchedulerConfig(), OFF])
@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("seed", [None, 7, 2**31 - 1])
def test_n_sequences_are_n_requests_with_consecutive_seeds(config, max_in_flight, seed):
    """Also with more sequences than rows."""
    sampling = SamplingParams(n=6, max_tokens=9, seed=seed)
    together = simulated_engine(config, max_in_flight=max_in_flight)
    together.add(Request("a", tuple(range(10)), sampling))
    apart = simulated_engine(config, max_in_flight=max_in_flight)
    for i in range(6):
        one = dataclasses.replace(sampling, n=1, seed=None if seed is None else (seed + i) % 2**31)
        apart.add(Request(f"a#{i}" if i else "a", tuple(range(10)), one))
    got = run_to_the_end(together)
    assert got == run_to_the_end(apart) and len(set(got.values())) == 6
    assert together.stats.num_finished == {FinishReason.LENGTH: 6}


def test_a_running_request_is_forked_where_it_stands():
    scheduler = make()
    add(scheduler, "a", list(range(6)))
    run(scheduler)
    run(scheduler)  # 6 + 1 + 8 tokens are known, and the K/V of 14 is computed
    assert fork(scheduler, "a", "b", max_tokens=18, min_tokens=11) == (5,) * 9
    plan, outputs = run(scheduler)
    assert chunks(plan) == [("b", 14, 1, True)] and decoded(plan) == ["a"]
    (update,) = [update for update in plan.updates if update.admission]
    parent = next(state for state in scheduler.running if state.request_id == "a").blocks
    assert update.blocks[:3] == tuple(parent[:3]) and update.blocks[3] != parent[3]
    assert plan.block_copies == (BlockCopy(parent[3], update.blocks[3], 2),)
    assert (update.admission.max_new_tokens, update.admission.min_new_tokens) == (9, 2)
    # What the parent generated is not told again, and the prompt is the parent's.
    output = next(output for output in outputs if output.request_id == "b")
    assert (output.token_ids, output.num_prompt_tokens, output.num_cached_tokens) == ((5,), 6, 6)
    _, outputs = run(scheduler)
    assert next(output for output in outputs if output.request_id == "b").finish_reason is FinishReason.LENGTH
    assert scheduler.stats.requests[-1].num_generated_tokens == 9
    assert scheduler.stats.prompt_tokens == 6 + 15 and scheduler.stats.cached_tokens == 14


def test_what_a_fork_hangs_on_is_findable_before_it():
    """The parent's generated blocks may not have been published yet (they are, four at a time)."""
    scheduler = make()
    add(scheduler, "a", list(range(6)))
    run(scheduler)
    run(scheduler)  # 15 tokens are known, 3 full blocks have K/V; only those of the prompt are published
    assert len(scheduler.blocks.index) == 2
    fork(scheduler, "a", "b")
    run(scheduler)
    state = next(state for state in scheduler.running if state.request_id == "b")
    assert scheduler.blocks.match(state.block_hashes).blocks == tuple(state.blocks[:3])
    scheduler.finish("b", FinishReason.STOP)
    scheduler.check()
    assert scheduler.blocks.match(state.block_hashes).num_tokens == 12


def test_a_fork_keeps_salt_and_priority():
    scheduler = make(SchedulerConfig(policy="priority"))
    add(scheduler, "a", 6, cache_salt="x", priority=3)
    fork(scheduler, "a", "b")
    state = list(scheduler.waiting)[1]
    assert (state.request.cache_salt, state.rank[0]) == ("x", 3)
    run(scheduler)
    run(scheduler)
    scheduler.finish("b", FinishReason.ABORT)
    add(scheduler, "c", list(state.token_ids))
    plan, _ = run(scheduler)
    assert chunks(plan) == [("c", 0, 7, True)]  # another salt


def test_a_fork_waits_one_plan_and_keeps_its_row_and_blocks_while_others_pass():
    """Block copies come before prefill in a plan, so the parent's partial block can't be copied in its own plan."""
    scheduler = make(OFF, max_num_seqs=3)
    add(scheduler, "a", 6)
    for name in "bc":
        fork(scheduler, "a", name)
    add(scheduler, "d", 3)
    plan, _ = run(scheduler)
    assert chunks(plan) == [("a", 0, 6, True)]  # two of three rows are kept, so d has none
    plan, _ = run(scheduler)
    assert chunks(plan) == [("b", 5, 1, True), ("c", 5, 1, True)]
    roomy = make(OFF)
    add(roomy, "a", 6)
    for name in "bc":
        fork(roomy, "a", name)
    add(roomy, "d", 3)
    assert chunks(run(roomy)[0]) == [("a", 0, 6, True), ("d", 0, 3, True)]
    assert chunks(run(roomy)[0]) == [("b", 5, 1, True), ("c", 5, 1, True)]


def test_blocks_are_kept_for_forks_whose_turn_is_the_next_plan():
    """7 blocks: 2 of the parent; 1 for each fork and 1 to grow for each of 4 leaves none for the last request."""
    for num_blocks, passes in ((9, False), (10, True)):
        scheduler = make(OFF, num_blocks=num_blocks, max_model_len=28)
        add(scheduler, "a", 6, max_tokens=3)
        for name in "bc":
            fork(scheduler, "a", name, max_tokens=3)
        add(scheduler, "d", 3, max_tokens=3)
        plan, _ = run(scheduler)
        assert [chunk[0] for chunk in chunks(plan)] == (["a", "d"] if passes else ["a"])
        plan, _ = run(scheduler)
        assert [chunk[0] for chunk in chunks(plan)][:2] == ["b", "c"] and scheduler.stats.preemptions == 0


def test_a_fork_of_a_fork_waits_for_its_own_parent():
    scheduler = make(OFF)
    add(scheduler, "a", 6)
    fork(scheduler, "a", "b")
    fork(scheduler, "b", "c")
    assert [chunks(run(scheduler)[0]) for _ in range(3)] == [
        [("a", 0, 6, True)], [("b", 5, 1, True)], [("c", 5, 1, True)],
    ]  # fmt: skip


def test_a_long_prompt_is_prefilled_in_chunks_before_its_forks():
    scheduler = make(OFF, max_num_batched_tokens=8)
    add(scheduler, "a", 18)
    fork(scheduler, "a", "b")
    plans = [chunks(run(scheduler)[0]) for _ in range(4)]
    assert plans == [[("a", 0, 8, False)], [("a", 8, 8, False)], [("a", 16, 2, True)], [("b", 17, 1, True)]]


@pytest.mark.parametrize(
    ("config", "start"), [(OFF, 0), (SchedulerConfig(share_partial_blocks=False), 4), (SchedulerConfig(), 6)]
)
@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.STOP])
def test_without_its_parent_a_fork_looks_up_its_tokens(config, start, reason):
    scheduler = make(config)
    add(scheduler, "a", 6)
    run(scheduler)
    fork(scheduler, "a", "b")
    scheduler.finish("a", reason)
    plan, _ = run(scheduler)
    assert chunks(plan) == [("b", start, 7 - start, True)] and len(plan.block_copies) == (start == 6)
    assert scheduler.blocks.ref_count(plan.updates[0].blocks[0]) == 1


def test_a_preempted_parent_comes_back_first_and_is_shared_again():
    scheduler = make(OFF)
    add(scheduler, "a", 6)
    run(scheduler)
    fork(scheduler, "a", "b")
    scheduler.preempt("a")
    assert chunks(run(scheduler)[0]) == [("a", 0, 7, True)]
    plan, _ = run(scheduler)
    assert chunks(plan) == [("b", 6, 1, True)] and plan.block_copies[0].num_tokens == 2


def test_a_preempted_fork_continues_on_its_own():
    scheduler = make(OFF)
    add(scheduler, "a", 6)
    fork(scheduler, "a", "b")
    run(scheduler)
    run(scheduler)
    scheduler.preempt("b")
    scheduler.check()
    plan, _ = run(scheduler)
    assert chunks(plan) == [("b", 0, 7, True)]
    assert scheduler.stats.prefix_cache.missed[MissReason.RECOMPUTED] == 0  # nothing is counted without the cache


def test_a_fork_waits_for_no_one_who_ended_with_tokens_in_flight():
    scheduler = make(OFF)
    add(scheduler, "a", 6)
    fork(scheduler, "a", "b")
    first = scheduler.schedule()
    scheduler.finish("a", FinishReason.ABORT)
    second = scheduler.schedule()
    assert chunks(first) == [("a", 0, 6, True)] and chunks(second) == [("b", 0, 6, True)]
    scheduler.check()


def test_forks_that_cannot_be_are_refused():
    scheduler = make(max_stop_ids=2)
    add(scheduler, "a", 6)
    run(scheduler)
    run(scheduler)
    with pytest.raises(RequestError, match="request 'x' has ended or never was") as error:
        fork(scheduler, "x", "b")
    assert (error.value.status, error.value.param) == (404, "parent_id")
    with pytest.raises(RequestError, match="'a' is already in use"):
        fork(scheduler, "a", "a")
    with pytest.raises(RequestError, match="max_tokens is 9, but request 'a' has generated 9 tokens") as error:
        fork(scheduler, "a", "b", max_tokens=9)
    assert error.value.param == "max_tokens"
    with pytest.raises(RequestError, match="3 ids would end the request"):
        fork(scheduler, "a", "b", stop_token_ids=(1, 2, 3))
    assert scheduler.live_ids == ("a",) and scheduler.stats.num_requests == 1
    fork(scheduler, "a", "b", max_tokens=None)
    assert scheduler.live_ids == ("a", "b")


def test_sequences_are_accepted_all_or_none():
    engine = simulated_engine()
    engine.add(Request("a#2", (1, 2), SamplingParams()))
    with pytest.raises(RequestError, match="'a#2' is already in use"):
        engine.add(Request("a", (1, 2), SamplingParams(n=3)))
    assert engine.scheduler.live_ids == ("a#2",)


def test_an_engine_that_failed_forks_nothing():
    engine = simulated_engine()
    engine.add(Request("a", (1, 2), SamplingParams()))
    engine.failed = "broken"
    with pytest.raises(RequestError, match="must be restarted: broken"):
        engine.fork("a", "b", SamplingParams())


def test_forks_made_in_mid_stream_by_the_engine():
    """Two steps in flight: the fork goes on from what has been delivered, not from what the device has come to."""
    engine = simulated_engine(OFF)
    engine.add(Request("a", tuple(range(6)), SamplingParams(max_tokens=20, seed=3)))
    delivered = ()
    while len(delivered) < 7:
        delivered += engine.step()[0].token_ids
    assert engine.fork("a", "same", SamplingParams(max_tokens=20, seed=3)) == delivered
    assert engine.fork("a", "other", SamplingParams(max_tokens=20, seed=4)) == delivered
    tokens = run_to_the_end(engine)
    whole = delivered + tokens["a"]
    assert len(whole) == 20
    assert delivered + tokens["same"] == whole  # same seed and positions
    assert len(tokens["other"]) == len(tokens["same"]) and tokens["other"] != tokens["same"]
    assert engine.stats.computed_tokens == 6 + 2


def test_a_block_under_every_policy_can_be_shared_before_it_is_findable():
    for policy in ("lru", "lfu", "fifo", "fifo_leaves", "return_rate"):
        scheduler = Scheduler(LIMITS, SchedulerConfig(enable_prefix_caching=False, eviction_policy=policy))
        add(scheduler, "a", 9)
        fork(scheduler, "a", "b")
        run(scheduler)
        plan, _ = run(scheduler)
        shared = next(update for update in plan.updates if update.admission).blocks[:2]
        assert [scheduler.blocks.ref_count(block) for block in shared] == [2, 2]
        for name in "ab":
            scheduler.finish(name, FinishReason.ABORT)
        scheduler.check()
        assert scheduler.blocks.num_free == 100 and scheduler.blocks.num_cached == 0
