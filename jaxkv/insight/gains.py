"""What a remedy brings: the same requests replayed without it and with it."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping

from jaxkv.insight.diagnosis import Diagnosis
from jaxkv.insight.findings import Finding, Gain
from jaxkv.insight.prompt_log import PromptLog
from jaxkv.insight.prompt_replay import Pool, PromptReplay, replay_prompts

World = tuple[PromptLog, Pool]
"""Requests, and the cache that serves them."""


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A finding, the requests that have the fault, and the worlds to replay for its gain: without the remedy (None: as
    they are), and by name with each part of it added."""

    finding: Finding
    numbers: Collection[int]
    before: Callable[[], World] | None = None
    after: Mapping[str, Callable[[], World]] = dataclasses.field(default_factory=dict)


def first_replayed(log: PromptLog, most_symbols: int) -> int:
    """Number of the first request of those that are replayed; the last one always is."""
    first = len(log.requests) - 1
    left = most_symbols * log.symbol_bytes - len(log.requests[first].sequence)
    while first and (left := left - len(log.requests[first - 1].sequence)) >= 0:
        first -= 1
    return first


class Replays:
    """Hit rates of the log's requests from `first` on, in different worlds."""

    def __init__(self, diagnosis: Diagnosis, first: int):
        self._now = (diagnosis.log, diagnosis.pool)
        self._first = first

    def gain(self, proposal: Proposal) -> Gain:
        before, own_before = self._rates(
            self._as_it_is if proposal.before is None else self._replay(proposal.before()), proposal
        )
        steps, own_after, pool = [], 0.0, self._now[1]
        for name, make in proposal.after.items():
            world = make()
            rate, own_after = self._rates(self._replay(world), proposal)
            steps.append((name, rate))
            pool = world[1]
        num_replayed = len(self._now[0].requests) - self._first
        return Gain(
            before=before,
            after=steps[-1][1],
            own_before=own_before,
            own_after=own_after,
            steps=tuple(steps),
            requests=num_replayed,
            block_size=self._now[0].block_size,
            capacity_blocks=pool.capacity_blocks,
        )

    @functools.cached_property
    def _as_it_is(self) -> PromptReplay:
        return self._replay(self._now)

    def _replay(self, world: World) -> PromptReplay:
        log, pool = world
        return replay_prompts(dataclasses.replace(log, requests=log.requests[self._first :]), pool)

    def _rates(self, replay: PromptReplay, proposal: Proposal) -> tuple[float, float]:
        """Of all requests, and of those with the fault."""
        own = [number - self._first for number in proposal.numbers if number >= self._first]
        return replay.hit_rate, replay.hit_rate_of(own)
