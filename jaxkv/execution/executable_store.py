"""Compiled step functions on disk, found by what they were made from, not by their lowered form.

JAX's own compilation cache is asked for a lowered module, and tracing and lowering take as long as loading: 0.7 s of
Python for each of the demo model's executables, one after the other under the GIL. Here the name of a file follows from
this project's source text, the versions, the device and the shapes, so a start with nothing changed traces nothing: 10 s
instead of 16.

The files hold machine code and are unpickled: the folder must be as private as a program's. Files that nobody has loaded
for a month are deleted.
"""

import contextlib
import functools
import hashlib
import logging
import os
import pickle
import platform
import time
from pathlib import Path

import flax
import jax
import jaxlib
from jax.experimental import serialize_executable

import pallas_kernels

log = logging.getLogger(__name__)

_SUFFIX = ".executable"
_KEPT_SECONDS = 30 * 24 * 3600
_JAX_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_threefry_partitionable",
    "jax_default_prng_impl",
)


class ExecutableStore:
    """Files in one folder; with no folder it holds nothing."""

    def __init__(self, folder: str | Path | None):
        self._folder = Path(folder) if folder else None

    def load(self, what: str) -> jax.stages.Compiled | None:
        """The executable stored under this description, or None. A file that can't be used is as good as none."""
        path = self._path(what)
        if path is None or not path.is_file():
            return None
        try:
            stored = pickle.loads(path.read_bytes())
            # One device, as compiled for: unless told, all of a machine's devices are meant.
            executable = serialize_executable.deserialize_and_load(*stored, execution_devices=jax.devices()[:1])
            os.utime(path)
            return executable
        except Exception as error:  # damaged, or from another world in spite of its name: compiling is always right
            log.warning("cannot use %s, compiling instead: %s", path, error)
            return None

    def save(self, what: str, executable: jax.stages.Compiled) -> None:
        """Best effort: a full disk or a backend that can't serialise costs a warm start, not the start."""
        path = self._path(what)
        if path is None:
            return
        scratch = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            scratch.write_bytes(pickle.dumps(serialize_executable.serialize(executable)))
            scratch.replace(path)  # whole or not at all
            for other in path.parent.glob("*" + _SUFFIX):
                if other.stat().st_mtime < time.time() - _KEPT_SECONDS:
                    other.unlink()
        except Exception as error:
            log.warning("cannot store %s: %s", path, error)
            with contextlib.suppress(OSError):
                scratch.unlink()

    def _path(self, what: str) -> Path | None:
        if self._folder is None:
            return None
        name = hashlib.sha256(f"{_world()}|{what}".encode()).hexdigest()
        return self._folder / (name + _SUFFIX)


@functools.cache
def _world() -> str:
    """Everything but the description that the machine code depends on."""
    source = hashlib.sha256()
    for package in (Path(__file__).parents[1], Path(pallas_kernels.__file__).parent):
        for path in sorted(package.rglob("*.py")):
            source.update(path.read_bytes())
    device = jax.devices()[0]
    parts = [
        source.hexdigest(),
        *(f"{module.__name__} {module.__version__}" for module in (jax, jaxlib, flax)),
        platform.python_version(),
        device.platform,
        device.device_kind,
        str(jax.device_count()),
        device.client.platform_version,
        platform.machine(),
        _cpu_features(),
        os.environ.get("XLA_FLAGS", ""),
        *(str(getattr(jax.config, name, None)) for name in _JAX_SETTINGS),
    ]
    return "|".join(parts)


def _cpu_features() -> str:
    """Code for one CPU may not run on another that shares its home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
