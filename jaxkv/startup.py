"""From an EngineConfig to a running engine: find the model, plan the memory, compile, load."""

import concurrent.futures
import dataclasses
import gc
import hashlib
import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv.control.cascade_cost import ALWAYS, CascadeCost, gpu_cost
from jaxkv.control.engine import Engine
from jaxkv.control.executor import ExecutorLimits
from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.clock import MonotonicClock
from jaxkv.core.config import DTYPES, KV_CACHE_DTYPES, EngineConfig
from jaxkv.core.errors import ConfigError
from jaxkv.core.model_config import ModelConfig
from jaxkv.core.progress import Progress, SilentProgress
from jaxkv.execution.decode_state import state_bytes
from jaxkv.execution.executable_store import ExecutableStore
from jaxkv.execution.jax_executor import JaxExecutor
from jaxkv.execution.kv_cache import kv_bytes_per_token
from jaxkv.execution.memory import MemoryNeeds, MemoryPlan, available_memory, plan_memory
from jaxkv.execution.programs import Programs, ProgramShapes, WarmUp, abstract_model, geometric_buckets
from jaxkv.loading.resolve import resolve_model
from jaxkv.loading.weights import check_checkpoint, load_config, load_weights
from jaxkv.models.llama import Llama
from jaxkv.tokenization.tokenizer import Tokenizer, load_tokenizer
from pallas_kernels import dispatch

log = logging.getLogger(__name__)

MAX_DECODE_STEPS = 8
# Fewer rows share nothing on XLA:CPU: its f32 matmul rows are bitwise equal among 64 rows and more, not below, and a
# prompt's KV must not depend on how it was cut into chunks.
_MIN_PREFILL_TOKENS = 64
_MAX_PREFILL_SEQS = 16
# Groups a call; more would pay in the kernel's grid, and the ones that save most come first. Fewer rows than the least
# bucket of those that groups run in are padded to it.
_MAX_PREFIX_GROUPS = 16
_LEAST_CASCADE_BUCKET = 16
# Each is computed, kept and copied for every token of a call.
_MOST_LOGPROBS = 1000


@dataclasses.dataclass(frozen=True)
class StartedEngine:
    """What start_engine returns: ready to serve.

    Attributes:
      config: the settings with every None and "auto" resolved.
      name: the model's short name.
      warm_up: how many executables were built, how many of them out of the compilation cache, in what time.
      seconds: how long each stage of the start took; "load" runs beside "compile".
    """

    engine: Engine
    tokenizer: Tokenizer
    model_config: ModelConfig
    config: EngineConfig
    memory: MemoryPlan
    warm_up: WarmUp
    name: str
    seconds: dict[str, float]

    @property
    def memory_report(self) -> list[str]:
        return self.memory.lines()


class BuiltEngine(NamedTuple):
    """What build_engine returns; see StartedEngine."""

    engine: Engine
    config: EngineConfig
    memory: MemoryPlan
    warm_up: WarmUp


def start_engine(config: EngineConfig, *, progress: Progress | None = None) -> StartedEngine:
    """Load the model and compile every step function. Raises UserError when the settings or files can't work."""
    # Tracing makes millions of objects, which stay or go by themselves: looking for cycles takes 8 % of a start.
    collects = gc.isenabled()
    gc.disable()
    try:
        return _start_engine(config, progress)
    finally:
        if collects:
            gc.enable()


def _start_engine(config: EngineConfig, progress: Progress | None) -> StartedEngine:
    progress = progress or SilentProgress()
    seconds: dict[str, float] = {}

    def timed(stage: str, function, *args, **kwargs):
        begin = time.monotonic()
        result = function(*args, **kwargs)
        seconds[stage] = seconds.get(stage, 0) + time.monotonic() - begin
        return result

    _check(config)
    _reserve_gpu_memory(config)
    source = timed(
        "resolve",
        resolve_model,
        config.model,
        revision=config.revision,
        download_dir=config.download_dir,
        progress=progress,
    )
    model_config = load_config(source)
    tokenizer = timed("tokenizer", load_tokenizer, source, config.tokenizer, config.chat_template)
    check_checkpoint(source, model_config)  # before minutes of compiling

    def load(dtype: str) -> Llama:
        return load_weights(source, model_config, dtype=dtype, progress=progress)

    built = build_engine(config, model_config, load, origin=source.description, progress=progress, timed=timed)
    return StartedEngine(
        built.engine,
        tokenizer,
        model_config,
        built.config,
        built.memory,
        built.warm_up,
        source.name,
        seconds,
    )


def build_engine(
    config: EngineConfig,
    model_config: ModelConfig,
    load: Callable[[str], Llama],
    *,
    origin: str,
    progress: Progress,
    timed: Callable = lambda stage, function, *args, **kwargs: function(*args, **kwargs),
) -> BuiltEngine:
    """An engine for weights of any source: plan the memory, compile, load.

    Args:
      load: the model with weights of a dtype; runs in a thread of its own.
      origin: what the weights are; with the settings it decides which K/V are alike.
      timed: calls a function for a stage of the start.
    """
    platform = "cpu" if jax.default_backend() == "cpu" else "gpu"
    config = _resolve_defaults(config, model_config, platform)
    programs, memory = timed("plan", _plan, config, model_config, platform, progress)
    for line in memory.lines():
        log.info("%s", line)
    config = dataclasses.replace(config, max_model_len=memory.max_model_len, num_gpu_blocks_override=memory.num_blocks)
    _tell_fixed_rope_base(model_config, memory.max_model_len)
    # Reading files and compiling wait for different things: side by side they take two seconds less.
    loader = concurrent.futures.ThreadPoolExecutor(1)
    try:
        model = loader.submit(timed, "load", load, config.dtype)
        warm_up = WarmUp(0, 0, 0.0) if config.enforce_eager else timed("compile", programs.finish)
        weights = tuple(jax.tree.leaves(nnx.state(model.result())))
    finally:  # an interrupt does not wait for what nobody wants any more
        programs.stop()
        loader.shutdown(wait=False, cancel_futures=True)
    _tell_warm_up(warm_up, config)

    clock = MonotonicClock()
    executor = JaxExecutor(programs, weights, clock, fail_on_recompile=config.fail_on_recompile)
    engine = Engine(executor, _scheduler_config(config, model_config, origin), clock=clock)
    return BuiltEngine(engine, config, memory, warm_up)


def _check(config: EngineConfig) -> None:
    """Settings that are wrong whatever the model and device."""
    if not config.model:
        raise ConfigError("model is empty: name a model, e.g. demo")
    if config.dtype not in DTYPES:
        raise ConfigError(f"dtype is {config.dtype!r}; choose one of {', '.join(DTYPES)}")
    if config.kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ConfigError(f"kv_cache_dtype is {config.kv_cache_dtype!r}; choose one of {', '.join(KV_CACHE_DTYPES)}")
    if config.tensor_parallel_size != 1:
        raise ConfigError(f"tensor_parallel_size is {config.tensor_parallel_size}; only 1 is supported so far")
    if not 0 < config.gpu_memory_utilization <= 1:
        raise ConfigError(
            f"gpu_memory_utilization is {config.gpu_memory_utilization}; it must be above 0 and at most 1"
        )
    at_least_one = ("max_model_len", "block_size", "num_gpu_blocks_override", "max_num_seqs", "max_num_batched_tokens")
    for name in (*at_least_one, "kv_cache_memory_bytes"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")
    if not 0 <= config.decode_steps <= MAX_DECODE_STEPS:
        raise ConfigError(f"decode_steps is {config.decode_steps}; it must be 0 (adaptive) to {MAX_DECODE_STEPS}")
    if config.enforce_eager and config.decode_steps > 1:
        raise ConfigError(
            f"decode_steps is {config.decode_steps}, but enforce_eager runs one step a call: leave one out"
        )
    if config.enforce_eager and config.fail_on_recompile:
        raise ConfigError("fail_on_recompile is set, but enforce_eager compiles all the time: leave one out")
    if not 1 <= config.max_logprobs <= _MOST_LOGPROBS:
        raise ConfigError(f"max_logprobs is {config.max_logprobs}; it must be 1 to {_MOST_LOGPROBS}")


def _reserve_gpu_memory(config: EngineConfig) -> None:
    """Let JAX's allocator have gpu_memory_utilization of the device; a no-op once the backend runs, and on CPU."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{config.gpu_memory_utilization:.3f}")


def _resolve_defaults(config: EngineConfig, model: ModelConfig, platform: str) -> EngineConfig:
    """Every None and "auto" but those that follow from the memory."""
    cpu = platform == "cpu"
    dtype = config.dtype if config.dtype != "auto" else ("float32" if cpu else "bfloat16")
    kv_cache_dtype = config.kv_cache_dtype if config.kv_cache_dtype != "auto" else dtype
    block_size = config.block_size or (16 if cpu else 64)
    try:
        implementation, reason = dispatch.resolve(
            config.attention_implementation, _attention_configuration(model, block_size, kv_cache_dtype)
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    log.info("attention implementation: %s (%s)", implementation, reason)
    limit = _model_limit(model)
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(f"max_model_len is {config.max_model_len:,}, but the model allows at most {limit:,} tokens")
    max_num_seqs = config.max_num_seqs or (16 if cpu else 256)
    return dataclasses.replace(
        config,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or max(512 if cpu else 8192, max_num_seqs),
        attention_implementation=implementation,
        cascade=_resolve_cascade(config, model, implementation),
        compilation_cache_dir=_compilation_cache_dir(config),
    )


def _attention_configuration(model: ModelConfig, block_size: int, kv_format: str) -> dispatch.Configuration:
    device = jax.local_devices()[0]
    capability = re.fullmatch(r"(\d+)\.(\d+)", getattr(device, "compute_capability", ""))  # AMD's are no numbers
    return dispatch.Configuration(
        platform="cuda" if capability else device.platform,
        capability=(int(capability[1]), int(capability[2])) if capability else None,
        block_size=block_size,
        head_dim=model.head_dim,
        group=model.num_heads // model.num_kv_heads,
        kv_format=kv_format,
    )


def _resolve_cascade(config: EngineConfig, model: ModelConfig, implementation: str) -> str:
    """Without Pallas kernels "auto" is "off".

    XLA on a CPU gains little and not always: with 1,024 common tokens a layer of the demo model takes 5.0 ms instead of
    7.1 for 16 rows, as long for 8, and longer where half of the rows are in no group; and every executable more takes
    12 CPU seconds at the first start. On a GPU XLA's loops over tiles are far from what the formula is about.
    """
    if config.cascade != "off" and all(window is not None for window in model.window_sizes):
        if config.cascade == "on":
            raise ConfigError("cascade is on, but every layer of the model has a sliding window: set it to auto or off")
        return "off"
    return "off" if config.cascade == "auto" and not implementation.startswith("pallas_") else config.cascade


def _model_limit(model: ModelConfig) -> int:
    """Longest sequence the positions reach: rope scaling stretches it where the config gives the unscaled length."""
    rope = model.rope
    limit = model.max_position_embeddings
    if rope.type == "yarn" and rope.original_max_position_embeddings:
        return max(limit, int(rope.original_max_position_embeddings * rope.factor))
    return int(limit * rope.factor) if rope.type in ("linear", "dynamic") else limit


def _tell_fixed_rope_base(model: ModelConfig, max_model_len: int) -> None:
    if model.rope.type == "dynamic" and max_model_len > model.max_position_embeddings:
        log.info(
            "dynamic rope scaling: one fixed base, that of max_model_len = %d, for sequences of any length (cached keys "
            "can't follow a base that changes); with max_model_len at most %d it is the unscaled base",
            max_model_len,
            model.max_position_embeddings,
        )


def _compilation_cache_dir(config: EngineConfig) -> str:
    if config.compilation_cache_dir is not None:
        return config.compilation_cache_dir
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return str(Path(base) / "jaxkv" / "executables")


def _tell_warm_up(warm_up: WarmUp, config: EngineConfig) -> None:
    cached = (
        f", {warm_up.from_cache} of them out of {config.compilation_cache_dir}" if config.compilation_cache_dir else ""
    )
    log.info("warm-up: %d executables in %.1f s%s", warm_up.executables, warm_up.seconds, cached)


def _plan(config: EngineConfig, model: ModelConfig, platform: str, progress: Progress) -> tuple[Programs, MemoryPlan]:
    """Blocks, and the step functions for them, being built in the background.

    The arithmetic refuses what can't fit first; then the compiler tells the temporaries.
    """
    available = available_memory()
    itemsize = jnp.dtype(config.dtype).itemsize
    # Less than there will be: a row's float32 logits, a token's widest activation. Enough to refuse what is hopeless.
    per_seq, per_token = 4 * model.vocab_size, itemsize * model.intermediate_size
    needs = MemoryNeeds(
        weights=model.num_parameters() * itemsize,
        kv_per_token=kv_bytes_per_token(model, config.kv_cache_dtype),
        decode_state=state_bytes(
            config.max_num_seqs,
            -(-(config.max_model_len or _model_limit(model)) // config.block_size),
            ExecutorLimits.max_stop_ids,
            model.vocab_size,
        ),
        temporaries=max(per_seq * config.max_num_seqs, per_token * config.max_num_batched_tokens),
        temporaries_per_seq=per_seq,
        temporaries_per_token=per_token,
    )

    def plan(needs: MemoryNeeds) -> MemoryPlan:
        return plan_memory(
            config,
            needs,
            platform=platform,
            available=available,
            block_size=config.block_size,
            model_limit=_model_limit(model),
            most_blocks=dispatch.max_blocks(
                config.attention_implementation,
                num_kv_heads=model.num_kv_heads,
                block_size=config.block_size,
                head_dim=model.head_dim,
                kv_format=config.kv_cache_dtype,
            ),
        )

    memory = plan(needs)
    programs = _programs(config, model, memory)
    only = programs.largest() if config.enforce_eager else None
    programs.start(progress, only)
    try:
        with_temporaries = plan(dataclasses.replace(needs, temporaries=programs.temporaries()))
    except BaseException:
        programs.stop()
        raise
    # Temporaries do not depend on the number of blocks (a test sees to it), so one correction is enough.
    if with_temporaries.num_blocks != memory.num_blocks or with_temporaries.max_model_len != memory.max_model_len:
        programs.stop()
        programs = _programs(config, model, with_temporaries)
        programs.start(progress, only)
    return programs, with_temporaries


def _decode_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Padded row counts. On CPU a row costs: the demo model's step takes 86 ms with 8 rows, 123 with 16. On GPU the weights
    that are read cost, and hardly the rows."""
    factor = 2 if jax.default_backend() == "cpu" else 4
    return tuple(dict.fromkeys((1, *geometric_buckets(min(4, max_num_seqs), max_num_seqs, factor))))


def _cascade_buckets(decode_buckets: tuple[int, ...]) -> tuple[int, ...]:
    """The largest decode bucket always: groups may have any number of rows."""
    return tuple(bucket for bucket in decode_buckets if bucket >= min(_LEAST_CASCADE_BUCKET, decode_buckets[-1]))


def _cascade_cost(config: EngineConfig, model: ModelConfig) -> CascadeCost | None:
    if config.cascade == "auto":
        return gpu_cost(
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            kv_bytes=kv_bytes_per_token(model, config.kv_cache_dtype) // model.num_layers,
        )
    return ALWAYS if config.cascade == "on" else None


def _programs(config: EngineConfig, model: ModelConfig, memory: MemoryPlan) -> Programs:
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
    decode_buckets = _decode_buckets(config.max_num_seqs)
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
        cascade_buckets=_cascade_buckets(decode_buckets) if limits.max_prefix_groups else (),
    )
    abstract = abstract_model(model, dtype=config.dtype, max_model_len=memory.max_model_len)
    return Programs(abstract, shapes, ExecutableStore(config.compilation_cache_dir))


def _scheduler_config(config: EngineConfig, model: ModelConfig, origin: str) -> SchedulerConfig:
    fingerprint = f"{origin}|{model}|{config.dtype}|{config.kv_cache_dtype}"
    return SchedulerConfig(
        policy=config.scheduling_policy,
        decode_steps=config.decode_steps,
        enable_prefix_caching=config.enable_prefix_caching,
        share_partial_blocks=config.share_partial_blocks,
        eviction_policy=config.eviction_policy,
        eviction_lookahead=config.eviction_lookahead,
        ghost_blocks=config.ghost_blocks,
        max_pinned_blocks=config.max_pinned_blocks,
        cascade=_cascade_cost(config, model),
        seed=config.seed,
        eos_token_ids=model.eos_token_ids,
        vocab_size=model.vocab_size,
        max_logprobs=config.max_logprobs,
        cache_root=hashlib.sha256(fingerprint.encode()).digest(),
    )
