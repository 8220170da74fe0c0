"""The model of returning conversations, and the policy that ranks blocks by it."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxkv.control.return_rate
from jaxkv.control.block_manager import BlockManager
from jaxkv.control.return_rate import CANDIDATES, GHOSTS, History, Parameters, ReturnRate, return_rate
from jaxkv.simulation.block_replay import serve

PARAMETERS = Parameters(r=0.3, alpha=1.0, a=2.0, b=1.0)


def rate(num_uses, first, last, now, mean_gap=100.0):
    return return_rate(PARAMETERS, History(num_uses, first, last), now, mean_gap)


def test_rate_by_hand():
    # One return, 50 after the first use, 100 ago: P(alive) = 1 / (1 + 2/2 * (250/150) ** 1.3).
    assert rate(2, 0, 50, 150) == pytest.approx(1 / (1 + (250 / 150) ** 1.3) * 1.3 / 250)
    # No return yet, just released: alive with 1 / (1 + 2/1).
    assert rate(1, 0, 0, 0) == pytest.approx(0.3 / 100 / 3)


def test_a_rhythm_that_is_overdue_is_worth_less_than_a_new_block():
    quick, new = [rate(11, 0, 1000, now) for now in (1050, 2500)], rate(1, 2400, 2400, 2500)
    assert quick[0] > new > quick[1]
    # By the same silence a slow rhythm is not overdue.
    assert rate(11, 0, 20_000, 21_500) > 5 * quick[1]


@given(uses=st.integers(1, 10**6), seen=st.integers(0, 10**9), ages=st.tuples(*[st.integers(0, 10**9)] * 2))
def test_rates_are_finite_and_fall_with_silence(uses, seen, ages):
    earlier, later = (rate(uses, 0, seen, seen + age) for age in sorted(ages))
    assert 0 <= later <= earlier < math.inf


def test_without_parameters_it_is_lru():
    assert CANDIDATES[0] is None
    old, new = History(9, 0, 10), History(1, 11, 11)
    assert return_rate(None, old, 20, 1.0) < return_rate(None, new, 20, 1.0)


def test_mean_gap_is_learnt_from_returns_after_eviction_too():
    manager = BlockManager(11, 4, policy := ReturnRate(10))
    for number in range(3000):  # 30 blocks in turn, so each comes back after 30 others, when it is evicted
        serve(manager, [b"%d" % (number % 30)])
    assert manager.num_evictions == 2990 and policy.mean_gap == pytest.approx(30, rel=0.05)


def test_a_parent_stays_as_long_as_a_child(monkeypatch):
    monkeypatch.setattr(jaxkv.control.return_rate, "CANDIDATES", CANDIDATES[1:2])  # LRU would keep it anyway
    rng = random.Random(3)
    manager = BlockManager(61, 4, ReturnRate(60))
    talks = [[b"root"]]
    for number in range(1500):
        talk = [*rng.choice(talks[-20:])[: rng.randint(1, 11)], b"%d" % number]
        talks.append(talk)
        present = [manager.index.find(block_hash) is not None for block_hash in talk]
        assert present == sorted(present, reverse=True)
        serve(manager, talk)
    manager.check([])
    assert manager.num_evictions > 1000


@settings(max_examples=30, deadline=None)
@given(data=st.data(), num_blocks=st.integers(2, 30))
def test_memory_is_bounded_and_no_block_is_lost(data, num_blocks):
    policy = ReturnRate(num_blocks)
    manager = BlockManager(num_blocks + 1, 4, policy)
    owned = []
    for _ in range(data.draw(st.integers(1, 80))):
        if owned and data.draw(st.booleans()):
            manager.free(owned.pop(data.draw(st.integers(0, len(owned) - 1))))
        else:
            chain = [b"%d-%d" % (data.draw(st.integers(0, 8)), depth) for depth in range(data.draw(st.integers(1, 4)))]
            found = manager.match(chain).blocks
            manager.share(found)
            blocks = [*found, *manager.allocate(min(len(chain) - len(found), manager.num_free), chain[len(found) :])]
            for place in range(len(found), len(blocks)):
                manager.register(blocks[place], chain[place], chain[place - 1] if place else b"")
            owned.append(blocks)
        manager.check(owned)
        assert len(policy._ghosts) <= GHOSTS * num_blocks
    for blocks in owned:
        manager.free(blocks)
    cached = len(policy)
    assert len({policy.evict() for _ in range(cached)}) == cached
    with pytest.raises(KeyError):
        policy.evict()
