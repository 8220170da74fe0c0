"""Order of eviction, one policy at a time, and what all of them must keep."""

import random

import pytest

from jaxkv.control.eviction import FIFO, LFU, LRU
from jaxkv.control.eviction_choice import EVICTION_POLICIES, make_eviction_policy


def fill(policy, blocks, parent=b"root", release=True):
    """Insert a chain of blocks, head first, and release it tail first."""
    for block in blocks:
        policy.insert(block, b"%d" % block, parent)
        parent = b"%d" % block
    if release:
        for block in reversed(blocks):
            policy.release(block)
    return parent


def use(policy, *blocks):
    for block in blocks:
        policy.use(block)
    for block in reversed(blocks):
        policy.release(block)


def drain(policy):
    return [policy.evict() for _ in range(len(policy))]


def test_lru_takes_the_tail_of_what_was_used_longest_ago():
    policy = LRU()
    fill(policy, [1, 2, 3])
    fill(policy, [4, 5])
    use(policy, 1, 2)
    assert drain(policy) == [3, 5, 4, 2, 1]


def test_fifo_goes_by_insertion_whatever_the_use():
    policy = FIFO()
    tail = fill(policy, [1, 2])
    fill(policy, [3])
    use(policy, 1, 2)
    fill(policy, [4], parent=tail)
    assert drain(policy) == [1, 2, 3, 4]  # 1 goes before what hangs on it


def test_fifo_of_leaves_keeps_parents():
    policy = FIFO(leaves_only=True)
    tail = fill(policy, [1, 2])
    fill(policy, [3])
    fill(policy, [4], parent=tail)
    fill(policy, [5], parent=tail)
    assert drain(policy) == [3, 4, 5, 2, 1]


def test_leaves_only_still_evicts_when_all_children_are_in_use():
    policy = FIFO(leaves_only=True)
    tail = fill(policy, [1, 2])
    fill(policy, [3], parent=tail, release=False)
    assert len(policy) == 2 and drain(policy) == [1, 2]
    with pytest.raises(KeyError):
        policy.evict()


def test_lfu_counts_uses_breaks_ties_by_age_and_forgets():
    policy = LFU()
    fill(policy, [1])
    fill(policy, [2])
    fill(policy, [3])
    use(policy, 1)
    use(policy, 2)
    assert policy.evict() == 3
    fill(policy, [3])
    assert drain(policy) == [3, 1, 2]


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_every_policy_holds_exactly_what_is_released(name):
    """Random lives of blocks; the policy must agree with a set, and never give out what is in use."""
    rng = random.Random(5)
    policy = make_eviction_policy(name, 40)
    free, owned, released, hashes = set(range(40)), set(), set(), 0
    parent = {}
    for _ in range(20_000):
        move = rng.random()
        if move < 0.3 and free:
            block = free.pop()
            hashes += 1
            parent[block] = b"%d" % rng.randrange(60)
            policy.insert(block, b"%d" % (hashes % 60) if name == "lru" else b"x%d" % hashes, parent[block])
            owned.add(block)
        elif move < 0.5 and owned:
            block = rng.choice(sorted(owned))
            owned.remove(block)
            policy.release(block)
            released.add(block)
        elif move < 0.75 and owned | released:
            block = rng.choice(sorted(owned | released))
            policy.use(block)
            released.discard(block)
            owned.add(block)
        elif released:
            block = policy.evict()
            released.remove(block)
            free.add(block)
        assert len(policy) == len(released)
    assert {block for block in range(40) if block in policy} == released
    assert sorted(drain(policy)) == sorted(released)
    with pytest.raises(KeyError):
        policy.evict()
