"""Converts a checkpoint to Orbax, which restores straight into any sharding.

  python scripts/convert_checkpoint.py --model=demo --output=/tmp/demo-orbax --dtype=bfloat16

Exit codes: 0 done, 2 something the user can mend (one line on stderr).
"""

import sys

import jax
from absl import app, flags, logging
from tqdm.auto import tqdm

from jaxkv.core.errors import ConfigError, UserError
from jaxkv.loading.convert import convert
from jaxkv.loading.resolve import resolve_model

_MODEL = flags.DEFINE_string(
    "model", "demo", "`demo`, a Hugging Face repo id, a folder of safetensors or a .gguf file."
)
_OUTPUT = flags.DEFINE_string("output", None, "Folder to write; must not exist or be empty.")
_DTYPE = flags.DEFINE_enum(
    "dtype", "auto", ["auto", "float32", "bfloat16", "float16"], "Stored dtype; auto keeps the checkpoint's own."
)
_REVISION = flags.DEFINE_string("revision", None, "Branch, tag or commit of a Hugging Face repo.")
_DOWNLOAD_DIR = flags.DEFINE_string("download_dir", None, "Where downloads are cached.")


class _TerminalProgress:
    """One bar a stage, on stderr."""

    def __init__(self):
        self._bars: dict[str, tqdm] = {}

    def update(self, stage: str, done: int, total: int, unit: str = "") -> None:
        if stage not in self._bars:
            self._bars[stage] = tqdm(desc=stage, unit=unit or "it", unit_scale=True)
        bar = self._bars[stage]
        bar.total = total
        bar.update(done - bar.n)
        if done == total:
            bar.close()


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"Unexpected arguments: {argv[1:]}")
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # orbax reports every step at INFO
    # Conversion needs no accelerator, and must not take one from a running server.
    jax.config.update("jax_platforms", "cpu")
    progress = _TerminalProgress()
    try:
        if not _OUTPUT.value:
            raise ConfigError("--output is missing: name the folder to write")
        source = resolve_model(
            _MODEL.value, revision=_REVISION.value, download_dir=_DOWNLOAD_DIR.value, progress=progress
        )
        folder = convert(source, _OUTPUT.value, dtype=_DTYPE.value, progress=progress)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    sys.stdout.write(f"Wrote {folder}\n")


if __name__ == "__main__":
    app.run(main)
