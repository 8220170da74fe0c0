"""The scheduler's own settings."""

import dataclasses
from typing import Literal

from jaxkv.control.cascade_cost import CascadeCost
from jaxkv.control.eviction_choice import EVICTION_POLICIES
from jaxkv.control.executor import ExecutorLimits
from jaxkv.core.errors import ConfigError
from jaxkv.core.retention import Retention, retention_of


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """The scheduler's part of `EngineConfig`, and what it must know of the model.

    Attributes:
      policy: order of waiting requests: arrival, or priority (lower first) and then arrival.
      decode_steps: fixes C; 0 adapts it.
      share_partial_blocks: where a prompt agrees with the head of a cached block only, copy that head.
      ghost_blocks: most evicted blocks remembered, to tell evicted from first seen; None is the size of the pool.
      max_pinned_blocks: most blocks that pinned prefixes may keep; no request may need more than the pool less these.
      eviction_policy: a name of `EVICTION_POLICIES`.
      eviction_lookahead: so many requests at the head of the queue keep cached blocks that they will ask for.
      seed: unseeded requests draw theirs from this and their arrival number.
      eos_token_ids: end a request unless it ignores them.
      vocab_size: token ids of requests must be below it.
      max_logprobs: most alternatives a token that a request may ask for.
      window_sizes: of the model's layers, as far as each sees back; None: everything. num_sinks: first tokens that are seen
        beside. They decide what a running request gives back.
      cascade: what attending to a shared prefix once saves and costs; None: it is never done.
      unseen_tokens: requests may tell of their tokens nothing but the number and names for blocks. For simulations: there
        is nothing that a device could compute.
      cache_root: what K/V depend on beside tokens (model fingerprint, KV format); first link of every block hash.
    """

    policy: Literal["fcfs", "priority"] = "fcfs"
    decode_steps: int = 0
    enable_prefix_caching: bool = True
    share_partial_blocks: bool = True
    eviction_policy: str = "lru"
    eviction_lookahead: int = 64
    ghost_blocks: int | None = None
    max_pinned_blocks: int = 0
    seed: int = 0
    eos_token_ids: tuple[int, ...] = ()
    vocab_size: int = 2**31
    max_logprobs: int = 20
    window_sizes: tuple[int | None, ...] = ()
    num_sinks: int = 0
    cascade: CascadeCost | None = None
    unseen_tokens: bool = False
    cache_root: bytes = b""

    def retention(self, limits: ExecutorLimits) -> Retention | None:
        return retention_of(
            self.window_sizes, self.num_sinks, block_size=limits.block_size, max_chunk=limits.max_num_batched_tokens
        )

    def check(self, limits: ExecutorLimits) -> None:
        """Raises ConfigError for what cannot work on an executor with these limits."""
        if self.policy not in ("fcfs", "priority"):
            raise ConfigError(f"scheduling_policy is {self.policy!r}; choose 'fcfs' or 'priority'")
        if self.eviction_policy not in EVICTION_POLICIES:
            raise ConfigError(
                f"eviction_policy is {self.eviction_policy!r}; choose one of {', '.join(EVICTION_POLICIES)}"
            )
        if self.eviction_lookahead < 0:
            raise ConfigError(f"eviction_lookahead is {self.eviction_lookahead}; it must be 0 or more")
        if not 0 <= self.decode_steps <= limits.max_decode_steps:
            raise ConfigError(
                f"decode_steps is {self.decode_steps}; it must be 0 (adaptive) to {limits.max_decode_steps}, "
                "the executor's limit"
            )
        if self.ghost_blocks is not None and self.ghost_blocks < 0:
            raise ConfigError(f"ghost_blocks is {self.ghost_blocks}; it must be 0 or more")
        if not 0 <= self.max_pinned_blocks < max(1, limits.num_blocks - 1):
            raise ConfigError(
                f"max_pinned_blocks is {self.max_pinned_blocks}; it must be 0 or more and leave some of the "
                f"{limits.num_blocks - 1} blocks of the pool to requests"
            )
        if limits.num_blocks < 2:
            raise ConfigError(
                f"num_blocks is {limits.num_blocks}; at least 2 are needed, the null block and one to use: raise "
                "num_gpu_blocks_override, kv_cache_memory_bytes or gpu_memory_utilization"
            )
        # Below it, decode rows alone could use up every step's budget, and a prefill would never advance.
        if limits.max_num_batched_tokens < limits.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {limits.max_num_batched_tokens}, less than max_num_seqs = "
                f"{limits.max_num_seqs}: raise max_num_batched_tokens to {limits.max_num_seqs} or lower max_num_seqs"
            )
