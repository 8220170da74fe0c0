"""Why the requests of a log missed, request by request and gathered into findings, most tokens lost first."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from jaxkv.core.metrics import MissReason
from jaxkv.core.progress import Progress, SilentProgress
from jaxkv.insight.causes import Cause, SameElsewhere, causes_of
from jaxkv.insight.clusters import Cluster, find_clusters
from jaxkv.insight.findings import Finding
from jaxkv.insight.nearest import Parting, find_partings
from jaxkv.insight.prompt_log import PromptLog
from jaxkv.insight.prompt_replay import Pool, Served, replay_prompts
from jaxkv.insight.reuse_distance import needed_capacities
from jaxkv.insight.same_elsewhere import find_same_elsewhere
from jaxkv.insight.token_texts import TokenBytes

# A caller's requests are compared among themselves from so many on, and from this share of all: one fault of a template
# that hundreds of callers use is one finding.
OWN_GROUP, OWN_SHARE = 20, 0.05


@dataclasses.dataclass(frozen=True)
class RequestCauses:
    """One request: what was found of it, where it parts from the nearest earlier one, and why the rest was computed.

    Attributes:
      needed_capacities: usable blocks that a pool needs to keep each leading block since its last use.
    """

    served: Served
    parting: Parting
    causes: Mapping[Cause, int]
    needed_capacities: Sequence[int] = ()


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Attributes:
    requests: in the log's order. Refused ones (of a replay) have nothing cached.
    pool: what the gains are computed for.
    is_replayed: what was found comes from a replay through `pool`, since the log does not tell it.
    is_estimated: the pool's capacity was not given; it is the most with which what was evicted can have been.
    """

    log: PromptLog
    pool: Pool
    is_replayed: bool
    is_estimated: bool
    requests: tuple[RequestCauses, ...]
    clusters: tuple[Cluster, ...]
    findings: tuple[Finding, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(request.num_tokens for request in self.log.requests)

    @property
    def cached(self) -> int:
        return sum(one.served.cached for one in self.requests)

    @property
    def hit_rate(self) -> float:
        return self.cached / self.tokens if self.tokens else 0.0

    @property
    def causes(self) -> dict[Cause, int]:
        """Tokens computed, by cause."""
        total: Counter[Cause] = Counter()
        for one in self.requests:
            total.update(one.causes)
        return {cause: total[cause] for cause in Cause}


def compare(
    log: PromptLog,
    pool: Pool = Pool(),
    token_bytes: TokenBytes | None = None,
    progress: Progress | None = None,
) -> Diagnosis:
    """Everything but the findings. `token_bytes` tells texts of tokens, where they are known."""
    progress = progress or SilentProgress()
    count = len(log.requests)
    partings = find_partings(log)
    progress.update("nearest earlier prompts", count, count)
    records = [request.record for request in log.requests]
    is_replayed = None in records
    if is_replayed:
        served = [one or Served(0) for one in replay_prompts(log, pool).served]
        progress.update("replay", count, count)
    else:
        served = [Served(record.cached_tokens, record.missed) for record in records]
    needed = needed_capacities(log)
    progress.update("reuse distances", count, count)
    pool, is_estimated = _known_pool(log, pool, served, needed)
    clusters: tuple[Cluster, ...] = ()
    same = [SameElsewhere()] * count
    if log.has_tokens:
        clusters = tuple(_clusters(log, lambda done: progress.update("templates", done, count)))
        same = find_same_elsewhere(
            log, partings, clusters, token_bytes, lambda done: progress.update("same text elsewhere", done, count)
        )
    requests = [
        RequestCauses(
            one,
            parting,
            causes_of(request, one, parting, elsewhere, log.block_size, _num_overwritten(log, pool, one, capacities)),
            capacities,
        )
        for request, one, parting, elsewhere, capacities in zip(
            log.requests, served, partings, same, needed, strict=True
        )
    ]
    return Diagnosis(log, pool, is_replayed, is_estimated, tuple(requests), clusters)


def _known_pool(
    log: PromptLog, pool: Pool, served: Sequence[Served], needed: Sequence[Sequence[int]]
) -> tuple[Pool, bool]:
    """The pool with a capacity, where evictions tell the most that it can have: LRU would have kept what was evicted
    after the fewest others. (Hits tell nothing: look-ahead keeps what waiting requests ask for longer than LRU would.)"""
    if pool.capacity_blocks is not None:
        return pool, False
    evicted = [
        capacities[one.cached // log.block_size]
        for one, capacities in zip(served, needed, strict=True)
        if one.missed.get(MissReason.EVICTED.value) and len(capacities) > one.cached // log.block_size
    ]
    if not evicted:
        return pool, False
    return dataclasses.replace(pool, capacity_blocks=max(1, min(evicted) - 1)), True


def _num_overwritten(log: PromptLog, pool: Pool, served: Served, needed: Sequence[int]) -> int:
    """Tokens behind those found that a pool of this capacity cannot have kept."""
    if pool.capacity_blocks is None:
        return 0
    behind = needed[served.cached // log.block_size :]
    return log.block_size * sum(capacity > pool.capacity_blocks for capacity in behind)


def _clusters(log: PromptLog, told: Callable[[int], None]) -> list[Cluster]:
    prompts = [request.prompt for request in log.requests]
    clusters, done = [], 0
    for numbers in _groups(log):
        clusters += find_clusters(prompts, numbers)
        done += len(numbers)
        told(done)
    return clusters


def _groups(log: PromptLog) -> list[list[int]]:
    """Numbers of requests to compare with each other: those of one caller, or of all callers with few."""
    by_caller: defaultdict[str | None, list[int]] = defaultdict(list)
    for number, request in enumerate(log.requests):
        by_caller[request.caller].append(number)
    least = max(OWN_GROUP, OWN_SHARE * len(log.requests))
    large = [numbers for numbers in by_caller.values() if len(numbers) >= least]
    small = sorted(n for numbers in by_caller.values() if len(numbers) < least for n in numbers)
    return [*large, small] if small else large


def callers_of(log: PromptLog, numbers: Sequence[int]) -> tuple[tuple[str | None, int, int], ...]:
    """(name, how many of these are its, how many of all), the most frequent first."""
    everyone = Counter(request.caller for request in log.requests)
    counts = Counter(log.requests[number].caller for number in numbers)
    return tuple([(name, count, everyone[name]) for name, count in counts.most_common()])


def evicted_tokens(diagnosis: Diagnosis) -> dict[int, int]:
    """Tokens that were overwritten before they were asked for again, by request."""
    return {n: one.causes[Cause.EVICTED] for n, one in enumerate(diagnosis.requests) if Cause.EVICTED in one.causes}
