"""How often XLA compiles within a block of code."""

import contextlib
from collections.abc import Iterator

from jax import monitoring


class Count:
    def __init__(self) -> None:
        self.compilations = 0
        self.traces = 0


@contextlib.contextmanager
def counting_compilations() -> Iterator[Count]:
    count = Count()

    def listen(event: str, duration_secs: float, **_) -> None:
        count.compilations += event == "/jax/core/compile/backend_compile_duration"
        count.traces += event == "/jax/core/compile/jaxpr_trace_duration"

    monitoring.register_event_duration_secs_listener(listen)
    try:
        yield count
    finally:
        monitoring.unregister_event_duration_listener(listen)
