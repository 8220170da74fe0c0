"""Any supported checkpoint to an Orbax one."""

import dataclasses
import shutil
import tempfile
from pathlib import Path

from jaxkv.core.errors import ConfigError
from jaxkv.core.progress import Progress
from jaxkv.loading import orbax
from jaxkv.loading.resolve import ModelSource
from jaxkv.loading.weights import load_config, load_weights

# What transformers and we read a tokenizer from; generation_config.json goes along for other programs.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip


def convert(source: ModelSource, output: str | Path, *, dtype: str = "auto", progress: Progress | None = None) -> Path:
    """Write `source` as an Orbax checkpoint into the folder `output`, which appears whole or not at all.

    Args:
      dtype: stored dtype of the weights; auto keeps the checkpoint's own (float32 for a quantised GGUF).

    Returns the folder. Raises ConfigError when it is already there and not empty, CheckpointError for a bad source.
    """
    output = Path(output).expanduser().absolute()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output={output} exists already; choose another folder or remove it.")
    config = load_config(source)
    config = dataclasses.replace(config, dtype=config.dtype if dtype == "auto" else dtype)
    model = load_weights(source, config, dtype=config.dtype, progress=progress)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}-"))
        try:
            orbax.save(scratch, model, config)
            _save_tokenizer(source, scratch)
            scratch.chmod(0o755)  # mkdtemp makes it private
            scratch.replace(output)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"--output={output} can't be written: {error}.") from error
    return output


def _save_tokenizer(source: ModelSource, folder: Path) -> None:
    if source.kind == "gguf":
        from jaxkv.tokenization.gguf_tokenizer import save_pretrained_from_gguf

        save_pretrained_from_gguf(source.path, folder)
        return
    for name in TOKENIZER_FILES:
        if (source.path / name).is_file():
            shutil.copyfile(source.path / name, folder / name)
