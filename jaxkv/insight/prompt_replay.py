"""Prompts through the real prefix sharing and block manager, one at a time: what a pool of this size finds of them.

Each request is admitted, finds what is there, publishes its prompt, then its output where that is known, and lets go of
its blocks: exactly what the scheduler does with one running request. So it is the upper end of what the engine finds:
nothing else runs, and no other request's blocks are in use.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from jaxkv.control.block_manager import BlockManager
from jaxkv.control.eviction_choice import make_eviction_policy
from jaxkv.control.executor import ExecutorLimits
from jaxkv.control.prefix_index import TOKEN_BYTES, BlockHash
from jaxkv.control.request_state import RequestState, new_request_state
from jaxkv.control.scheduler import Scheduler
from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.errors import RequestError
from jaxkv.core.metrics import EngineStats
from jaxkv.core.request import Request, SamplingParams
from jaxkv.insight.packing import unpacked
from jaxkv.insight.prompt_log import LoggedRequest, PromptLog
from jaxkv.simulation.block_replay import serve


@dataclasses.dataclass(frozen=True)
class Pool:
    """The cache to replay through.

    Attributes:
      capacity_blocks: usable blocks; None: enough for everything.
      share_partial: whether the matching head of a block is copied.
    """

    capacity_blocks: int | None = None
    share_partial: bool = True
    eviction_policy: str = "lru"


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """Tokens of one prompt that were found, and by value of MissReason those that were not; empty where unknown."""

    cached: int
    missed: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class PromptReplay:
    """What each request of `log` found; None for one that the pool is too small for, which counts nowhere."""

    log: PromptLog
    served: tuple[Served | None, ...]

    @property
    def hit_rate(self) -> float:
        return self.hit_rate_of(range(len(self.served)))

    @property
    def num_refused(self) -> int:
        return self.served.count(None)

    def hit_rate_of(self, numbers: Iterable[int]) -> float:
        """Share of the prompt tokens of these requests that was found."""
        tokens = cached = 0
        for number in numbers:
            if (one := self.served[number]) is not None:
                tokens += self.log.requests[number].num_tokens
                cached += one.cached
        return cached / tokens if tokens else 0.0


def replay_prompts(log: PromptLog, pool: Pool = Pool()) -> PromptReplay:
    """Replay a log in its order. Logs of block names are replayed in full blocks."""
    return PromptReplay(log, tuple(_replay_tokens(log, pool) if log.has_tokens else _replay_names(log, pool)))


def _replay_tokens(log: PromptLog, pool: Pool) -> list[Served | None]:
    lengths = [len(request.sequence) // TOKEN_BYTES for request in log.requests]
    num_usable = pool.capacity_blocks or sum(-(-length // log.block_size) for length in lengths) + 1
    config = SchedulerConfig(
        share_partial_blocks=pool.share_partial, eviction_policy=pool.eviction_policy, eviction_lookahead=0
    )
    limits = ExecutorLimits(num_usable + 1, log.block_size, 1, 1, 1, max(lengths, default=0) + 2, 1)
    scheduler = Scheduler(limits, config, stats=EngineStats())
    stats = scheduler.stats.prefix_cache
    served: list[Served | None] = []
    for number, request in enumerate(log.requests):
        try:
            state = new_request_state(_engine_request(request), limits, config, number, 0.0)
        except RequestError:
            served.append(None)
            continue
        hit, missed = stats.hit, stats.missed.copy()
        _serve(state, scheduler, unpacked(request.output))
        news = {
            reason.value: count - missed[reason] for reason, count in stats.missed.items() if count > missed[reason]
        }
        served.append(Served(stats.hit - hit, news))
    return served


def _engine_request(request: LoggedRequest) -> Request:
    num_output = len(request.output) // TOKEN_BYTES
    sampling = SamplingParams(max_tokens=max(1, num_output), ignore_eos=True, seed=0)
    tokens = tuple(unpacked(request.prompt))
    return Request(request.request_id, tokens, sampling, cache_salt=request.salt)


def _serve(state: RequestState, scheduler: Scheduler, output: Sequence[int]) -> None:
    sharing, blocks, num_known = scheduler.prefixes, scheduler.blocks, len(state.token_ids)
    num_blocks, hit = -(-num_known // blocks.block_size), sharing.find(state)
    if blocks.num_free_without(hit.used_blocks) < num_blocks - len(hit.blocks):
        hit = hit.without_head()  # as the scheduler does: the block to copy from is the one that is missing
    sharing.take(state, hit, num_blocks)
    sharing.publish(state, num_known, planned=True, with_tail=True)
    sharing.end_admissions()
    state.num_computed = num_known
    if output:
        state.token_ids += output
        state.num_computed += len(output) - 1  # the last one's K/V are never computed
        state.blocks += blocks.allocate(-(-state.num_computed // blocks.block_size) - len(state.blocks))
        sharing.publish(state, state.num_computed, planned=False, with_tail=True)
    blocks.free(state.blocks)


def _replay_names(log: PromptLog, pool: Pool) -> list[Served | None]:
    width = log.symbol_bytes
    num_usable = pool.capacity_blocks or sum(len(request.sequence) // width for request in log.requests) + 1
    blocks = BlockManager(num_usable + 1, log.block_size, make_eviction_policy(pool.eviction_policy, num_usable))
    served: list[Served | None] = []
    for request in log.requests:
        names = request.sequence
        salt = (request.salt or "").encode()
        chain = [BlockHash(salt + names[start : start + width]) for start in range(0, len(names), width)]
        if len(chain) > num_usable:
            served.append(None)
            continue
        found = min(serve(blocks, chain), len(request.prompt) // width)
        served.append(Served(min(found * log.block_size, request.num_tokens - 1)))
    return served
