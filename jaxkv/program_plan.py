"""How many blocks there is room for, and the step functions for them: each needs the other."""

import dataclasses

import jax.numpy as jnp

from jaxkv.control.executor import ExecutorLimits
from jaxkv.core.config import EngineConfig
from jaxkv.core.model_config import ModelConfig
from jaxkv.core.progress import Progress
from jaxkv.core.retention import retention_of
from jaxkv.device import Device
from jaxkv.execution.decode_state import state_bytes
from jaxkv.execution.executable_store import ExecutableStore
from jaxkv.execution.kv_cache import kv_bytes_per_token
from jaxkv.execution.memory import MemoryNeeds, MemoryPlan, available_memory, plan_memory
from jaxkv.execution.programs import Programs, ProgramShapes, abstract_model, geometric_buckets
from jaxkv.models.llama import KVStorage
from jaxkv.settings import MAX_DECODE_STEPS, model_limit
from pallas_kernels import dispatch

# Fewer rows share nothing on XLA:CPU: its f32 matmul rows are bitwise equal among 64 rows and more, not below, and a
# prompt's KV must not depend on how it was cut into chunks.
_MIN_PREFILL_TOKENS = 64
_MAX_PREFILL_SEQS = 16
# Groups a call; more would pay in the kernel's grid, and the ones that save most come first. Fewer rows than the least
# bucket of those that groups run in are padded to it.
_MAX_PREFIX_GROUPS = 16
_LEAST_CASCADE_BUCKET = 16


def plan_programs(
    config: EngineConfig, model: ModelConfig, device: Device, progress: Progress
) -> tuple[Programs, MemoryPlan]:
    """Blocks, and the step functions for them, being built in the background.

    The arithmetic refuses what can't fit first; then the compiler tells the temporaries.
    """
    available = available_memory()
    needs = memory_needs(config, model)
    memory = plan_blocks(config, model, needs, device, available)
    programs = make_programs(config, model, memory, device)
    only = programs.largest() if config.enforce_eager else None
    programs.start(progress, only)
    try:
        needs = dataclasses.replace(needs, temporaries=programs.temporaries(), compiled=True)
        with_temporaries = plan_blocks(config, model, needs, device, available)
    except BaseException:
        programs.stop()
        raise
    # Temporaries do not depend on the number of blocks (a test sees to it), so one correction is enough.
    if with_temporaries.num_blocks != memory.num_blocks or with_temporaries.max_model_len != memory.max_model_len:
        programs.stop()
        programs = make_programs(config, model, with_temporaries, device)
        programs.start(progress, only)
    return programs, with_temporaries


def memory_needs(config: EngineConfig, model: ModelConfig) -> MemoryNeeds:
    """Before anything is compiled: temporaries are less than there will be, enough to refuse what is hopeless."""
    itemsize = jnp.dtype(config.dtype).itemsize
    per_seq, per_token = 4 * model.vocab_size, itemsize * model.intermediate_size  # float32 logits, widest activation
    return MemoryNeeds(
        weights=model.num_parameters() * itemsize,
        kv_per_token=kv_bytes_per_token(model, config.kv_cache_dtype),
        decode_state=state_bytes(
            config.max_num_seqs,
            -(-(config.max_model_len or model_limit(model)) // config.block_size),
            ExecutorLimits.max_stop_ids,
            model.vocab_size,
        ),
        temporaries=max(per_seq * config.max_num_seqs, per_token * config.max_num_batched_tokens),
        temporaries_per_seq=per_seq,
        temporaries_per_token=per_token,
        compiled=False,
    )


def most_blocks(config: EngineConfig, model: ModelConfig) -> int | None:
    """Blocks, the null block included, that the kernels can address; None: as many as fit the memory."""
    return dispatch.max_blocks(
        config.attention_implementation,
        num_kv_heads=model.num_kv_heads,
        block_size=config.block_size,
        head_dim=model.head_dim,
        kv_format=config.kv_cache_dtype,
    )


def plan_blocks(
    config: EngineConfig, model: ModelConfig, needs: MemoryNeeds, device: Device, available: int
) -> MemoryPlan:
    """`plan_memory` for a model on a device; `config` is resolved, `available` bytes are the engine's."""
    return plan_memory(
        config,
        needs,
        platform="cpu" if device.is_cpu else "gpu",
        available=available,
        block_size=config.block_size,
        model_limit=model_limit(model),
        most_blocks=most_blocks(config, model),
        retention=retention_of(
            model.windows_within(config.kv_window),
            num_sinks(config),
            block_size=config.block_size,
            max_chunk=config.max_num_batched_tokens,
        ),
    )


def num_sinks(config: EngineConfig) -> int:
    """First tokens of a request that its window does not cover and that stay."""
    return 0 if config.kv_window is None else config.kv_sinks


def make_programs(config: EngineConfig, model: ModelConfig, memory: MemoryPlan, device: Device) -> Programs:
    """The step functions of an engine with these blocks; nothing is compiled yet."""
    limits = ExecutorLimits(
        num_blocks=memory.num_blocks + 1,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_prefill_seqs=min(config.max_num_seqs, _MAX_PREFILL_SEQS),
        max_model_len=memory.max_model_len,
        max_decode_steps=1 if config.enforce_eager else MAX_DECODE_STEPS,
        max_prefix_groups=0 if config.cascade == "off" else min(_MAX_PREFIX_GROUPS, config.max_num_seqs // 2),
    )
    decode_buckets = _decode_buckets(config.max_num_seqs, device)
    shapes = ProgramShapes(
        model=model,
        dtype=config.dtype,
        kv_dtype=config.kv_cache_dtype,
        limits=limits,
        prefill_buckets=geometric_buckets(
            _MIN_PREFILL_TOKENS, max(config.max_num_batched_tokens, _MIN_PREFILL_TOKENS), 2
        ),
        decode_buckets=decode_buckets,
        num_top=min(config.max_logprobs, model.vocab_size),
        implementation=config.attention_implementation,
        cascade_buckets=cascade_buckets(decode_buckets) if limits.max_prefix_groups else (),
        storage=KVStorage(config.kv_rotation == "hadamard", config.kv_window, num_sinks(config)),
        cache_as_bits=device.is_cpu and not config.attention_implementation.startswith("pallas_"),
    )
    abstract = abstract_model(
        model, dtype=config.dtype, max_model_len=longest_view(config, memory.max_model_len), storage=shapes.storage
    )
    return Programs(abstract, shapes, ExecutableStore(config.compilation_cache_dir))


def longest_view(config: EngineConfig, max_model_len: int) -> int:
    """Tokens that a query sees at most: what `dynamic` rope scaling goes by."""
    return max_model_len if config.kv_window is None else min(max_model_len, config.kv_window + config.kv_sinks)


def _decode_buckets(max_num_seqs: int, device: Device) -> tuple[int, ...]:
    """Padded row counts. On CPU a row costs: the demo model's step takes 86 ms with 8 rows, 123 with 16. On GPU the weights
    that are read cost, and hardly the rows."""
    factor = 2 if device.is_cpu else 4
    return tuple(dict.fromkeys((1, *geometric_buckets(min(4, max_num_seqs), max_num_seqs, factor))))


def cascade_buckets(decode_buckets: tuple[int, ...]) -> tuple[int, ...]:
    """The largest decode bucket always: groups may have any number of rows."""
    return tuple(bucket for bucket in decode_buckets if bucket >= min(_LEAST_CASCADE_BUCKET, decode_buckets[-1]))
