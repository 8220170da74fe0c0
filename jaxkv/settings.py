"""EngineConfig: refuse what is wrong, and settle what is left open by model and device."""

import dataclasses
import logging
import os
from pathlib import Path

from jaxkv.core.config import DTYPES, EngineConfig, is_kv_cache_dtype, told_kv_cache_dtypes
from jaxkv.core.errors import ConfigError
from jaxkv.core.model_config import ModelConfig
from jaxkv.device import Device
from pallas_kernels import dispatch
from pallas_kernels.kv_format import formats_of

log = logging.getLogger(__name__)

MAX_DECODE_STEPS = 8
# Each is computed, kept and copied for every token of a call.
_MOST_LOGPROBS = 1000
# An angle of so many radians is off by up to 0.03 in float32.
_MOST_POSITIONS = 2**20


def check_settings(config: EngineConfig) -> None:
    """Settings that are wrong whatever the model and device."""
    if not config.model:
        raise ConfigError("model is empty: name a model, e.g. demo")
    if config.dtype not in DTYPES:
        raise ConfigError(f"dtype is {config.dtype!r}; choose one of {', '.join(DTYPES)}")
    if not is_kv_cache_dtype(config.kv_cache_dtype):
        raise ConfigError(f"kv_cache_dtype is {config.kv_cache_dtype!r}; choose one of {told_kv_cache_dtypes()}")
    if config.tensor_parallel_size != 1:
        raise ConfigError(f"tensor_parallel_size is {config.tensor_parallel_size}; only 1 is supported so far")
    if not 0 < config.gpu_memory_utilization <= 1:
        raise ConfigError(
            f"gpu_memory_utilization is {config.gpu_memory_utilization}; it must be above 0 and at most 1"
        )
    if config.kv_sinks < 0:
        raise ConfigError(f"kv_sinks is {config.kv_sinks}; it must be 0 or more")
    at_least_one = ("max_model_len", "block_size", "num_gpu_blocks_override", "max_num_seqs", "max_num_batched_tokens")
    for name in (*at_least_one, "kv_cache_memory_bytes", "kv_window"):
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


def resolve_settings(config: EngineConfig, model: ModelConfig, device: Device) -> EngineConfig:
    """Every None and "auto" but those that follow from the memory."""
    cpu = device.is_cpu
    dtype = config.dtype if config.dtype != "auto" else ("float32" if cpu else "bfloat16")
    kv_cache_dtype = config.kv_cache_dtype if config.kv_cache_dtype != "auto" else dtype
    block_size = config.block_size or (16 if cpu else 64)
    try:
        implementation, reason = dispatch.resolve(
            config.attention_implementation, _attention_configuration(model, device, block_size, dtype, kv_cache_dtype)
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    log.info("attention implementation: %s (%s)", implementation, reason)
    _check_length(config, model)
    max_num_seqs = config.max_num_seqs or (16 if cpu else 256)
    return dataclasses.replace(
        config,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        kv_rotation=_kv_rotation(config.kv_rotation, kv_cache_dtype),
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or max(512 if cpu else 8192, max_num_seqs),
        attention_implementation=implementation,
        cascade=resolve_cascade(config, model, implementation),
        compilation_cache_dir=_compilation_cache_dir(config),
    )


def _check_length(config: EngineConfig, model: ModelConfig) -> None:
    limit = model_limit(model)
    if config.kv_window is None:
        if config.max_model_len is not None and config.max_model_len > limit:
            raise ConfigError(
                f"max_model_len is {config.max_model_len:,}, but the model allows at most {limit:,} tokens; with a "
                "kv_window requests may get longer"
            )
        return
    if config.kv_window + config.kv_sinks > limit:
        raise ConfigError(
            f"kv_window is {config.kv_window:,} and kv_sinks {config.kv_sinks}, but the model sees at most {limit:,} "
            f"tokens: lower kv_window to at most {max(1, limit - config.kv_sinks):,}, or leave it out"
        )
    if config.max_model_len is not None and config.max_model_len > _MOST_POSITIONS:
        raise ConfigError(
            f"max_model_len is {config.max_model_len:,}; at most {_MOST_POSITIONS:,}: positions beyond lose their "
            "exactness as float32 angles"
        )


def _kv_rotation(asked: str, kv_cache_dtype: str) -> str:
    if asked != "auto":
        return asked
    keys, _ = formats_of(kv_cache_dtype)
    # Not for fp8, whose numbers have exponents of their own: rotated outliers cost it 17 times the KL divergence.
    return "hadamard" if keys.is_integer else "none"


def _attention_configuration(
    model: ModelConfig, device: Device, block_size: int, dtype: str, kv_format: str
) -> dispatch.Configuration:
    return dispatch.Configuration(
        platform=device.platform,
        capability=device.capability,
        block_size=block_size,
        head_dim=model.head_dim,
        group=model.num_heads // model.num_kv_heads,
        dtype=dtype,
        kv_format=kv_format,
    )


def resolve_cascade(config: EngineConfig, model: ModelConfig, implementation: str) -> str:
    """Without Pallas kernels "auto" is "off".

    XLA on a CPU gains little and not always: with 1,024 common tokens a layer of the demo model takes 5.0 ms instead of
    7.1 for 16 rows, as long for 8, and longer where half of the rows are in no group; and every executable more takes
    12 CPU seconds at the first start. On a GPU XLA's loops over tiles are far from what the formula is about.
    """
    if config.cascade != "off" and None not in model.windows_within(config.kv_window):
        if config.cascade == "on":
            whose = "of the model has a sliding window" if config.kv_window is None else "has kv_window's window"
            raise ConfigError(f"cascade is on, but every layer {whose}: set it to auto or off")
        return "off"
    return "off" if config.cascade == "auto" and not implementation.startswith("pallas_") else config.cascade


def model_limit(model: ModelConfig) -> int:
    """Longest sequence the positions reach: rope scaling stretches it where the config gives the unscaled length."""
    rope = model.rope
    limit = model.max_position_embeddings
    if rope.type == "yarn" and rope.original_max_position_embeddings:
        return max(limit, int(rope.original_max_position_embeddings * rope.factor))
    return int(limit * rope.factor) if rope.type in ("linear", "dynamic") else limit


def _compilation_cache_dir(config: EngineConfig) -> str:
    if config.compilation_cache_dir is not None:
        return config.compilation_cache_dir
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return str(Path(base) / "jaxkv" / "executables")
