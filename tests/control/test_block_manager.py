"""Free, cached and owned blocks, sharing and eviction order."""

import pytest

from jaxkv.control.block_manager import NULL_BLOCK, BlockManager
from jaxkv.control.eviction_choice import EVICTION_POLICIES, make_eviction_policy
from jaxkv.control.prefix_index import hash_blocks, root_hash

ROOT = root_hash(b"model", None)


def hashes(count, first_token=0, block_size=4):
    return hash_blocks(ROOT, range(first_token, first_token + count * block_size), block_size)


def publish(manager, blocks, block_hashes):
    for block, block_hash in zip(blocks, block_hashes, strict=True):
        assert manager.register(block, block_hash, ROOT)


def test_hands_out_every_block_once_and_never_the_null_block():
    manager = BlockManager(8, 4)
    blocks = manager.allocate(7)
    assert sorted(blocks) == list(range(1, 8)) and NULL_BLOCK not in blocks
    assert manager.num_free == 0
    manager.check([blocks])
    with pytest.raises(AssertionError, match="asked for 1 blocks, 0 are free"):
        manager.allocate(1)
    manager.free(blocks)
    assert manager.num_free == manager.num_usable == 7
    manager.check([])


def test_blocks_without_hash_are_reused_before_cached_ones():
    manager = BlockManager(6, 4)
    cached, plain = manager.allocate(2), manager.allocate(2)
    publish(manager, cached, hashes(2))
    manager.free(cached)
    manager.free(plain)
    manager.check([])
    assert (manager.num_cached, manager.num_free) == (2, 5)
    taken = manager.allocate(3)
    assert not set(taken) & set(cached)
    assert manager.match(hashes(2)).blocks == tuple(cached)
    manager.check([taken])


def test_eviction_takes_the_tail_of_the_least_recently_used():
    manager = BlockManager(7, 4)
    old, new = manager.allocate(3), manager.allocate(3)
    publish(manager, old, hashes(3))
    publish(manager, new, hashes(3, first_token=100))
    manager.free(old)
    manager.free(new)
    # Each eviction shortens the older prefix by its tail; the newer one is untouched until the older is gone.
    for left in (2, 1, 0):
        assert manager.allocate(1) == [old[left]]
        assert manager.match(hashes(3)).num_tokens == left * 4
        assert manager.match(hashes(3, first_token=100)).num_tokens == 12
    assert manager.allocate(3) == new[::-1]
    assert manager.match(hashes(3, first_token=100)).blocks == ()


def test_a_hit_refreshes_the_whole_prefix():
    manager = BlockManager(5, 4)
    first, second = manager.allocate(2), manager.allocate(2)
    publish(manager, first, hashes(2))
    publish(manager, second, hashes(2, first_token=100))
    manager.free(first)
    manager.free(second)
    manager.share(first)
    manager.check([first])
    assert manager.num_free == 2
    manager.free(first)
    assert manager.allocate(2) == second[::-1]
    assert manager.match(hashes(2)).blocks == tuple(first)


def test_shared_blocks_stay_owned_until_the_last_release():
    manager = BlockManager(6, 4)
    mine = manager.allocate(3)
    publish(manager, mine[:2], hashes(2))
    match = manager.match(hashes(5))
    assert (match.blocks, match.num_tokens) == (tuple(mine[:2]), 8)
    assert manager.num_free_without(match.blocks) == manager.num_free == 2
    manager.share(match.blocks)
    yours = [*match.blocks, *manager.allocate(1)]
    manager.check([mine, yours])
    assert [manager.ref_count(block) for block in mine] == [2, 2, 1]
    assert manager.num_exclusive(mine) == manager.num_exclusive(yours) == 1
    manager.free(mine)
    manager.check([yours])
    assert manager.num_cached == 0  # mine[2] had no hash, the others are still yours
    manager.free(yours)
    manager.check([])
    assert manager.num_cached == 2
    assert manager.num_free_without(match.blocks) == 3


def test_a_stranded_block_is_handed_out_for_its_own_place():
    manager = BlockManager(6, 4)
    chain = manager.allocate(3)
    publish(manager, chain, hashes(3))
    manager.free(chain[:1])  # as a policy that takes parents first would have it
    assert manager.allocate(3)[-1] == chain[0] and manager.num_evictions == 1
    manager.free(chain[1:])
    assert manager.match(hashes(3)).blocks == () and manager.num_free == 2
    with pytest.raises(AssertionError, match="asked for 3 blocks"):
        manager.allocate(3, hashes(3))
    assert manager.allocate(2, hashes(3)[1:]) == chain[1:]
    assert not manager.register(chain[1], hashes(3)[1], hashes(3)[0])  # it still is
    assert manager.num_evictions == 1 and manager.num_cached == 0


def test_second_block_with_equal_content_stays_private():
    manager = BlockManager(4, 4)
    first, second = manager.allocate(1), manager.allocate(1)
    assert manager.register(first[0], hashes(1)[0], ROOT)
    assert not manager.register(second[0], hashes(1)[0], ROOT)
    assert manager.match(hashes(1)).blocks == tuple(first)
    manager.free(second)
    assert manager.num_cached == 0
    manager.check([first])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda manager, blocks: manager.free(blocks + blocks), "freed more often"),
        (lambda manager, blocks: manager.register(blocks[0] + 1, hashes(1)[0], ROOT), "not owned"),
        (lambda manager, blocks: publish(manager, [blocks[0]] * 2, hashes(2)), "already indexed"),
    ],
)
def test_misuse_is_caught_at_once(damage, message):
    manager = BlockManager(6, 4)
    with pytest.raises(AssertionError, match=message):
        damage(manager, manager.allocate(1))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda manager: manager._free.pop(), "leaked"),
        (lambda manager: manager._free.append(manager._free[-1]), "twice"),
        (lambda manager: manager._free.append(NULL_BLOCK), "null block"),
        (lambda manager: manager._free.append(1), "two places"),
        (lambda manager: manager.share([1]), "reference counts"),
        (lambda manager: manager._index.remove(2), "cannot be found"),
    ],
)
def test_check_finds_corruption(damage, message):
    manager = BlockManager(6, 4)
    owned, cached = manager.allocate(1), manager.allocate(1)
    manager.register(cached[0], hashes(1)[0], ROOT)
    manager.free(cached)
    manager.check([owned])
    damage(manager)
    with pytest.raises(AssertionError, match=message):
        manager.check([owned])


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_dropping_the_cache_leaves_owned_blocks_alone(policy):
    manager = BlockManager(10, 4, make_eviction_policy(policy, 9))
    gone, kept = manager.allocate(4), manager.allocate(3)
    for blocks, first_token in ((gone, 0), (kept, 100)):
        parent = ROOT
        for block, block_hash in zip(blocks, hashes(len(blocks), first_token), strict=True):
            assert manager.register(block, block_hash, parent)
            parent = block_hash
    manager.free(gone)
    (evicted,) = [manager.allocate(3)[-1]]  # two free blocks, and one that was cached
    assert manager.num_evictions == 1
    ghost = next(h for h in hashes(4) if manager.was_evicted(h))
    manager.drop_cached()
    assert (manager.num_cached, manager.num_free) == (0, 3) and not manager.was_evicted(ghost)
    assert manager.match(hashes(4)).blocks == () and manager.match(hashes(3, 100)).blocks == tuple(kept)
    assert manager.num_evictions == 1 and evicted in gone
    manager.check()
    manager.free(kept)  # they are cached again, as nobody dropped them
    assert manager.num_cached == 3
    manager.drop_cached()
    manager.check()
    assert manager.num_free == 6 and sorted(manager.allocate(6)) == sorted({*gone, *kept} - {evicted})
