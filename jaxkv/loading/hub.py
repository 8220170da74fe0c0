"""Fetches a repo from the Hugging Face Hub, or says plainly why not. Imports no jax."""

from collections.abc import Sequence
from pathlib import Path

from tqdm.auto import tqdm

from jaxkv.core.errors import CheckpointError
from jaxkv.core.progress import Progress

# Weights as safetensors, configuration, tokenizer and chat template; no pickles, no other frameworks' weights.
ALLOW_PATTERNS = ["*.safetensors", "*.json", "*.model", "*.jinja", "merges.txt", "vocab.txt"]
# A second copy of the weights in the authors' own layout.
IGNORE_PATTERNS = ["original/*", "consolidated*.safetensors", "onnx/*", "*/*.safetensors"]


def snapshot(
    repo_id: str,
    *,
    revision: str | None,
    download_dir: str | None,
    progress: Progress,
    patterns: Sequence[str] = ALLOW_PATTERNS,
) -> Path:
    """Folder of the repo at `revision`, from the cache where it is complete there; `patterns` name the files wanted.

    Raises CheckpointError when the repo is gated, not found, or neither cached nor reachable.
    """
    # Imported here: it takes 0.3 s, and local models do not need it.
    import huggingface_hub
    from huggingface_hub import errors

    at = f" at revision {revision!r}" if revision else ""
    bar = _bar_for(progress, f"Downloading {repo_id}")
    try:
        folder = huggingface_hub.snapshot_download(
            repo_id,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=list(patterns),
            ignore_patterns=IGNORE_PATTERNS,
            tqdm_class=bar,
        )
    except errors.GatedRepoError as error:  # a kind of RepositoryNotFoundError, so it comes first
        raise CheckpointError(
            f"{repo_id} is gated: accept its licence on huggingface.co, then log in with `hf auth login` or set HF_TOKEN."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{repo_id}: no such model on the Hugging Face Hub (or a private one: log in with `hf auth login`), and no "
            f"local file or folder of that name under {Path.cwd()}."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{repo_id} has no revision {revision!r}; check --revision.") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, errors.HfHubHTTPError, OSError) as error:
        raise CheckpointError(
            f"{repo_id}{at}: not in the local cache, and the Hugging Face Hub can't be reached ({_first_line(error)}). "
            f"There is no local file or folder of that name under {Path.cwd()} either. Download it where there is a "
            "network (`hf download`) and give its folder as --model, or use --model=demo."
        ) from error
    bar.finish()
    return Path(folder)


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def _bar_for(progress: Progress, stage: str) -> type[tqdm]:
    """A tqdm class that shows nothing and forwards the bars that count all bytes.

    The library makes several bars; totals grow while it learns of files, so the stage is ended by `finish` alone.
    """

    class Forwarder(tqdm):
        done, largest_total = 0, 0

        def __init__(self, *args, **kwargs):
            self._counts_bytes = kwargs.get("unit") == "B"
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": True})
            self.n, self.total = kwargs.get("initial") or 0, kwargs.get("total") or 0

        def update(self, n=1):
            self.n += n or 0  # a disabled tqdm does not count
            if self._counts_bytes and self.total:
                # Bars for bytes received and bytes written count the same files: the further one is shown.
                Forwarder.largest_total = max(Forwarder.largest_total, int(self.total))
                Forwarder.done = max(Forwarder.done, int(self.n))
                progress.update(stage, min(Forwarder.done, Forwarder.largest_total - 1), Forwarder.largest_total, "B")

        @classmethod
        def finish(cls) -> None:
            if cls.largest_total:
                progress.update(stage, cls.largest_total, cls.largest_total, "B")

    return Forwarder
