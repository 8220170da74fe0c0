"""Long random runs and the product of settings: tokens are those of a naive recompute (see scheduler_driver.py)."""

import random

import pytest

from jaxkv.control.executor import ExecutorLimits
from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.metrics import MissReason
from jaxkv.core.request import FinishReason, SamplingParams
from tests.support.history_executor import VOCAB
from tests.support.scheduler_driver import Driver, add_random, fork_random, random_setup, with_windows


@pytest.mark.parametrize("windowed", [False, True])
def test_long_random_runs_are_exact(windowed):
    """Fewer surprises than hypothesis finds, but deep queues and thousands of steps on one pool."""
    forced = preemptions = shared = 0
    cached_by, missed = [0, 0], dict.fromkeys(MissReason, 0)
    forks = cascade_rows = 0
    for seed in range(80):
        rng = random.Random(seed)
        limits, config, depth = random_setup(rng)
        if windowed:
            limits, config = with_windows(limits, config, rng)
        driver = Driver(limits, config, depth)
        for _ in range(150):
            move = rng.random()
            if move < 0.15 and len(driver.expected) < 40:
                add_random(driver, rng)
            elif move < 0.2 and driver.scheduler.has_requests and len(driver.expected) < 40:
                forks += fork_random(driver, rng)
            elif move < 0.22 and driver.scheduler.has_requests:
                driver.end(rng.choice(driver.scheduler.live_ids), FinishReason.ABORT)
            elif move < 0.24 and driver.scheduler.running:
                driver.preempt(rng.choice(driver.scheduler.running).request_id)
                forced += 1
            elif move < 0.25:
                driver.turn_pin(rng.choice([None, "a"]))
            elif move < 0.63:
                driver.submit()
            else:
                driver.read()
        driver.drain()
        preemptions += driver.scheduler.stats.preemptions
        shared += driver.scheduler.stats.cached_tokens
        cascade_rows += driver.scheduler.stats.cascade_rows
        cache = driver.scheduler.stats.prefix_cache
        cached_by[0] += cache.hit_full_block
        cached_by[1] += cache.hit_partial_block
        for reason, count in cache.missed.items():
            missed[reason] += count
    # Else the runs did not exercise what they are for.
    assert forks > 200 and (cascade_rows == 0 if windowed else cascade_rows > 200)
    assert preemptions - forced > (50 if windowed else 100) and shared > 1000 and min(cached_by) > 300
    assert {reason for reason, count in missed.items() if count > 10} == set(MissReason)


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("budget", [4, 7, 64])
@pytest.mark.parametrize("steps", [1, 2, 8])
def test_same_tokens_in_every_setting(caching, depth, budget, steps):
    """One workload, the product of chunk size x C x in flight x caching, with a pool too small for all."""
    limits = ExecutorLimits(16, 4, 4, budget, 2, 40, 8)
    driver = Driver(limits, SchedulerConfig(decode_steps=steps, enable_prefix_caching=caching, seed=3), depth)
    rng = random.Random(7)
    shared = [rng.randrange(VOCAB) for _ in range(13)]
    for index in range(10):
        own = [rng.randrange(VOCAB) for _ in range(index % 4)]
        parent = driver.add(shared[: 13 - index % 3] + own, SamplingParams(max_tokens=6 + 2 * (index % 5)))
        if index % 3 == 0:
            driver.fork(parent, SamplingParams(max_tokens=6 + 2 * (index % 5)))
    driver.drain()
    assert driver.scheduler.stats.num_finished[FinishReason.LENGTH] == 14
    assert driver.scheduler.stats.generated_tokens == sum((1 + (i % 3 == 0)) * (6 + 2 * (i % 5)) for i in range(10))
    assert driver.scheduler.stats.cached_tokens > (100 if caching else 10)


def test_a_tail_in_the_sinks_keeps_its_name_while_what_follows_goes():
    """A prompt of one token is findable as a tail in the sinks' block, which stays when the blocks behind it go, and gets a
    full block's name later: so many steps in flight that its next token is not known yet."""
    limits = ExecutorLimits(16, 2, 2, 8, 2, 40, 1)
    driver = Driver(limits, SchedulerConfig(decode_steps=1, window_sizes=(1,), num_sinks=1), depth=5)
    for _ in range(2):
        driver.add([1], SamplingParams(max_tokens=30))
        driver.drain()
    assert driver.scheduler.stats.num_finished[FinishReason.LENGTH] == 2
