"""Hit rates of a trace through the real engine, one request at a time, comparable to the block: no queue, no output.

`block_replay` has the block manager alone; here scheduler, prefix sharing and block manager run as they serve. Each
prompt is its blocks and one token more: an engine computes at least the last token, and one output token whose K/V is
never written. So a prompt's blocks are all looked up and all left in the cache, and the pool is

    capacity + 1 block for that token (a tail, private, free again when the request ends) + the null block

Only whole blocks are shared. An engine refuses a prompt that is longer than its pool; it is cut to what the pool holds, so
that this much of it is found and cached, and all of it counted.
"""

from collections.abc import Callable

from jaxkv.control.engine import Engine
from jaxkv.control.eviction_choice import EVICTION_POLICIES
from jaxkv.control.executor import ExecutorLimits
from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.clock import SimulatedClock
from jaxkv.core.errors import ConfigError
from jaxkv.core.metrics import EngineStats
from jaxkv.core.request import Request, SamplingParams
from jaxkv.core.unseen_tokens import UnseenTokens
from jaxkv.simulation.block_replay import BlockReplayReport
from jaxkv.simulation.cost_model import ConstantCostModel
from jaxkv.simulation.garbage import no_garbage_collection
from jaxkv.simulation.sim_executor import SimExecutor
from jaxkv.simulation.trace_requests import block_names, check_block_size
from jaxkv.simulation.traces import Trace

_ONE_TOKEN = SamplingParams(max_tokens=1, ignore_eos=True)
_TOLD_AT_ONCE = 200


def replay_serially(
    trace: Trace,
    policy: str = "lru",
    capacity_blocks: int | None = None,
    *,
    block_size: int | None = None,
    full_blocks_only: bool = True,
    on_ended: Callable[[int], None] = lambda count: None,
) -> BlockReplayReport:
    """Replay a trace that has block ids, in its order.

    Args:
      policy: a name of `EVICTION_POLICIES`.
      capacity_blocks: full blocks in the pool; None holds all.
      block_size: of the engine; None is the trace's.
      full_blocks_only: leave out the last id of prompts that end within a block; otherwise it counts as a full one.

    Raises ConfigError.
    """
    if policy not in EVICTION_POLICIES:
        raise ConfigError(f"policy is {policy!r}; choose one of {', '.join(EVICTION_POLICIES)}")
    if trace.block_size is None:
        raise ConfigError(f"{trace.name} has no hash_ids, so nothing is known of shared prefixes: choose another trace")
    block_size = trace.block_size if block_size is None else block_size
    check_block_size(trace, block_size)
    names = [block_names(trace, row, block_size, full_blocks_only) for row in trace.requests]
    total_blocks = sum(map(len, names))
    if capacity_blocks is None:
        capacity = total_blocks
    elif capacity_blocks < 1:
        raise ConfigError(f"capacity_blocks is {capacity_blocks}; it must be at least 1, or unset for an endless cache")
    else:
        capacity = capacity_blocks
        names = [chain if len(chain) <= capacity else chain[:capacity] for chain in names]
    longest = max(map(len, names))
    max_model_len = longest * block_size + 2
    limits = ExecutorLimits(
        num_blocks=capacity + 2,
        block_size=block_size,
        max_num_seqs=1,
        max_num_batched_tokens=max_model_len,
        max_prefill_seqs=1,
        max_model_len=max_model_len,
        max_decode_steps=1,
    )
    config = SchedulerConfig(eviction_policy=policy, share_partial_blocks=False, unseen_tokens=True)
    clock = SimulatedClock()
    stats = EngineStats(window=1)
    engine = Engine(SimExecutor(limits, ConstantCostModel(), clock), config, clock=clock, stats=stats)
    hit_blocks = hit_tokens = 0
    with no_garbage_collection():
        for number, (row, chain) in enumerate(zip(trace.requests, names, strict=True)):
            tokens = UnseenTokens(len(chain) * block_size + 1)
            engine.add(Request(str(number), tokens, _ONE_TOKEN, None, 0, row.salt, block_names=chain))
            while engine.has_work():
                engine.step()
            if engine.failed is not None:
                raise RuntimeError(f"the replay broke the engine: {engine.failed}")
            num_cached = stats.requests[-1].num_cached_tokens
            hit_blocks += num_cached // block_size
            hit_tokens += min(num_cached, row.input_length)
            if number % _TOLD_AT_ONCE == 0:
                on_ended(number)
    on_ended(len(names))
    return BlockReplayReport.of(
        trace,
        policy=policy,
        hit_blocks=hit_blocks,
        total_blocks=total_blocks,
        hit_tokens=hit_tokens,
        total_tokens=sum(row.input_length for row in trace.requests),
        block=block_size,
        full_blocks_only=full_blocks_only,
        capacity_blocks=capacity_blocks,
        evictions=engine.scheduler.blocks.num_evictions,
    )
