"""Eviction policies by name."""

from jaxkv.control.eviction import FIFO, LFU, LRU, EvictionPolicy
from jaxkv.control.return_rate import ReturnRate

EVICTION_POLICIES = ("lru", "lfu", "fifo", "fifo_leaves", "return_rate")


def make_eviction_policy(name: str, num_blocks: int) -> EvictionPolicy:
    """An empty policy for a pool of `num_blocks` usable blocks."""
    if name == "lru":
        return LRU()
    if name == "lfu":
        return LFU()
    if name == "fifo":
        return FIFO()
    if name == "fifo_leaves":
        return FIFO(leaves_only=True)
    if name == "return_rate":
        return ReturnRate(num_blocks)
    raise ValueError(f"Expected one of {', '.join(EVICTION_POLICIES)}, got {name!r}")
