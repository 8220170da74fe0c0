"""The control plane against an executor that remembers what every block holds.

`HistoryExecutor` keeps, for each slot, the token, position and cache salt whose K/V were written there, and asserts at
every attention that a row sees exactly its own history. Tokens are a function of the whole history, so outputs must
equal a naive full recompute whatever the chunking, C, sharing, preemption, order or number of steps in flight.
"""

import collections
import dataclasses
import itertools
import random

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jaxkv.control.eviction_choice import EVICTION_POLICIES
from jaxkv.control.executor import ExecutorLimits
from jaxkv.control.prefix_index import hash_blocks
from jaxkv.control.prefix_sharing import PrefixHit, PrefixSharing
from jaxkv.control.scheduler import Scheduler
from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.errors import RequestError
from jaxkv.core.metrics import MissReason
from jaxkv.core.request import FinishReason, Request, SamplingParams
from tests.support.history_executor import VOCAB, HistoryExecutor, naive_generate


class Driver:
    """Scheduler, executor and the steps in flight between them; checks every invariant after every move."""

    def __init__(self, limits: ExecutorLimits, config: SchedulerConfig, depth: int):
        self.limits, self.depth = limits, depth
        self.scheduler = Scheduler(limits, config)
        self.executor = HistoryExecutor(limits)
        self.in_flight = collections.deque()
        self.expected, self.inherited, self.got, self.reasons, self.plans = {}, {}, {}, {}, []
        self.numbers = itertools.count()
        self.pinned = set()
        self.num_forks = 0

    def add(self, prompt, sampling, **fields):
        request_id = f"r{next(self.numbers)}"
        request = Request(request_id, tuple(prompt), sampling, **fields)
        self.scheduler.add(request)
        self.expect(request)
        return request_id

    def fork(self, parent_id, sampling):
        """False when the parent's output is as long already as the fork's may become."""
        request_id = f"r{next(self.numbers)}"
        parent, known = self.executor.requests[parent_id][0], self.inherited[parent_id] + self.got[parent_id]
        try:
            assert self.scheduler.fork(parent_id, request_id, sampling) == known
        except RequestError as error:
            assert error.param == "max_tokens" and sampling.max_tokens <= len(known)
            return False
        self.expect(dataclasses.replace(parent, request_id=request_id, sampling=sampling), known)
        self.num_forks += 1
        self.scheduler.check()
        return True

    def expect(self, request, inherited=()):
        request_id = request.request_id
        seed = next(s.sampling.seed for s in self.scheduler.waiting if s.request_id == request_id)
        output, reason = naive_generate(request, seed, self.limits, inherited)
        self.inherited[request_id] = inherited
        self.expected[request_id] = (output[len(inherited) :], reason)
        self.executor.requests[request_id] = (request, request.prompt_token_ids + output)
        self.got[request_id] = ()

    def submit(self):
        if len(self.in_flight) == self.depth:
            return None
        plan = self.scheduler.schedule()
        if plan is not None:
            self.plans.append(plan)
            self.in_flight.append(self.executor.submit(plan))
        self.scheduler.check()
        return plan

    def read(self):
        if self.in_flight:
            self.take(self.scheduler.update(self.in_flight.popleft()))
            self.scheduler.check()

    def take(self, outputs):
        for output in outputs:
            assert output.request_id not in self.reasons, "news after the end"
            self.got[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                self.reasons[output.request_id] = output.finish_reason
                if output.finish_reason is FinishReason.STOP and output.token_ids:
                    assert output.stop_token_id == output.token_ids[-1]

    def check_counters(self):
        stats = self.scheduler.stats
        cache = stats.prefix_cache
        assert cache.hit + cache.num_missed == cache.queried and min(cache.missed.values()) >= 0
        assert cache.hit == stats.cached_tokens
        if self.scheduler.config.enable_prefix_caching:
            assert cache.queried - cache.missed[MissReason.RECOMPUTED] == stats.prompt_tokens
        elif not self.num_forks:
            assert cache.queried == 0
        if not self.scheduler.config.share_partial_blocks and not self.num_forks:
            assert cache.hit_partial_block == 0

    def end(self, request_id, reason):
        self.take([self.scheduler.finish(request_id, reason)])
        self.scheduler.check()

    def preempt(self, request_id):
        self.scheduler.preempt(request_id)
        self.scheduler.check()

    def turn_pin(self, salt):
        """Pin a salt, or unpin it."""
        pins = self.scheduler.prefixes.pins
        if salt in self.pinned:
            pins.unpin_salt(salt)
        else:
            pins.pin_salt(salt)
        self.pinned ^= {salt}
        assert pins.num_blocks <= self.scheduler.config.max_pinned_blocks
        self.scheduler.check()

    def drain(self):
        """Run to the end and compare all outputs. Every move is progress: a fixed bound suffices."""
        for _ in range(5000):
            if not self.scheduler.has_requests and not self.in_flight:
                break
            plan = self.submit()
            assert plan is not None or self.in_flight, "stuck: requests wait and nothing runs"
            if plan is None or len(self.in_flight) == self.depth:
                self.read()
            self.check_counters()
        assert not self.scheduler.has_requests and not self.in_flight, "did not finish"
        assert set(self.reasons) == set(self.expected)
        for request_id, (tokens, reason) in self.expected.items():
            if self.reasons[request_id] is FinishReason.ABORT:
                got = self.got[request_id]
                assert got == tokens[: len(got)]
            else:
                assert (self.got[request_id], self.reasons[request_id]) == (tokens, reason)
        for salt in tuple(self.pinned):
            self.turn_pin(salt)
        blocks = self.scheduler.blocks
        assert blocks.num_free == blocks.num_usable, "blocks are still owned though nothing runs"


def random_prompt(rng, longest):
    """Few distinct beginnings, so that prefixes are shared often, partly and across block boundaries."""
    head = [(i * 3 + rng.randrange(2) * (i > 6)) % VOCAB for i in range(rng.randint(1, longest))]
    return head[: rng.randint(1, len(head))] + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 2))]


def random_sampling(rng):
    return SamplingParams(
        max_tokens=rng.choice([None, 1, 2, 3, 5, 9, 17]),
        seed=rng.choice([None, 0, 1]),
        stop_token_ids=tuple(rng.sample(range(VOCAB), rng.choice([0, 0, 1]))),
        min_tokens=rng.choice([0, 0, 2, 6]),
    )


def random_setup(rng):
    block_size, rows = rng.choice([1, 2, 4]), rng.randint(1, 4)
    max_model_len = rng.randint(12, 40)
    # At least one request of the longest kind must fit: what can't is refused, which other tests cover.
    pinned = rng.choice([0, 0, 3])
    num_blocks = 1 + -(-max_model_len // block_size) + rng.choice([0, 1, 3, 10]) + pinned
    limits = ExecutorLimits(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=rows,
        max_num_batched_tokens=rows + rng.choice([0, 1, 3, 8, 40]),
        max_prefill_seqs=rng.randint(1, 3),
        max_model_len=max_model_len,
        max_decode_steps=rng.choice([1, 2, 8]),
    )
    config = SchedulerConfig(
        policy=rng.choice(["fcfs", "priority"]),
        decode_steps=rng.choice([0, 0, limits.max_decode_steps]),
        enable_prefix_caching=rng.random() < 0.8,
        share_partial_blocks=rng.random() < 0.8,
        eviction_policy=rng.choice(EVICTION_POLICIES),
        ghost_blocks=rng.choice([None, 0, 2]),
        max_pinned_blocks=pinned,
        seed=rng.randrange(100),
    )
    return limits, config, rng.choice([1, 2, 2, 3])


def fork_random(driver, rng):
    return driver.fork(rng.choice(driver.scheduler.live_ids), random_sampling(rng))


def add_random(driver, rng):
    prompt = random_prompt(rng, driver.limits.max_model_len - 4)
    salt = rng.choice([None, None, None, "a"])
    return driver.add(prompt, random_sampling(rng), cache_salt=salt, priority=rng.randint(0, 2))


class EngineMachine(RuleBasedStateMachine):
    """Any order of adds, forks, submits, reads, ends, pins and preemptions. Extending, finishing and evicting are what
    submits and reads do in the small pools of `random_setup`."""

    num_steps = num_forks = num_evictions = 0

    @initialize(rng=st.randoms(use_true_random=False))
    def set_up(self, rng):
        self.rng = rng
        self.driver = Driver(*random_setup(random.Random(rng.getrandbits(32))))

    @rule(seed=st.integers(0, 2**32 - 1))
    def add(self, seed):
        add_random(self.driver, random.Random(seed))

    @precondition(lambda self: self.driver.scheduler.has_requests)
    @rule(seed=st.integers(0, 2**32 - 1))
    def fork(self, seed):
        type(self).num_forks += fork_random(self.driver, random.Random(seed))

    @rule()
    def submit(self):
        self.driver.submit()

    @rule()
    def read(self):
        self.driver.read()

    @rule()
    def submit_and_read(self):
        self.driver.submit()
        self.driver.read()

    @precondition(lambda self: self.driver.scheduler.has_requests)
    @rule(data=st.data())
    def abort(self, data):
        self.driver.end(data.draw(st.sampled_from(self.driver.scheduler.live_ids)), FinishReason.ABORT)

    @precondition(lambda self: self.driver.scheduler.running)
    @rule(data=st.data())
    def preempt(self, data):
        self.driver.preempt(data.draw(st.sampled_from(self.driver.scheduler.running)).request_id)

    @rule(salt=st.sampled_from([None, "a"]))
    def turn_pin(self, salt):
        self.driver.turn_pin(salt)

    @invariant()
    def count(self):
        type(self).num_steps += 1

    def teardown(self):
        if hasattr(self, "driver"):
            self.driver.drain()
            type(self).num_evictions += self.driver.scheduler.blocks.num_evictions


def test_any_order_of_operations_is_exact():
    EngineMachine.num_steps = EngineMachine.num_forks = EngineMachine.num_evictions = 0
    run_state_machine_as_test(
        EngineMachine,
        settings=hypothesis.settings(
            max_examples=260,
            stateful_step_count=60,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        ),
    )
    assert EngineMachine.num_steps >= 10_000  # rules that ran, each with all invariants checked after it
    assert EngineMachine.num_forks >= 500 and EngineMachine.num_evictions >= 500


def test_long_random_runs_are_exact():
    """Fewer surprises than hypothesis finds, but deep queues and thousands of steps on one pool."""
    forced = preemptions = shared = 0
    cached_by, missed = [0, 0], dict.fromkeys(MissReason, 0)
    forks = 0
    for seed in range(80):
        rng = random.Random(seed)
        driver = Driver(*random_setup(rng))
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
        cache = driver.scheduler.stats.prefix_cache
        cached_by[0] += cache.hit_full_block
        cached_by[1] += cache.hit_partial_block
        for reason, count in cache.missed.items():
            missed[reason] += count
    # Else the runs did not exercise what they are for.
    assert forks > 200
    assert preemptions - forced > 100 and shared > 1000 and min(cached_by) > 300
    assert {reason for reason, count in missed.items() if count > 10} == set(MissReason) - {MissReason.NEEDS_LOGITS}


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


class BrokenScheduler(Scheduler):
    """Mutants: each must be caught, or the oracle above proves nothing."""

    mutation = ""

    def add(self, request, now=0.0):
        super().add(dataclasses.replace(request, cache_salt=None) if self.mutation == "ignore_salt" else request, now)

    def schedule(self, now=0.0):
        plan = super().schedule(now)
        if plan is not None and self.mutation == "forget_copies":
            plan = dataclasses.replace(plan, block_copies=())
        if plan is not None and self.mutation == "copy_too_little":
            copies = tuple(dataclasses.replace(copy, num_tokens=copy.num_tokens - 1) for copy in plan.block_copies)
            plan = dataclasses.replace(plan, block_copies=tuple(copy for copy in copies if copy.num_tokens))
        return plan

    def _is_early(self, state):
        return self.mutation != "fork_too_early" and super()._is_early(state)

    def _admissible_hit(self, state, num_early):
        hit = super()._admissible_hit(state, num_early)
        if self.mutation == "fork_writes_to_shared_block" and hit is not None and state.parent and hit.source:
            hit = dataclasses.replace(hit, blocks=hit.used_blocks, source=None)
        if self.mutation == "fork_shares_last_token" and hit is not None and state.parent and hit.source:
            hit = dataclasses.replace(hit, num_head_tokens=hit.num_head_tokens + 1)
        if self.mutation == "share_any_block" and self.running and hit == PrefixHit():
            hit = PrefixHit((self.running[0].blocks[0],), self.limits.block_size)
        return hit

    def _release(self, state):
        if self.mutation == "free_twice" and len(state.blocks) > 1:
            self.blocks.free(state.blocks[-1:])
        super()._release(state)

    def _upload_blocks(self, state):
        update = super()._upload_blocks(state)
        return update._replace(blocks=()) if self.mutation == "forget_table_updates" else update


def hash_blocks_without_parent(parent, token_ids, block_size):
    starts = range(0, len(token_ids) - block_size + 1, block_size)
    return [hash_blocks(parent, token_ids[start : start + block_size], block_size)[0] for start in starts]


@pytest.mark.parametrize(
    "mutation",
    [
        "",
        "ignore_salt",
        "share_any_block",
        "free_twice",
        "forget_table_updates",
        "hash_without_parent",
        "forget_copies",
        "copy_too_little",
        "copy_in_same_plan",
        "fork_too_early",
        "fork_writes_to_shared_block",
        "fork_shares_last_token",
    ],
)
def test_oracle_catches_mutants(mutation, monkeypatch):
    limits = ExecutorLimits(40, 4, 4, 30, 3, 40, 8)
    driver = Driver(limits, SchedulerConfig(seed=3), 2)
    driver.scheduler = BrokenScheduler(limits, SchedulerConfig(seed=3))
    driver.scheduler.mutation = mutation
    if mutation == "hash_without_parent":
        monkeypatch.setattr("jaxkv.control.request_state.hash_blocks", hash_blocks_without_parent)
    if mutation == "copy_in_same_plan":
        publish = PrefixSharing.publish
        monkeypatch.setattr(PrefixSharing, "publish", lambda self, *args, planned: publish(self, *args, planned=False))

    def run():
        rng = random.Random(1)
        for index in range(40):
            prompt = [rng.randrange(2) for _ in range(rng.randint(5, 12))]
            parent = driver.add(prompt, SamplingParams(max_tokens=12), cache_salt="ab"[index % 2])
            if index % 8 == 0:
                driver.fork(parent, SamplingParams(max_tokens=12))
            if index % 3 == 0:
                driver.submit()
                driver.read()
        driver.drain()

    if mutation:
        with pytest.raises((AssertionError, KeyError)):
            run()
    else:
        run()
