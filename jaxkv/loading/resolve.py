"""From what the user calls a model to files on this machine. Imports no jax."""

import dataclasses
import re
from pathlib import Path
from typing import Literal

from jaxkv.core.errors import CheckpointError
from jaxkv.core.progress import Progress, SilentProgress
from jaxkv.loading import demo_model, hub

ORBAX_CONFIG = "jaxkv_config.json"
"""Marks a folder written by scripts/convert_checkpoint.py."""

# What the Hub accepts: `name` or `owner/name`.
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """A checkpoint on disk.

    Attributes:
      kind: "huggingface" (folder with config.json and safetensors), "gguf" (one file), "orbax" (folder).
      path: that folder or file; a config.json where only that is wanted.
      name: short name, e.g. for the server's model id.
      description: what it is, for logs.
    """

    kind: Literal["huggingface", "gguf", "orbax"]
    path: Path
    name: str
    description: str


def resolve_model(
    model: str,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    progress: Progress | None = None,
    config_only: bool = False,
) -> ModelSource:
    """Find the model, fetching it when it is not here yet.

    Args:
      model: `demo`, a `.gguf` file, a folder, or a Hugging Face repo id; what exists on disk wins over a repo id.
      revision: branch, tag or commit of a repo.
      download_dir: where downloads are kept; None is each library's own cache.
      progress: told the bytes downloaded.
      config_only: the weights are not wanted: of a repo only config.json is fetched, and a path may be that file.

    Raises CheckpointError saying what was looked for and what to do.
    """
    progress = progress or SilentProgress()
    if model == "demo":
        path = demo_model.fetch(demo_model.DEMO, download_dir=download_dir, progress=progress)
        return ModelSource("gguf", path, "demo", f"{demo_model.DEMO.title} ({path})")
    path = Path(model).expanduser()
    if path.exists():
        return _local(path, config_only)
    if _looks_like_path(model):
        raise CheckpointError(f"--model={model}: no such file or folder ({path.absolute()}).")
    if not _REPO_ID.fullmatch(model):
        raise CheckpointError(
            f"--model={model!r} is neither an existing file or folder nor a Hugging Face repo id (owner/name), nor 'demo'."
        )
    folder = hub.snapshot(
        model,
        revision=revision,
        download_dir=download_dir,
        progress=progress,
        patterns=("config.json",) if config_only else hub.ALLOW_PATTERNS,
    )
    source = _local(folder)
    return dataclasses.replace(source, name=model, description=f"{model} from the Hugging Face Hub ({folder})")


def _looks_like_path(model: str) -> bool:
    return (
        model.startswith(("/", "./", "../", "~"))
        or model.endswith((".gguf", ".json", "/"))
        or model.count("/") > 1
        or "\\" in model
    )


def _local(path: Path, config_only: bool = False) -> ModelSource:
    path = path.absolute()
    if path.is_file() and path.suffix == ".json" and config_only:
        name = path.parent.name if path.stem == "config" else path.stem
        return ModelSource("huggingface", path, name, f"configuration {path}")
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise CheckpointError(f"{path}: a single file must be a .gguf; for safetensors name the folder.")
        return ModelSource("gguf", path, path.stem, f"GGUF file {path}")
    if (path / ORBAX_CONFIG).is_file():
        return ModelSource("orbax", path, path.name, f"Orbax checkpoint {path}")
    if (path / "config.json").is_file():
        return ModelSource("huggingface", path, path.name, f"Hugging Face folder {path}")
    if ggufs := sorted(path.glob("*.gguf")):
        raise CheckpointError(f"{path}: a folder of GGUF files; name one of them, e.g. --model={ggufs[0]}.")
    raise CheckpointError(
        f"{path}: neither config.json (Hugging Face) nor {ORBAX_CONFIG} (Orbax checkpoint by convert_checkpoint) is there."
    )
