"""From an EngineConfig to a running engine: find the model, plan the memory, compile, load."""

import concurrent.futures
import dataclasses
import gc
import hashlib
import logging
import os
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
from flax import nnx

from jaxkv.constraints.compiler import ConstraintCompiler
from jaxkv.control.cascade_cost import ALWAYS, CascadeCost, gpu_cost
from jaxkv.control.engine import Engine
from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.clock import MonotonicClock
from jaxkv.core.config import EngineConfig
from jaxkv.core.model_config import ModelConfig
from jaxkv.core.progress import Progress, SilentProgress
from jaxkv.device import local_device
from jaxkv.execution.jax_executor import JaxExecutor
from jaxkv.execution.kv_cache import kv_bytes_per_token
from jaxkv.execution.memory import MemoryPlan, memory_fraction
from jaxkv.execution.programs import WarmUp
from jaxkv.loading.resolve import resolve_model
from jaxkv.loading.weights import check_checkpoint, load_config, load_weights
from jaxkv.models.key_bias import fold_key_bias
from jaxkv.models.kv_rotation import fold_into_weights
from jaxkv.models.llama import Llama
from jaxkv.program_plan import longest_view, num_sinks, plan_programs
from jaxkv.settings import check_settings, resolve_settings
from jaxkv.tokenization.tokenizer import Tokenizer, load_tokenizer
from pallas_kernels.kv_format import formats_of

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class StartedEngine:
    """What start_engine returns: ready to serve.

    Attributes:
      config: the settings with every None and "auto" resolved.
      constraints: makes `Request.constraint`.
      name: the model's short name.
      warm_up: how many executables were built, how many of them out of the compilation cache, in what time.
      seconds: how long each stage of the start took; "load" runs beside "compile".
    """

    engine: Engine
    tokenizer: Tokenizer
    constraints: ConstraintCompiler
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

    check_settings(config)
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
        ConstraintCompiler(tokenizer, vocab_size=model_config.vocab_size, eos_token_ids=model_config.eos_token_ids),
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
    device = local_device()
    config = resolve_settings(config, model_config, device)
    programs, memory = timed("plan", plan_programs, config, model_config, device, progress)
    for line in memory.lines():
        log.info("%s", line)
    config = dataclasses.replace(config, max_model_len=memory.max_model_len, num_gpu_blocks_override=memory.num_blocks)
    _tell_fixed_rope_base(model_config, longest_view(config, memory.max_model_len))
    # Reading files and compiling wait for different things: side by side they take two seconds less.
    loader = concurrent.futures.ThreadPoolExecutor(1)
    try:

        def load_as_set(dtype: str) -> Llama:
            return _as_stored(load(dtype), config)

        model = loader.submit(timed, "load", load_as_set, config.dtype)
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


def _as_stored(model: Llama, config: EngineConfig) -> Llama:
    """The model whose keys and values can be stored as set; in place."""
    keys, _ = formats_of(config.kv_cache_dtype)
    if keys.is_integer and (largest := fold_key_bias(model)) > 1:
        log.info("key bias: divided out of the stored keys by powers of two up to %d, for %s", largest, keys.name)
    return fold_into_weights(model) if config.kv_rotation == "hadamard" else model


def _reserve_gpu_memory(config: EngineConfig) -> None:
    """Let JAX's allocator have gpu_memory_utilization of the device; a no-op once the backend runs, and on CPU."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", memory_fraction(config.gpu_memory_utilization))


def _tell_fixed_rope_base(model: ModelConfig, max_model_len: int) -> None:
    if model.rope.type == "dynamic" and max_model_len > model.max_position_embeddings:
        log.info(
            "dynamic rope scaling: one fixed base, that of max_model_len = %d, for sequences of any length (cached keys "
            "can't follow a base that changes); with max_model_len at most %d it is the unscaled base",
            max_model_len,
            model.max_position_embeddings,
        )


def _tell_warm_up(warm_up: WarmUp, config: EngineConfig) -> None:
    cached = (
        f", {warm_up.from_cache} of them out of {config.compilation_cache_dir}" if config.compilation_cache_dir else ""
    )
    log.info("warm-up: %d executables in %.1f s%s", warm_up.executables, warm_up.seconds, cached)


def cascade_cost(config: EngineConfig, model: ModelConfig) -> CascadeCost | None:
    if config.cascade == "auto":
        return gpu_cost(
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            kv_bytes=kv_bytes_per_token(model, config.kv_cache_dtype) // model.num_layers,
        )
    return ALWAYS if config.cascade == "on" else None


def _scheduler_config(config: EngineConfig, model: ModelConfig, origin: str) -> SchedulerConfig:
    storage = f"{config.kv_cache_dtype}|{config.kv_rotation}|{config.kv_window}|{num_sinks(config)}"
    fingerprint = f"{origin}|{model}|{config.dtype}|{storage}"
    return SchedulerConfig(
        policy=config.scheduling_policy,
        decode_steps=config.decode_steps,
        enable_prefix_caching=config.enable_prefix_caching,
        share_partial_blocks=config.share_partial_blocks,
        eviction_policy=config.eviction_policy,
        eviction_lookahead=config.eviction_lookahead,
        ghost_blocks=config.ghost_blocks,
        max_pinned_blocks=config.max_pinned_blocks,
        window_sizes=model.windows_within(config.kv_window),
        num_sinks=num_sinks(config),
        cascade=cascade_cost(config, model),
        seed=config.seed,
        eos_token_ids=model.eos_token_ids,
        vocab_size=model.vocab_size,
        max_logprobs=config.max_logprobs,
        cache_root=hashlib.sha256(fingerprint.encode()).digest(),
    )
