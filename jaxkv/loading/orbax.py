"""Checkpoints in Orbax's format, written once by scripts/convert_checkpoint.py and restored into any sharding.

A folder holds `params/` (Orbax, a flat {parameter name: array}), jaxkv_config.json (the ModelConfig) and the
tokenizer's files as Hugging Face names them.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from jaxkv.core.errors import CheckpointError
from jaxkv.core.model_config import ModelConfig, RopeConfig
from jaxkv.loading.host_memory import freed_memory_returned
from jaxkv.loading.resolve import ORBAX_CONFIG

_PARAMS = "params"
_FORMAT = 1
_CHUNK_BYTES = 2**20
"""Stored in pieces of this size, so that a device reads its own part alone and little exists twice meanwhile (whole
arrays as one chunk: 95 MB above the weights where these take 51, the largest of them being 49 MB)."""


def abstract_array(shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding | None) -> Any:
    """What `restore` is to make of a parameter; None is the default device."""
    sharding = sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def save(folder: str | Path, model: nnx.Module, config: ModelConfig) -> None:
    """Write weights and config into `folder`, which exists; weights keep their dtype."""
    folder = Path(folder).absolute()
    state = nnx.to_flat_state(nnx.split(model)[1])
    arrays = {".".join(map(str, path)): variable.get_value() for path, variable in state}
    with _checkpointer() as checkpointer:
        save_args = {name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for name in arrays}
        checkpointer.save(folder / _PARAMS, args=ocp.args.PyTreeSave(arrays, save_args=save_args))
    document = {"format": _FORMAT, "model": dataclasses.asdict(config)}
    (folder / ORBAX_CONFIG).write_text(json.dumps(document, indent=2) + "\n")


def load_config(folder: str | Path) -> ModelConfig:
    """ModelConfig of a checkpoint folder; raises CheckpointError when it can't be read."""
    path = Path(folder) / ORBAX_CONFIG
    try:
        document = json.loads(path.read_text())
        if document["format"] != _FORMAT:
            raise CheckpointError(
                f"{path}: format is {document['format']!r}, this version reads {_FORMAT}; convert again."
            )
        model = dict(document["model"])
        model["rope"] = RopeConfig(**model["rope"])
        for name in ("window_sizes", "eos_token_ids"):  # JSON knows no tuples
            model[name] = tuple(model[name])
        return ModelConfig(**model)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}: not readable as an Orbax checkpoint's config: {error!r}. Convert again."
        ) from error


def restore(folder: str | Path, targets: dict[str, Any]) -> Iterator[tuple[str, jax.Array]]:
    """Restore every target straight into its sharding and dtype: each device reads only its own part.

    Args:
      targets: parameter name -> jax.ShapeDtypeStruct with a sharding, in the order to yield.

    Raises CheckpointError for missing, extra or misshapen parameters, and for damaged files.
    """
    path = Path(folder).absolute() / _PARAMS
    with _checkpointer() as checkpointer, freed_memory_returned():
        try:
            stored = {
                name: tuple(entry.shape) for name, entry in checkpointer.metadata(path).item_metadata.tree.items()
            }
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(
                f"{path}: no readable Orbax checkpoint: {error!r}. Convert the model again."
            ) from error
        _check(path, stored, targets)
        for group in _groups(targets):
            yield from _restore_group(checkpointer, path, group).items()


def _groups(targets: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Targets in order, as many at a time as the largest one has bytes.

    A restore costs 40 ms however little it reads (272 parameters one by one: 13 s), and all that it reads exists once
    more on the host: this many bytes do no harm, since the largest parameter alone needs them.
    """
    sizes = {name: int(np.prod(target.shape)) * target.dtype.itemsize for name, target in targets.items()}
    limit = max(sizes.values(), default=0)
    group: dict[str, Any] = {}
    group_bytes = 0
    for name, target in targets.items():
        if group and group_bytes + sizes[name] > limit:
            yield group
            group, group_bytes = {}, 0
        group[name] = target
        group_bytes += sizes[name]
    if group:
        yield group


def _restore_group(checkpointer: ocp.Checkpointer, path: Path, group: dict[str, Any]) -> dict[str, jax.Array]:
    args = {
        name: ocp.ArrayRestoreArgs(sharding=target.sharding, dtype=target.dtype, global_shape=target.shape)
        for name, target in group.items()
    }
    try:
        return checkpointer.restore(path, args=ocp.args.PyTreeRestore(group, restore_args=args, partial_restore=True))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: parameters {', '.join(list(group)[:3])}, ... can't be read: {error}") from error


def _checkpointer() -> ocp.Checkpointer:
    # Weights hardly compress (bfloat16 to 75 %, float32 to 92 %), and unpacking would be one more copy.
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False))


def _check(path: Path, stored: dict[str, tuple[int, ...]], targets: dict[str, Any]) -> None:
    missing = [name for name in targets if name not in stored]
    extra = [name for name in stored if name not in targets]
    wrong = [
        f"{name}: expected {list(target.shape)}, found {list(stored[name])}"
        for name, target in targets.items()
        if name in stored and stored[name] != target.shape
    ]
    if missing or extra or wrong:
        raise CheckpointError(
            f"{path}: the parameters do not fit {ORBAX_CONFIG}: missing {missing[:5]}, not expected {extra[:5]}, "
            f"of another shape {wrong[:5]}. Convert the model again."
        )
