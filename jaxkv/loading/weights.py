"""Fills the Flax model with a checkpoint's tensors, one at a time, each straight to its place.

The model's own abstract parameter tree says which tensors there must be, of which shape and dtype: there is no second
list. While tensor n is read nothing else of it exists on the host, so the peak above the weights is one tensor.
"""

import dataclasses
import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxkv.core.errors import CheckpointError
from jaxkv.core.model_config import ModelConfig
from jaxkv.core.progress import Progress, SilentProgress
from jaxkv.loading import host_memory
from jaxkv.loading.model_config import parse_hf_config
from jaxkv.loading.resolve import ModelSource
from jaxkv.loading.safetensors_source import SafetensorsSource
from jaxkv.loading.tensor_source import TensorSource
from jaxkv.models.llama import Llama

log = logging.getLogger(__name__)

ShardingFor = Callable[[str, tuple[int, ...]], jax.sharding.Sharding]
"""(parameter name such as `layers.0.attention.q_proj.weight`, its shape) -> where it lives."""

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_RENAMED = {
    "attention": "self_attn",
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
}
# Buffers that old checkpoints stored although they follow from the config.
_KNOWN_BUFFERS = ("rotary_emb.inv_freq", "self_attn.masked_bias", "self_attn.bias")
_MOST_LISTED = 5


@dataclasses.dataclass(frozen=True)
class _Parameter:
    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def name(self) -> str:
        return ".".join(map(str, self.path))

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


def load_config(source: ModelSource) -> ModelConfig:
    """The ModelConfig of a checkpoint. Raises CheckpointError; reads no weights."""
    if source.kind == "orbax":
        from jaxkv.loading import orbax  # here and below: its import takes half a second

        return orbax.load_config(source.path)
    if source.kind == "gguf":
        from jaxkv.loading.gguf_config import parse_gguf_config
        from jaxkv.loading.gguf_source import GGUFSource  # here and below: machines that only measure lack the package

        gguf = GGUFSource(source.path)
        return parse_gguf_config(gguf.file, gguf.rope_freqs())
    config = source.path if source.path.is_file() else source.path / "config.json"
    generation = config.parent / "generation_config.json"
    return parse_hf_config(
        _read_json(config),
        str(config),
        _read_json(generation) if generation.is_file() else None,
    )


def open_tensors(source: ModelSource) -> TensorSource:
    """The tensors of a Hugging Face folder or a GGUF file, by Hugging Face's names."""
    if source.kind == "gguf":
        from jaxkv.loading.gguf_source import GGUFSource

        return GGUFSource(source.path)
    return SafetensorsSource(source.path)


def check_checkpoint(source: ModelSource, config: ModelConfig) -> None:
    """Raises CheckpointError when tensors are missing, extra, misshapen or cut off; reads headers only."""
    if source.kind != "orbax":  # Orbax tells while it restores
        expected = {hf_name(p.path): p for p in _parameters(_abstract_model(config, "float32", None))}
        _check(open_tensors(source), expected, config.tie_word_embeddings)


def _abstract_model(config: ModelConfig, dtype: str, max_model_len: int | None) -> Llama:
    return nnx.eval_shape(lambda: Llama(config, dtype=np.dtype(dtype), max_model_len=max_model_len))


def _parameters(model: Llama) -> list[_Parameter]:
    variables = nnx.to_flat_state(nnx.split(model)[1])
    return [_Parameter(path, v.get_value().shape, v.get_value().dtype) for path, v in variables]


def load_weights(
    source: ModelSource,
    config: ModelConfig,
    *,
    dtype: str,
    sharding: ShardingFor | None = None,
    max_model_len: int | None = None,
    progress: Progress | None = None,
) -> Llama:
    """The model with its weights on the device.

    Args:
      config: as `load_config` gave it.
      dtype: "float32", "bfloat16" or "float16": stored weights and activations.
      sharding: where each parameter goes; None is the default device.
      max_model_len: handed to the model (`dynamic` rope scaling only).
      progress: told the bytes placed.

    Resident host memory above that before the call stays under the weights in `dtype` (where the device is the host)
    plus the largest tensor plus 10 %. Raises CheckpointError listing missing, extra and misshapen tensors.
    """
    model = _abstract_model(config, dtype, max_model_len)
    graph, state = nnx.split(model)
    variables = dict(nnx.to_flat_state(state))
    parameters = _parameters(model)
    total = sum(p.num_bytes for p in parameters)
    placement = {p.name: sharding(p.name, p.shape) if sharding else None for p in parameters}
    log.info("Loading %s: %d tensors, %.1f MB in %s", source.description, len(parameters), total / 1e6, dtype)
    resident_before = host_memory.resident_bytes()
    progress = progress or SilentProgress()
    if source.kind == "orbax":
        from jaxkv.loading import orbax

        arrays: Iterable[tuple[str, jax.Array]] = orbax.restore(
            source.path, {p.name: orbax.abstract_array(p.shape, p.dtype, placement[p.name]) for p in parameters}
        )
    else:
        arrays = _read_all(open_tensors(source), parameters, placement, config.tie_word_embeddings)
    by_name = {p.name: p for p in parameters}
    done = 0
    for name, array in arrays:
        variables[by_name[name].path] = variables[by_name[name].path].replace(array)
        done += by_name[name].num_bytes
        progress.update("Loading weights", done, total, "B")
    log.info(
        "Loaded: host memory peaked at most %.1f MB above the start (weights %.1f MB + largest tensor as float32 %.1f MB)",
        (host_memory.peak_resident_bytes() - resident_before) / 1e6,
        total / 1e6,
        max(4 * np.prod(p.shape) for p in parameters) / 1e6,
    )
    return nnx.merge(graph, nnx.from_flat_state(variables))


def _read_all(
    tensors: TensorSource, parameters: list[_Parameter], placement: dict[str, Any], tied: bool
) -> Iterable[tuple[str, jax.Array]]:
    expected = {hf_name(p.path): p for p in parameters}
    _check(tensors, expected, tied)
    # In file order, so that the disk is read forwards.
    for name in tensors.names():
        if (parameter := expected.get(name)) is None:
            continue
        host = tensors.read(name, parameter.dtype)
        array = jax.device_put(host, placement[parameter.name])
        array.block_until_ready()  # before the next tensor is allocated, or two of them would exist on the host
        del host
        yield parameter.name, array


def hf_name(path: tuple[str | int, ...]) -> str:
    """Hugging Face's name of the parameter at `path` in the model."""
    if path[0] == "lm_head":
        return _HEAD
    return "model." + ".".join(_RENAMED.get(str(part), str(part)) for part in path)


def _check(tensors: TensorSource, expected: dict[str, _Parameter], tied: bool) -> None:
    names = tensors.names()
    present = set(names)
    missing = [f"{name} {list(p.shape)}" for name, p in expected.items() if name not in present]
    extra, misshapen = [], []
    for name in names:
        if name in expected:
            if tensors.shape(name) != expected[name].shape:
                misshapen.append(
                    f"{tensors.location(name)}: expected {list(expected[name].shape)}, found {list(tensors.shape(name))}"
                )
        elif name == _HEAD and tied:
            _check_tied_head(tensors)
        elif not name.endswith(_KNOWN_BUFFERS):
            extra.append(f"{tensors.location(name)} {list(tensors.shape(name))}")
    problems = [
        f"{len(found)} {kind} ({'; '.join(found[:_MOST_LISTED])}{'; ...' if len(found) > _MOST_LISTED else ''})"
        for kind, found in (("missing", missing), ("of another shape", misshapen), ("not expected", extra))
        if found
    ]
    if problems:
        place = tensors.location(names[0]).rpartition(":")[0] if names else "the checkpoint"
        raise CheckpointError(
            f"{place}: the tensors do not fit the architecture that its configuration describes: {', '.join(problems)}."
        )


def _check_tied_head(tensors: TensorSource) -> None:
    """A stored head beside tied embeddings must be the same numbers: whichever is used, nothing changes."""
    same = tensors.shape(_HEAD) == tensors.shape(_EMBEDDING) and np.array_equal(
        tensors.read(_HEAD).view(np.uint8), tensors.read(_EMBEDDING).view(np.uint8)
    )
    if not same:
        raise CheckpointError(
            f"{tensors.location(_HEAD)}: differs from the embedding, though the config sets tie_word_embeddings. Set it "
            "to false in config.json if the head was trained apart."
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing.") from error
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}.")
    return value
