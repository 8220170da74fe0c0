"""What XLA compiles, counted for each thread: JAX tells its listeners in the thread that compiles."""

import threading

from jax import monitoring


class _Counts(threading.local):
    compiled = 0
    from_cache = 0


_counts = _Counts()


def compiled_here() -> int:
    """Executables made in this thread so far, by the compiler or out of the persistent cache."""
    return _counts.compiled


def from_cache_here() -> int:
    """How many of `compiled_here` came out of the persistent compilation cache."""
    return _counts.from_cache


def _on_duration(event: str, _seconds: float, **_) -> None:
    _counts.compiled += event == "/jax/core/compile/backend_compile_duration"


def _on_event(event: str, **_) -> None:
    _counts.from_cache += event == "/jax/compilation_cache/cache_hits"


monitoring.register_event_duration_secs_listener(_on_duration)
monitoring.register_event_listener(_on_event)
