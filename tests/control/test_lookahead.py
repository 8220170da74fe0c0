"""Blocks that waiting requests will ask for: which go, which stay, and how the scheduler's queue tells."""

import dataclasses
import random

import pytest

from jaxkv.control.block_manager import BlockManager
from jaxkv.control.eviction import LRU
from jaxkv.control.eviction_choice import EVICTION_POLICIES, make_eviction_policy
from jaxkv.control.executor import ExecutorLimits
from jaxkv.control.lookahead import LookAhead
from jaxkv.control.request_state import WaitingQueue
from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.errors import ConfigError
from jaxkv.core.request import Request, SamplingParams
from jaxkv.simulation.block_replay import OPT, replay_blocks, serve
from jaxkv.simulation.cost_model import ConstantCostModel
from jaxkv.simulation.replay import replay
from jaxkv.simulation.synthetic_traces import synthetic_trace

LIMITS = ExecutorLimits(
    num_blocks=41,
    block_size=4,
    max_num_seqs=1,
    max_num_batched_tokens=64,
    max_prefill_seqs=1,
    max_model_len=64,
    max_decode_steps=8,
)


def filled(*names):
    """A policy over LRU with one released block of each name, in this order; ids are places."""
    policy = LookAhead(LRU())
    for block, name in enumerate(names):
        policy.insert(block, name, b"root")
        policy.release(block)
    return policy


def test_what_nobody_waits_for_goes_first_and_what_is_needed_last_next():
    policy = filled(b"a", b"b", b"c", b"d")
    policy.wait((0, 1), [b"a", b"x"])
    policy.wait((0, 2), [b"b", b"a"])
    assert [policy.evict() for _ in range(4)] == [2, 3, 1, 0]
    with pytest.raises(KeyError):
        policy.evict()


def test_of_one_requests_blocks_the_tail_goes_first():
    policy = filled(b"a", b"z", b"m", b"b")
    policy.wait((0, 1), [b"z", b"b", b"m", b"a"])
    assert [policy.evict() for _ in range(4)] == [0, 2, 3, 1]


def test_a_hash_named_twice_is_no_harm():
    policy = filled(b"a", b"b")
    policy.wait((0, 1), [b"a", b"a"])
    policy.stop_waiting((0, 1))
    assert [policy.evict(), policy.evict()] == [0, 1]


def test_a_better_rank_that_comes_later_counts():
    policy = filled(b"a", b"b")
    policy.wait((0, 1), [b"a"])
    policy.wait((0, 2), [b"b"])
    policy.insert(7, b"c", b"root")
    policy.release(7)
    assert policy.evict() == 7 and len(policy) == 2  # a and b are set aside now
    policy.wait((-1, 3), [b"b"])
    assert policy.evict() == 0


def test_who_leaves_protects_nothing():
    policy = filled(b"a", b"b")
    policy.wait((0, 1), [b"a"])
    assert policy.evict() == 1 and 0 in policy and 1 not in policy
    policy.insert(1, b"b", b"root")
    policy.release(1)
    policy.stop_waiting((0, 1))
    policy.stop_waiting((0, 1))
    assert sorted(policy.evict() for _ in range(2)) == [0, 1]


def test_a_block_set_aside_can_be_used_again():
    policy = filled(b"a", b"b")
    policy.wait((0, 1), [b"a"])
    assert policy.evict() == 1
    policy.use(0)
    assert len(policy) == 0 and 0 not in policy
    policy.release(0)
    assert len(policy) == 1 and policy.evict() == 0


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_every_policy_keeps_its_books_under_a_moving_queue(name):
    rng = random.Random(4)
    policy = LookAhead(make_eviction_policy(name, 50))
    manager = BlockManager(51, 4, policy)
    chains = [[b"%d" % rng.randrange(4), *(b"%d-%d" % (rng.randrange(30), d) for d in range(5))] for _ in range(1500)]
    for number, chain in enumerate(chains):
        policy.wait((rng.randrange(2), number + 9), chains[min(number + 9, len(chains) - 1)])
        for priority in (0, 1):
            policy.stop_waiting((priority, number))
        serve(manager, chain)
        if number % 50 == 0:
            manager.check([])
    assert manager.num_evictions > 1000 and len(policy) == 50
    assert len({policy.evict() for _ in range(50)}) == 50


def test_the_queue_shows_only_its_first_requests():
    class Watcher(LookAhead):
        @property
        def in_sight(self):
            return sorted(number for _, number in self._hashes)

    @dataclasses.dataclass
    class State:
        rank: tuple[int, int]
        request_id: str = ""
        block_hashes: tuple[bytes, ...] = (b"h",)

    watcher = Watcher(LRU())
    queue = WaitingQueue(watcher, window=2)
    states = {number: State((0, number)) for number in range(1, 7)}
    for number in (3, 4, 5, 1):
        queue.push(states[number])
    assert watcher.in_sight == [1, 3]
    queue.remove(states[4])  # out of sight already
    assert watcher.in_sight == [1, 3]
    queue.remove(states[3])
    assert watcher.in_sight == [1, 5]
    assert queue.pop() is states[1] and watcher.in_sight == [5]
    assert queue.pop() is states[5] and watcher.in_sight == []


def test_what_waiting_requests_need_survives_a_burst():
    """Ten conversations come back behind a burst of strangers whose blocks fill the pool four times."""

    def request(name, prompt, arrival):
        return Request(name, tuple(prompt), SamplingParams(max_tokens=1), arrival_time=arrival)

    first = [request(f"first-{i}", range(100 * i, 100 * i + 12), 0.0) for i in range(10)]
    burst = [request(f"burst-{i}", range(5000 + 100 * i, 5000 + 100 * i + 16), 100.0) for i in range(40)]
    back = [request(f"back-{i}", range(100 * i, 100 * i + 14), 100.0) for i in range(10)]
    cached = {}
    for lookahead in (0, 64):
        config = SchedulerConfig(eviction_lookahead=lookahead)
        report = replay([*first, *burst, *back], LIMITS, ConstantCostModel(), config)
        cached[lookahead] = sum(m.num_cached_tokens for m in report.requests if m.request_id.startswith("back"))
    assert cached == {0: 0, 64: 10 * 12}


def test_a_negative_window_is_refused():
    with pytest.raises(ConfigError, match="eviction_lookahead is -1"):
        SchedulerConfig(eviction_lookahead=-1).check(LIMITS)


@pytest.mark.parametrize("policy", ["lru", "return_rate"])
def test_hits_grow_with_what_is_in_sight(policy):
    trace = synthetic_trace("conversations", 300)
    hits = [replay_blocks(trace, policy, 250, lookahead=depth).hit_blocks for depth in (0, 16, 64)]
    # Where the queue shows all that comes back before it is evicted, look-ahead is as good as knowing the future.
    assert hits[0] < hits[1] < hits[2] == replay_blocks(trace, OPT, 250).hit_blocks
