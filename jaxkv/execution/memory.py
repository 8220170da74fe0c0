"""The memory budget: worked out, told and checked before anything is allocated."""

import dataclasses

import jax
import psutil

from jaxkv.core.config import EngineConfig
from jaxkv.core.errors import ConfigError
from jaxkv.core.retention import Retention
from jaxkv.core.units import human_bytes

GiB = 2**30
# CPU only: the pool takes a quarter of what is free, and no more than this unless asked: the system hands out memory at
# about 1 GiB a second there, and the demo model's 24,000 tokens in it are three requests of full length.
_CPU_DEFAULT_POOL = GiB


@dataclasses.dataclass(frozen=True)
class MemoryNeeds:
    """What a model takes at given settings.

    Attributes:
      weights: bytes of the weights as kept on the device.
      kv_per_token: bytes of one token's KV in all layers.
      decode_state: bytes of what the device keeps of each row: block tables, token counts.
      temporaries: biggest temporary of any step function.
      temporaries_per_seq / temporaries_per_token: lower bounds of what a row and a prefill token add to it.
      compiled: `temporaries` is the compiler's figure; until it has run, a lower bound.
    """

    weights: int
    kv_per_token: int
    decode_state: int
    temporaries: int
    temporaries_per_seq: int
    temporaries_per_token: int
    compiled: bool = True

    @property
    def fixed(self) -> int:
        """Bytes of everything but the KV pool."""
        return self.weights + self.decode_state + self.temporaries


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """The outcome: how many blocks, and where the memory goes.

    Attributes:
      available: bytes the engine may use in all.
      num_blocks: usable blocks; the null block comes on top.
      max_model_len: longest request served.
      retention: what a request keeps of its blocks; None: all of them.
    """

    needs: MemoryNeeds
    available: int
    num_blocks: int
    block_size: int
    max_model_len: int
    retention: Retention | None = None

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def kv_bytes(self) -> int:
        """Bytes of the usable blocks."""
        return self.num_tokens * self.needs.kv_per_token

    @property
    def max_concurrency(self) -> float:
        """How many requests of max_model_len tokens the pool holds at once."""
        return self.concurrency(self.max_model_len)

    def concurrency(self, num_tokens: int) -> float:
        """How many requests of `num_tokens` tokens the pool holds at once, when they share nothing."""
        return self.num_blocks / _blocks_of(num_tokens, self.block_size, self.retention)

    def lines(self) -> list[str]:
        """What is said at start."""
        needs = self.needs
        source = "from the compiler" if needs.compiled else "at least; the compiler has not run"
        lines = [
            f"Memory available to the engine: {human_bytes(self.available)}",
            f"Weights: {human_bytes(needs.weights)}",
            f"Decode state (block tables and token counts of the rows): {human_bytes(needs.decode_state)}",
            f"Biggest temporary ({source}): {human_bytes(needs.temporaries)}",
            f"KV cache: {needs.kv_per_token:,} bytes a token, {human_bytes(self.kv_bytes)} in "
            f"{self.num_blocks:,} blocks of {self.block_size} tokens",
            f"KV cache size: {self.num_tokens:,} tokens",
            f"Maximum concurrency for {self.max_model_len:,} tokens a request: {self.max_concurrency:.2f}x",
        ]
        if self.retention is not None:
            most = self.retention.max_blocks
            lines.append(
                f"Windows: a request keeps at most {most * self.block_size:,} tokens ({most:,} blocks), however long it gets"
            )
        return lines


def _blocks_of(num_tokens: int, block_size: int, retention: Retention | None) -> int:
    """Most that a request of `num_tokens` tokens holds at once."""
    return -(-num_tokens // block_size) if retention is None else retention.num_blocks(num_tokens)


def available_memory() -> int:
    """Bytes the engine may use: on GPU its share of the device less what others hold, on CPU what the system has free."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return psutil.virtual_memory().available
    stats = device.memory_stats()
    # bytes_limit is gpu_memory_utilization of the device: see startup._reserve_gpu_memory.
    return stats["bytes_limit"] - stats["bytes_in_use"]


def memory_fraction(gpu_memory_utilization: float) -> str:
    """The share of the device that JAX's allocator gets, as its environment variable has it."""
    return f"{gpu_memory_utilization:.3f}"


def gpu_share(device_memory: int, gpu_memory_utilization: float) -> int:
    """What `available_memory` will tell on a GPU with so many bytes where nothing runs yet."""
    return int(device_memory * float(memory_fraction(gpu_memory_utilization)))


def plan_memory(
    config: EngineConfig,
    needs: MemoryNeeds,
    *,
    platform: str,
    available: int,
    block_size: int,
    model_limit: int,
    most_blocks: int | None = None,
    retention: Retention | None = None,
) -> MemoryPlan:
    """How many blocks there will be and how long a request may get.

    Args:
      platform: "cpu" or "gpu".
      available: bytes the engine may use in all (see available_memory).
      model_limit: longest sequence the model itself allows.
      most_blocks: blocks, the null block included, that the kernels can address; the rest of the memory stays free.
      retention: what a request keeps of its blocks; None: all of them.

    Raises ConfigError with the numbers and the largest setting that would fit.
    """
    block_bytes = block_size * needs.kv_per_token
    left = available - needs.fixed
    if config.num_gpu_blocks_override is not None:
        num_blocks = config.num_gpu_blocks_override
        if most_blocks is not None and num_blocks > most_blocks - 1:
            raise ConfigError(
                f"num_gpu_blocks_override is {num_blocks:,}, but the kernels for kv_cache_dtype={config.kv_cache_dtype} "
                f"address at most {most_blocks - 1:,} blocks of {block_size} tokens: lower it"
            )
    else:
        budget = config.kv_cache_memory_bytes
        if budget is None:
            budget = left if platform == "gpu" else min(_CPU_DEFAULT_POOL, available // 4, left)
        # The null block is paid for out of the same budget.
        num_blocks = max(budget // block_bytes - 1, 0)
        if most_blocks is not None:
            num_blocks = min(num_blocks, most_blocks - 1)
    pool_limit = max(num_blocks, 1) * block_size
    if retention is not None and num_blocks >= retention.max_blocks:
        pool_limit = model_limit
    max_model_len = config.max_model_len or min(model_limit, pool_limit)
    wanted_blocks = _blocks_of(max_model_len, block_size, retention)

    if (num_blocks + 1) * block_bytes > left:
        raise ConfigError(_does_not_fit(config, needs, available, num_blocks, block_size, platform, model_limit))
    if num_blocks < wanted_blocks:
        setting = "gpu_memory_utilization or kv_cache_memory_bytes" if platform == "gpu" else "kv_cache_memory_bytes"
        lower = f"lower max_model_len to at most {num_blocks * block_size:,}, or " if num_blocks else ""
        raise ConfigError(
            f"max_model_len is {max_model_len:,} tokens, but the KV cache holds {num_blocks * block_size:,} "
            f"({num_blocks:,} blocks of {block_size} tokens, {human_bytes(num_blocks * block_bytes)}): {lower}raise "
            f"{setting} so that the KV cache gets at least {_exact((wanted_blocks + 1) * block_bytes)} "
            f"(num_gpu_blocks_override: {wanted_blocks:,})"
        )
    return MemoryPlan(needs, available, num_blocks, block_size, max_model_len, retention)


def _exact(num_bytes: int) -> str:
    """For a value to paste: the rounded one might not fit."""
    return f"{num_bytes} bytes ({human_bytes(num_bytes)})"


def _does_not_fit(
    config: EngineConfig,
    needs: MemoryNeeds,
    available: int,
    num_blocks: int,
    block_size: int,
    platform: str,
    model_limit: int,
) -> str:
    block_bytes = block_size * needs.kv_per_token
    most_blocks = max((available - needs.fixed) // block_bytes - 1, 0)
    what = (
        f"the engine needs {human_bytes(needs.weights)} for weights, {human_bytes(needs.temporaries)} for temporaries, "
        f"{human_bytes(needs.decode_state)} for the rows' state and {human_bytes((num_blocks + 1) * block_bytes)} "
        f"for {num_blocks:,} KV blocks, but {human_bytes(available)} are available"
    )
    if most_blocks >= 1:
        pool = "num_gpu_blocks_override" if config.num_gpu_blocks_override is not None else "kv_cache_memory_bytes"
        most = most_blocks if config.num_gpu_blocks_override is not None else _exact((most_blocks + 1) * block_bytes)
        longest = min(most_blocks * block_size, model_limit)
        return f"{what}: lower {pool} to at most {most} (max_model_len at most {longest:,})"
    # Even one block is too much: only fewer temporaries, fewer rows or a smaller model help.
    room = available - needs.weights - 2 * block_bytes
    advice = ["raise gpu_memory_utilization"] if platform == "gpu" and config.gpu_memory_utilization < 1 else []
    state_per_seq = needs.decode_state // ((config.max_num_seqs or 1) + 1)  # and one for the dead row
    for name, most in (
        ("max_num_seqs", room // (needs.temporaries_per_seq + state_per_seq)),
        ("max_num_batched_tokens", (room - needs.decode_state) // needs.temporaries_per_token),
    ):
        if 0 < most < getattr(config, name):
            advice.append(f"lower {name} to less than {most:,}")
    return f"{what}: {', '.join(advice) or 'take a smaller model or dtype'}"
