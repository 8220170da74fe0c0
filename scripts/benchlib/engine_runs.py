"""jaxkv's engine, started once and then run many times under other scheduler settings."""

import collections
import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxkv.control.engine import Engine
from jaxkv.control.executor import Executor
from jaxkv.core.request import Request, SamplingParams

if TYPE_CHECKING:
    from jaxkv.startup import StartedEngine  # brings jax


def fresh_engine(
    started: "StartedEngine", *, executor: Executor | None = None, max_in_flight: int = 2, **settings: Any
) -> Engine:
    """A new engine with an empty cache on the executables and memory of a started one.

    Whatever engine used them before must have no work left, and must not be used again: the blocks are the new one's.

    Args:
      executor: one around the started engine's own.
      settings: fields of SchedulerConfig to change.
    """
    base = started.engine
    config = dataclasses.replace(base.scheduler.config, **settings)
    return Engine(executor or base.executor, config, clock=base.clock, max_in_flight=max_in_flight)


def greedy_request(
    request_id: str, prompt: Sequence[int], output_len: int, *, arrival_time: float | None = None
) -> Request:
    """Exactly `output_len` tokens, end-of-sequence ignored."""
    sampling = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    return Request(request_id, tuple(prompt), sampling, arrival_time)


def random_prompt(rng: np.random.Generator, length: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(rng.integers(0, vocab_size, length).tolist())


@dataclasses.dataclass(frozen=True)
class Run:
    """What came of `run_requests`: seconds until the last token, and each request's tokens."""

    seconds: float
    tokens: dict[str, tuple[int, ...]]


def run_requests(engine: Engine, requests: Iterable[Request]) -> Run:
    """Serve requests to their end. Those with an `arrival_time` on the engine's clock are added when it has come, and
    what they waited for a running step to end counts as theirs; the others are added at once.

    Raises:
      RuntimeError: the engine failed.
    """
    later = collections.deque(sorted(requests, key=lambda request: request.arrival_time or 0.0))
    tokens: dict[str, tuple[int, ...]] = {}
    begin = time.perf_counter()
    while later or engine.has_work():
        while later and (later[0].arrival_time or 0.0) <= engine.clock.now():
            engine.add(later.popleft())
        if not engine.has_work():
            time.sleep(max(0.0, later[0].arrival_time - engine.clock.now()))
        for output in engine.step():
            tokens[output.request_id] = tokens.get(output.request_id, ()) + output.token_ids
    if engine.failed is not None:
        raise RuntimeError(f"the engine failed: {engine.failed}")
    return Run(time.perf_counter() - begin, tokens)
