"""From causes to findings: who is hit, what to do, and by replay what that would bring."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

from jaxkv.control.prefix_index import TOKEN_BYTES
from jaxkv.core.progress import Progress, SilentProgress
from jaxkv.insight.causes import Cause, num_recomputed
from jaxkv.insight.clusters import Cluster
from jaxkv.insight.diagnosis import Diagnosis, callers_of, evicted_tokens
from jaxkv.insight.findings import Finding
from jaxkv.insight.gains import Proposal, Replays, World, first_replayed
from jaxkv.insight.packing import unpacked
from jaxkv.insight.prompt_log import PromptLog
from jaxkv.insight.prompt_replay import Pool
from jaxkv.insight.remedies import with_fields_last, with_one_salt, with_same_tokens, with_sorted_documents
from jaxkv.insight.reuse_distance import capacity_for
from jaxkv.insight.templates import Filled, Template
from jaxkv.insight.token_texts import TokenBytes, as_text, looks_like

_LABELLED = 200  # values of a field that are looked at for a label
_EXAMPLES = 3
_CONTEXT_TOKENS = 12
_EXAMPLE_CHARACTERS = 60
_TOLD_WITHOUT_GAIN = 0.01  # of all tokens; a remedy for fewer that brings nothing is not worth a line
_UNKNOWN_SHARE = 0.2  # of a caller's requests that part in one block, from which on it is told


@dataclasses.dataclass(frozen=True)
class Settings:
    """How findings are made.

    Attributes:
      most_replayed: findings with a computed gain, those with most tokens lost; the others go without.
      replay_tokens: of the log's last requests, at most so many tokens are replayed; a block name counts as one.
      least_lost: findings with a smaller share of all prompt tokens are left out.
      with_texts: show some texts of what varies.
    """

    most_replayed: int = 8
    replay_tokens: int = 8_000_000
    least_lost: float = 0.001
    with_texts: bool = False


def find_faults(
    diagnosis: Diagnosis,
    settings: Settings = Settings(),
    token_bytes: TokenBytes | None = None,
    progress: Progress | None = None,
) -> Diagnosis:
    """The diagnosis with its findings, most tokens lost first."""
    progress = progress or SilentProgress()
    least, large = (share * diagnosis.tokens for share in (settings.least_lost, _TOLD_WITHOUT_GAIN))
    proposals = [p for p in _proposals(diagnosis, settings, token_bytes) if p.finding.tokens_lost >= max(1, least)]
    proposals.sort(key=lambda proposal: -proposal.finding.tokens_lost)
    replays = Replays(diagnosis, first_replayed(diagnosis.log, settings.replay_tokens))
    findings = []
    for number, proposal in enumerate(proposals, 1):
        finding = proposal.finding
        if proposal.after and number <= settings.most_replayed:
            finding = dataclasses.replace(finding, gain=replays.gain(proposal))
        if finding.gain is None or finding.gain.after > finding.gain.before or finding.tokens_lost >= large:
            findings.append(finding)
        progress.update("gains", number, len(proposals))
    return dataclasses.replace(diagnosis, findings=tuple(findings))


def _proposals(diagnosis: Diagnosis, settings: Settings, token_bytes: TokenBytes | None) -> Iterator[Proposal]:
    log, pool = diagnosis.log, diagnosis.pool
    for cluster in diagnosis.clusters:
        yield from _of_cluster(diagnosis, cluster, settings, token_bytes)
    if not log.has_tokens:
        yield from _unknown_partings(diagnosis)
    yield from _of_cause(
        diagnosis,
        Cause.SALT,
        "Serving them under one cache_salt, if they may see each other's timing",
        lambda: (with_one_salt(log), pool),
    )
    if token_bytes is not None:
        yield from _of_cause(
            diagnosis,
            Cause.TOKEN_BOUNDARY,
            "Sending the earlier tokens again (token ids instead of text), or ending texts where tokens end",
            lambda: (with_same_tokens(log, [one.parting for one in diagnosis.requests], token_bytes), pool),
        )
    shared = dataclasses.replace(pool, share_partial=True)
    yield from _of_cause(
        diagnosis,
        Cause.SHORTER_THAN_BLOCK,
        "Copying the matching head of blocks (share_partial_blocks)",
        None if pool.share_partial else lambda: (log, shared),
    )
    yield from _of_cause(diagnosis, Cause.NOT_CACHED, "Look whether requests came together, or the server restarted")
    yield from _evictions(diagnosis)
    recomputed = {n: tokens for n, request in enumerate(log.requests) if (tokens := num_recomputed(request))}
    if recomputed:
        remedy = "Raise the pool (num_gpu_blocks_override, gpu_memory_utilization) or lower max_num_seqs"
        yield Proposal(_finding(diagnosis, "preempted", recomputed, remedy), recomputed)


def _finding(diagnosis: Diagnosis, cause: str, lost: dict[int, int], remedy: str, **rest) -> Finding:
    """`lost`: tokens by request."""
    return Finding(cause, sum(lost.values()), len(lost), callers_of(diagnosis.log, list(lost)), remedy, **rest)


def _of_cause(
    diagnosis: Diagnosis, cause: Cause, remedy: str, after: Callable[[], World] | None = None
) -> Iterator[Proposal]:
    lost = {n: one.causes[cause] for n, one in enumerate(diagnosis.requests) if cause in one.causes}
    if lost:
        yield Proposal(_finding(diagnosis, cause.value, lost, remedy), lost, after={remedy: after} if after else {})


def _of_cluster(
    diagnosis: Diagnosis, cluster: Cluster, settings: Settings, token_bytes: TokenBytes | None
) -> Iterator[Proposal]:
    log, pool, template = diagnosis.log, diagnosis.pool, cluster.template
    before = None
    if template is not None:
        filled = {n: one for n in cluster.members if (one := template.fill(log.requests[n].prompt)) is not None}
        lost = {n: diagnosis.requests[n].causes.get(Cause.CHANGED_TEXT, 0) for n in filled}
        values = list(filled.values())
        looks, examples = _texts(template, values, token_bytes)
        finding = _finding(
            diagnosis,
            Cause.CHANGED_TEXT.value,
            lost,
            "Moving what varies behind that",
            position=cluster.start,
            fields=template.fields(values),
            looks_like=looks,
            examples=examples if settings.with_texts else (),
            common_behind=template.num_common_behind,
        )
        moved = {
            f"{i} moved": functools.partial(_moved, log, pool, cluster, i) for i in range(1, template.num_fields + 1)
        }
        yield Proposal(finding, lost, after=moved)
        before = moved[f"{template.num_fields} moved"]
    if cluster.documents:
        lost = {n: diagnosis.requests[n].causes.get(Cause.REORDERED, 0) for n in cluster.members}
        lost = {n: tokens for n, tokens in lost.items() if tokens}
        if lost:
            remedy = "Sorting them by a fixed key" + (", the above done," if before else "")
            finding = _finding(
                diagnosis,
                Cause.REORDERED.value,
                lost,
                remedy,
                position=cluster.start,
                num_documents=len(cluster.documents),
            )
            world = (log, pool) if before is None else before()
            yield Proposal(finding, lost, before, {remedy: lambda: (with_sorted_documents(world[0], cluster), pool)})


def _moved(log: PromptLog, pool: Pool, cluster: Cluster, num_moved: int) -> World:
    return with_fields_last(log, cluster, num_moved), pool


def _texts(
    template: Template, prompts: Sequence[Filled], token_bytes: TokenBytes | None
) -> tuple[tuple[str | None, ...], tuple[tuple[str, ...], ...]]:
    """What each field looks like, and some of its values."""
    if token_bytes is None:
        return (None,) * template.num_fields, ()

    def text(data: bytes) -> str:
        return as_text(unpacked(data), token_bytes)

    looks, examples, size = [], [], _CONTEXT_TOKENS * TOKEN_BYTES
    for i in range(template.num_fields):
        values = list(dict.fromkeys(filled.values[i] for filled in prompts))[:_LABELLED]
        before, behind = text(template.segments[i][-size:]), text(template.segments[i + 1][:size])
        looks.append(looks_like([(before, text(value), behind) for value in values]))
        examples.append(tuple([text(value)[:_EXAMPLE_CHARACTERS] for value in values[:_EXAMPLES]]))
    return tuple(looks), tuple(examples)


def _evictions(diagnosis: Diagnosis) -> Iterator[Proposal]:
    log, pool = diagnosis.log, diagnosis.pool
    if not (lost := evicted_tokens(diagnosis)):
        return
    needs = []
    for number, tokens in lost.items():
        one = diagnosis.requests[number]
        start, stop = one.served.cached // log.block_size, -(-(one.served.cached + tokens) // log.block_size)
        kept = one.needed_capacities[start:stop]
        needs += [(capacity, log.block_size) for capacity in kept]
    half, most, everything = (capacity_for(needs, share) for share in (0.5, 0.9, 1.0))
    finding = _finding(diagnosis, Cause.EVICTED.value, lost, "A larger pool", needed_blocks=(half, most, everything))
    if pool.capacity_blocks is None or most <= pool.capacity_blocks:
        yield Proposal(finding, lost)
        return
    finding = dataclasses.replace(finding, more_blocks=most - pool.capacity_blocks)
    larger = {
        f"{blocks:,} blocks": functools.partial(_with_capacity, log, pool, blocks)
        for blocks in sorted({half, most, everything})
        if blocks > pool.capacity_blocks
    }
    yield Proposal(finding, lost, after=larger)


def _with_capacity(log: PromptLog, pool: Pool, blocks: int) -> World:
    return log, dataclasses.replace(pool, capacity_blocks=blocks)


def _unknown_partings(diagnosis: Diagnosis) -> Iterator[Proposal]:
    """From a log of block names: blocks in which many of a caller's requests part."""
    log = diagnosis.log
    by_place: dict[tuple[str | None, int], dict[int, int]] = {}
    for number, one in enumerate(diagnosis.requests):
        tokens = one.causes.get(Cause.NEW_TEXT, 0)
        if tokens and one.parting.nearest is not None:
            by_place.setdefault((log.requests[number].caller, one.parting.num_common), {})[number] = tokens
    for (_, position), lost in by_place.items():
        finding = _finding(
            diagnosis,
            "unknown",
            lost,
            "Log token ids (--request_log_tokens) to see what changes there",
            position=position,
        )
        _, count, total = finding.callers[0]
        if count >= _UNKNOWN_SHARE * total:
            yield Proposal(finding, lost)
