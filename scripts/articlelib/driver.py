"""Users of an engine: each asks, reads the answer, thinks, and asks again with all of it in front.

The same loop drives a real engine and a simulated one; what differs is how time passes while nobody asks.
"""

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from jaxkv.control.engine import Engine
from jaxkv.core.errors import RequestError
from jaxkv.core.metrics import RequestMetrics, percentile
from jaxkv.core.request import Request, SamplingParams

Tokens = tuple[int, ...]


class Turn(NamedTuple):
    """`think`: seconds between the answer before and this question."""

    tokens: Tokens
    output_len: int
    think: float = 0.0


@dataclasses.dataclass(frozen=True)
class Session:
    """One user. Each turn's prompt is everything before it, answers included, and its own tokens.

    Attributes:
      arrival: seconds after the start.
      caller: who they are, for figures by caller.
    """

    arrival: float
    turns: tuple[Turn, ...]
    caller: str = ""


class Asked(NamedTuple):
    """A finished request and who asked."""

    caller: str
    metrics: RequestMetrics


@dataclasses.dataclass(frozen=True)
class Served:
    """What became of all sessions.

    Attributes:
      refused: requests that could never fit.
      start: on the engine's clock. seconds: from there to the last token.
      arrivals_end: when the last session arrived.
      computed_tokens: run through prefill. outputs: tokens by request id.
    """

    asked: tuple[Asked, ...]
    refused: tuple[str, ...]
    start: float
    seconds: float
    arrivals_end: float
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    generated_tokens: int
    preemptions: int
    outputs: dict[str, Tokens]

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def requests_per_second(self) -> float:
        return len(self.asked) / self.seconds

    @property
    def steady_requests_per_second(self) -> float:
        """In the second half of the time in which sessions arrive: what an overloaded engine carries. Raises ValueError where
        none ends in it: then so few came that this says nothing."""
        begin = (self.start + self.arrivals_end) / 2
        count = sum(begin < asked.metrics.finished <= self.arrivals_end for asked in self.asked)
        if not count:
            raise ValueError(f"no request ended between {begin:.1f} and {self.arrivals_end:.1f} s: let more sessions come")
        return count / (self.arrivals_end - begin)

    @property
    def tokens_per_second(self) -> float:
        """Generated ones."""
        return self.generated_tokens / self.seconds

    @property
    def computed_per_request(self) -> float:
        return self.computed_tokens / len(self.asked)

    def times(self, what: str) -> list[float]:
        """Attribute `what` of every request that has it: ttft, queue_time, prefill_time, tpot, e2e."""
        found = (getattr(asked.metrics, what) for asked in self.asked)
        return [value for value in found if value is not None]

    def mean(self, what: str) -> float:
        values = self.times(what)
        return sum(values) / len(values)

    def percentile(self, what: str, q: float) -> float:
        return percentile(self.times(what), q)


def serve(
    engine: Engine, sessions: Sequence[Session], wait_until: Callable[[float], None], *, closes: bool = False
) -> Served:
    """Serve all sessions to their end.

    Args:
      engine: fresh, so that its counters are those of this run; it must keep all finished requests (window None).
      wait_until: lets time pass until a moment of the engine's clock.
      closes: who would ask again after the last session has arrived does not, so that the load stays what it was.

    Raises RuntimeError: the engine failed.
    """
    start, numbers = engine.clock.now(), itertools.count()
    due: list[tuple[float, int, int, Tokens]] = []  # when, which request, session, history
    for i, session in enumerate(sessions):
        heapq.heappush(due, (start + session.arrival, next(numbers), i, ()))
    turns, running, refused = [0] * len(sessions), {}, []
    callers, outputs = {}, {}
    last, arrivals_end = start, start + max(session.arrival for session in sessions)
    while due or engine.has_work():
        if not engine.has_work():
            wait_until(max(due[0][0], engine.clock.now()))
        while due and due[0][0] <= engine.clock.now():
            when, number, i, history = heapq.heappop(due)
            turn = sessions[i].turns[turns[i]]
            request = _request(f"{i}.{turns[i]}", history + turn.tokens, turn.output_len, when)
            try:
                engine.add(request)
            except RequestError as error:
                refused.append(str(error))
                continue
            running[request.request_id] = i, request.prompt_token_ids
            callers[request.request_id], outputs[request.request_id] = sessions[i].caller, ()
        for output in engine.step():
            outputs[output.request_id] += output.token_ids
            if output.finish_reason is None:
                continue
            i, prompt = running.pop(output.request_id)
            turns[i] += 1
            last = engine.clock.now()
            if turns[i] < len(sessions[i].turns):
                when = last + sessions[i].turns[turns[i]].think
                if not closes or when <= arrivals_end:
                    heapq.heappush(due, (when, next(numbers), i, prompt + outputs[output.request_id]))
        if engine.failed is not None:
            raise RuntimeError(f"the engine failed: {engine.failed}")
    stats = engine.stats
    return Served(
        asked=tuple([Asked(callers[metrics.request_id], metrics) for metrics in stats.requests]),
        refused=tuple(refused),
        start=start,
        seconds=last - start,
        arrivals_end=arrivals_end,
        prompt_tokens=stats.prompt_tokens,
        cached_tokens=stats.cached_tokens,
        computed_tokens=stats.computed_tokens,
        generated_tokens=stats.generated_tokens,
        preemptions=stats.preemptions,
        outputs=outputs,
    )


def at_once(prompts: Iterable[Tokens], output_len: int, caller: str = "") -> list[Session]:
    """A session of one request for each prompt."""
    return [Session(0.0, (Turn(tuple(prompt), output_len),), caller) for prompt in prompts]


def _request(request_id: str, prompt: Tokens, output_len: int, arrival: float) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    return Request(request_id, prompt, sampling, arrival)
