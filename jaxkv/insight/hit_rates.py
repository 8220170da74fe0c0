"""Hit rates and latencies of groups of requests, where one mean over all of them would hide the slow ones.

Works on RequestRecords, so that a log gives the same tables as a running server. Standard library only.
"""

import collections
import dataclasses
import math
import operator
from collections.abc import Iterable, Mapping, Sequence

from jaxkv.core.metrics import PROMPT_LENGTHS, MissReason, prompt_length_bucket
from jaxkv.core.request_record import RequestRecord
from jaxkv.core.samples import percentile_of_sorted

NO_CALLER, OTHER_CALLERS = "(none)", "(other)"
# What makes a tail worth a warning: see `hidden_tails`.
GOOD_HIT_RATE, POOR_SHARE, SLOW_FACTOR, FEWEST_REQUESTS = 0.5, 0.5, 3.0, 5


_REASONS = [reason.value for reason in MissReason]
_COUNTS = {
    field: operator.attrgetter(field)
    for field in ("prompt_tokens", "cached_tokens", "computed_tokens", "output_tokens", "preemptions")
}
_TIMES = {field: operator.attrgetter(field) for field in ("queue", "prefill", "decode", "ttft", "itl", "e2e")}


@dataclasses.dataclass(frozen=True)
class Quantiles:
    """NaN of nothing."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Quantiles":
        return cls._of_sorted(sorted(values), (50, 95, 99))

    @classmethod
    def reached(cls, values: Iterable[float]) -> "Quantiles":
        """What 50, 95 and 99 % of the values are not below: of hit rates the low end is the bad one."""
        return cls._of_sorted(sorted(values), (50, 5, 1))

    @classmethod
    def _of_sorted(cls, ordered: Sequence[float], places: Sequence[float]) -> "Quantiles":
        return cls(*[percentile_of_sorted(ordered, q) for q in places])


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
        missed = dict.fromkeys(_REASONS, 0)
        for record in records:
            for reason, tokens in record.missed.items():
                missed[reason] = missed.get(reason, 0) + tokens  # also one of a later version's log
        times = {
            field: [seconds for seconds in map(get, records) if seconds is not None] for field, get in _TIMES.items()
        }
        return cls(
            name=name,
            requests=len(records),
            missed=missed,
            hit_rates=Quantiles.reached([record.hit_rate for record in records]),
            split={phase: sum(times[phase]) for phase in ("queue", "prefill", "decode")},
            **{field: sum(map(get, records)) for field, get in _COUNTS.items()},
            **{field: Quantiles.of(seconds) for field, seconds in times.items()},
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
    """Requests that ended from `start` (Unix time) to `start + seconds`; `hit_rate` as in Group."""

    start: float
    seconds: float
    requests: int
    hit_rate: float
    ttft: Quantiles


def by_time(records: Iterable[RequestRecord], start: float, seconds: float, count: int) -> tuple[TimeBin, ...]:
    """`count` bins of `seconds` each from the Unix time `start`; what ended outside of them is left out."""
    bins: list[list[RequestRecord]] = [[] for _ in range(count)]
    for record in records:
        ended = record.ended
        if ended is not None and 0 <= (place := math.floor((ended - start) / seconds)) < count:
            bins[place].append(record)
    return tuple(
        [
            TimeBin(start + place * seconds, seconds, len(own), _hit_rate(own), Quantiles.of(_ttft(own)))
            for place, own in enumerate(bins)
        ]
    )


@dataclasses.dataclass(frozen=True)
class HiddenTail:
    """A group that a good mean hides. P99 of TTFT in seconds, of the group and of the requests of those that hit."""

    name: str
    requests: int
    hit_rate: float
    ttft_p99: float
    ttft_p99_of_hits: float


def hidden_tails(split: Mapping[str, Sequence[RequestRecord]]) -> tuple[HiddenTail, ...]:
    """The groups that miss while the whole seems fine, slowest first.

    The hit rate over all is at least 50 %, and the group, of 5 requests or more, has at most half of it and a P99 of
    TTFT at least three times that of the groups which have more.
    """
    rates = {name: _hit_rate(records) for name, records in split.items()}
    whole = _hit_rate([record for records in split.values() for record in records])
    hits = [seconds for name in split if rates[name] > POOR_SHARE * whole for seconds in _ttft(split[name])]
    if not (whole >= GOOD_HIT_RATE and hits):
        return ()
    hits_p99 = Quantiles.of(hits).p99
    tails = []
    for name, records in split.items():
        own_p99 = Quantiles.of(_ttft(records)).p99
        is_slow = len(records) >= FEWEST_REQUESTS and own_p99 >= SLOW_FACTOR * hits_p99
        if is_slow and rates[name] <= POOR_SHARE * whole:
            tails.append(HiddenTail(name, len(records), rates[name], own_p99, hits_p99))
    return tuple(sorted(tails, key=lambda tail: -tail.ttft_p99))


def _hit_rate(records: Sequence[RequestRecord]) -> float:
    """Of tokens; NaN of none."""
    tokens = sum([record.prompt_tokens for record in records])
    return sum([record.cached_tokens for record in records]) / tokens if tokens else math.nan


def _ttft(records: Iterable[RequestRecord]) -> list[float]:
    return [record.ttft for record in records if record.ttft is not None]
