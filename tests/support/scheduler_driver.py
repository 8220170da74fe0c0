"""The control plane against an executor that remembers what every block holds.

`HistoryExecutor` keeps, for each slot, the token, position and cache salt whose K/V were written there, and asserts at
every attention that a row sees exactly its own history. Tokens are a function of the whole history, so outputs must
equal a naive full recompute whatever the chunking, C, sharing, preemption, order or number of steps in flight.
"""

import collections
import dataclasses
import itertools

from jaxkv.control.cascade_cost import ALWAYS
from jaxkv.control.eviction_choice import EVICTION_POLICIES
from jaxkv.control.executor import ExecutorLimits
from jaxkv.control.scheduler import Scheduler
from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.errors import RequestError
from jaxkv.core.metrics import MissReason
from jaxkv.core.request import FinishReason, Request, SamplingParams
from tests.support.constraints import constraint_for
from tests.support.history_executor import VOCAB, HistoryExecutor, naive_generate


class Driver:
    """Scheduler, executor and the steps in flight between them; checks every invariant after every move."""

    def __init__(self, limits: ExecutorLimits, config: SchedulerConfig, depth: int):
        self.limits, self.depth = limits, depth
        self.scheduler = Scheduler(limits, config)
        self.executor = HistoryExecutor(limits, self.scheduler.retention)
        self.in_flight = collections.deque()
        self.expected, self.inherited, self.got, self.reasons, self.plans = {}, {}, {}, {}, []
        self.numbers = itertools.count()
        self.pinned = set()
        self.num_forks = 0

    def add(self, prompt, sampling, **fields):
        request_id = f"r{next(self.numbers)}"
        request = Request(request_id, tuple(prompt), sampling, constraint=constraint_for(sampling, VOCAB), **fields)
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
        output, reason = naive_generate(request, seed, self.limits, inherited, self.scheduler.retention)
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
            self.check_prompt_logprobs(output)
            self.got[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                self.reasons[output.request_id] = output.finish_reason
                if output.finish_reason is FinishReason.STOP and output.token_ids:
                    assert output.stop_token_id == output.token_ids[-1]

    def check_prompt_logprobs(self, output):
        """They come whole, with the first tokens and never again; the executor gives each its position as rank."""
        request, _ = self.executor.requests[output.request_id]
        wanted = request.sampling.prompt_logprobs is not None
        assert (output.prompt_logprobs is not None) == (
            wanted and bool(output.token_ids) and not self.got[output.request_id]
        )
        if output.prompt_logprobs is not None:
            first, *rest = output.prompt_logprobs
            expected = list(enumerate(request.prompt_token_ids))[1:]
            assert first is None and [(entry.rank, entry.token_id) for entry in rest] == expected

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

    def reset_prefix_cache(self, preempt_running):
        """The executor asserts at every later attention that nothing is found whose K/V is gone."""
        self.scheduler.reset_prefix_cache(preempt_running)
        assert self.scheduler.blocks.num_cached == 0
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


def random_sampling(rng, room):
    """`room`: tokens that fit after the prompt at least."""
    max_tokens = rng.choice([None, 1, 2, 3, 5, 9, 17])
    return SamplingParams(
        max_tokens=max_tokens,
        seed=rng.choice([None, 0, 1]),
        stop_token_ids=tuple(rng.sample(range(VOCAB), rng.choice([0, 0, 1]))),
        min_tokens=min(rng.choice([0, 0, 2, 6]), room, max_tokens or room),
        prompt_logprobs=rng.choice([None, None, None, 1]),
        **random_token_limits(rng),
    )


def random_token_limits(rng):
    kind = rng.choice(["any", "any", "any", "each token", "fixed"])
    if kind == "each token":
        return {"bad_words": ("some",)}
    return {"allowed_token_ids": tuple(rng.sample(range(VOCAB), rng.randint(1, 3)))} if kind == "fixed" else {}


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
        max_prefix_groups=rng.randint(0, 2),
    )
    config = SchedulerConfig(
        policy=rng.choice(["fcfs", "priority"]),
        decode_steps=rng.choice([0, 0, limits.max_decode_steps]),
        enable_prefix_caching=rng.random() < 0.8,
        share_partial_blocks=rng.random() < 0.8,
        eviction_policy=rng.choice(EVICTION_POLICIES),
        ghost_blocks=rng.choice([None, 0, 2]),
        max_pinned_blocks=pinned,
        cascade=rng.choice([None, ALWAYS]),
        seed=rng.randrange(100),
    )
    return limits, config, rng.choice([1, 2, 2, 3])


def with_windows(limits, config, rng):
    """The same with windows, and a pool that need not hold a request of full length."""
    config = dataclasses.replace(config, window_sizes=(rng.randint(1, 12), 1), num_sinks=rng.choice([0, 0, 1, 3]))
    least = config.retention(limits).max_blocks + config.max_pinned_blocks
    num_blocks = min(limits.num_blocks, 1 + least + rng.choice([0, 1, 3]))
    return dataclasses.replace(limits, num_blocks=num_blocks), config


def fork_random(driver, rng):
    parent_id = rng.choice(driver.scheduler.live_ids)
    parent = driver.executor.requests[parent_id][0]
    limited = parent.sampling if rng.random() < 0.5 else SamplingParams()
    room = driver.limits.max_model_len - len(parent.prompt_token_ids)
    sampling = dataclasses.replace(
        random_sampling(rng, room), prompt_logprobs=None,
        allowed_token_ids=limited.allowed_token_ids, bad_words=limited.bad_words,
    )  # fmt: skip
    return driver.fork(parent_id, sampling)


def add_random(driver, rng):
    prompt = random_prompt(rng, driver.limits.max_model_len - 4)
    salt = rng.choice([None, None, None, "a"])
    sampling = random_sampling(rng, driver.limits.max_model_len - len(prompt))
    return driver.add(prompt, sampling, cache_salt=salt, priority=rng.randint(0, 2))
