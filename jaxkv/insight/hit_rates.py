"""Hit rates and latencies of groups of requests, where one mean over all of them would hide the slow ones.

Works on RequestRecords, so that a log gives the same tables as a running server. Standard library only.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from jaxkv.core.metrics import PROMPT_LENGTHS, MissReason, percentile, prompt_length_bucket
from jaxkv.core.request_record import RequestRecord

NO_CALLER, OTHER_CALLERS = "(none)", "(other)"
# What makes a tail worth a warning: see `hidden_tails`.
GOOD_HIT_RATE, POOR_SHARE, SLOW_FACTOR, FEWEST_REQUESTS = 0.5, 0.5, 3.0, 5


@dataclasses.dataclass(frozen=True)
class Quantiles:
    """NaN of nothing."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Quantiles":
        known = sorted([value for value in values if value is not None])
        return cls(*[percentile(known, q) for q in (50, 95, 99)])

    @classmethod
    def reached(cls, values: Iterable[float]) -> "Quantiles":
        """What 50, 95 and 99 % of the values are not below: of hit rates the low end is the bad one."""
        known = sorted(values)
        return cls(*[percentile(known, 100 - q) for q in (50, 95, 99)])


@dataclasses.dataclass(frozen=True)
class Group:
    """Requests taken together. Times are seconds.

    Attributes:
      missed: prompt tokens by value of MissReason.
      hit_rates: of single requests, reached by 50, 95 and 99 % of them.
      split: sums of the times in queue, prefill and decode.
    """

    name: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    preemptions: int
    missed: Mapping[str, int]
    hit_rates: Quantiles
    queue: Quantiles
    prefill: Quantiles
    decode: Quantiles
    ttft: Quantiles
    itl: Quantiles
    e2e: Quantiles
    split: Mapping[str, float]

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were cached; NaN without any."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else math.nan

    @classmethod
    def of(cls, name: str, records: Sequence[RequestRecord]) -> "Group":
        phases = ("queue", "prefill", "decode")
        return cls(
            name=name,
            requests=len(records),
            **{
                counted: sum([getattr(record, counted) for record in records])
                for counted in ("prompt_tokens", "cached_tokens", "computed_tokens", "output_tokens", "preemptions")
            },
            missed={
                reason.value: sum([record.missed.get(reason.value, 0) for record in records]) for reason in MissReason
            },
            hit_rates=Quantiles.reached([record.hit_rate for record in records]),
            **{
                time: Quantiles.of([getattr(record, time) for record in records])
                for time in (*phases, "ttft", "itl", "e2e")
            },
            split={phase: sum([getattr(record, phase) or 0.0 for record in records]) for phase in phases},
        )


def groups(split: Mapping[str, Sequence[RequestRecord]]) -> tuple[Group, ...]:
    return tuple([Group.of(name, records) for name, records in split.items()])


def split_by_prompt_length(records: Iterable[RequestRecord]) -> dict[str, list[RequestRecord]]:
    """All of `PROMPT_LENGTHS`, in order, empty ones included."""
    split: dict[str, list[RequestRecord]] = {name: [] for name in PROMPT_LENGTHS}
    for record in records:
        split[PROMPT_LENGTHS[prompt_length_bucket(record.prompt_tokens)]].append(record)
    return split


def split_by_caller(records: Iterable[RequestRecord], most: int = 10) -> dict[str, list[RequestRecord]]:
    """The `most` callers with the most prompt tokens, in that order, then all others together, if there are any."""
    callers: dict[str, list[RequestRecord]] = collections.defaultdict(list)
    for record in records:
        callers[record.caller or NO_CALLER].append(record)
    others = callers.pop(OTHER_CALLERS, [])  # whoever calls themselves that
    tokens = {name: sum([record.prompt_tokens for record in own]) for name, own in callers.items()}
    ranked = sorted(callers, key=lambda name: (-tokens[name], name))  # equal ones by name: a table keeps still
    others += [record for name in ranked[most:] for record in callers[name]]
    split = {name: callers[name] for name in ranked[:most]}
    return split | {OTHER_CALLERS: others} if others else split


@dataclasses.dataclass(frozen=True)
class TimeBin:
    """What ended from `start` (Unix time) to `start + seconds`."""

    start: float
    seconds: float
    group: Group


def by_time(records: Iterable[RequestRecord], start: float, seconds: float, count: int) -> tuple[TimeBin, ...]:
    """`count` bins of `seconds` each from the Unix time `start`, by when requests ended; what ended outside is left
    out."""
    bins: list[list[RequestRecord]] = [[] for _ in range(count)]
    for record in records:
        if record.ended is not None and 0 <= (place := math.floor((record.ended - start) / seconds)) < count:
            bins[place].append(record)
    starts = [start + place * seconds for place in range(count)]
    return tuple([TimeBin(begin, seconds, Group.of("", own)) for begin, own in zip(starts, bins, strict=True)])


@dataclasses.dataclass(frozen=True)
class HiddenTail:
    """A group that a good mean hides. P99 of TTFT in seconds, of the group and of all other requests."""

    name: str
    requests: int
    hit_rate: float
    ttft_p99: float
    ttft_p99_of_others: float


def hidden_tails(split: Mapping[str, Sequence[RequestRecord]]) -> tuple[HiddenTail, ...]:
    """The groups that miss while the whole seems fine, slowest first.

    The hit rate over all is at least 50 %, and the group, of 5 requests or more, has at most half of it and a P99 of
    TTFT at least three times that of all others.
    """
    ttft = {name: [record.ttft for record in records if record.ttft is not None] for name, records in split.items()}
    rates = {name: _hit_rate(records) for name, records in split.items()}
    whole = _hit_rate([record for records in split.values() for record in records])
    tails = []
    for name, records in split.items():
        others = [seconds for other in ttft if other != name for seconds in ttft[other]]
        if len(records) < FEWEST_REQUESTS or not others or not ttft[name]:
            continue
        own_p99, others_p99 = percentile(ttft[name], 99), percentile(others, 99)
        if whole >= GOOD_HIT_RATE and rates[name] <= POOR_SHARE * whole and own_p99 >= SLOW_FACTOR * others_p99:
            tails.append(HiddenTail(name, len(records), rates[name], own_p99, others_p99))
    return tuple(sorted(tails, key=lambda tail: -tail.ttft_p99))


def _hit_rate(records: Sequence[RequestRecord]) -> float:
    """Of tokens; NaN of none."""
    tokens = sum([record.prompt_tokens for record in records])
    return sum([record.cached_tokens for record in records]) / tokens if tokens else math.nan
