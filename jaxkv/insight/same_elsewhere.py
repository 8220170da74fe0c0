"""How much of each prompt, behind the place where it parts from all earlier ones, earlier ones have all the same."""

from collections.abc import Callable, Iterable, Sequence

from jaxkv.control.prefix_index import TOKEN_BYTES
from jaxkv.insight.causes import SameElsewhere
from jaxkv.insight.chunks import Chunked, are_alike, cut_into_chunks
from jaxkv.insight.clusters import Cluster
from jaxkv.insight.documents import place_documents
from jaxkv.insight.nearest import Parting
from jaxkv.insight.packing import unpacked
from jaxkv.insight.prompt_log import PromptLog
from jaxkv.insight.token_texts import TokenBytes, num_agreeing_tokens

_MOST_PAIRS = 500  # requests outside of clusters that are compared with their nearest: some milliseconds each
_LEAST_BOUNDARY = 2  # tokens of the same text; one may be chance: " c" of " c|ry" is in " cat"
_BOUNDARY_WINDOW = 4096  # tokens behind the parting whose texts are compared


def find_same_elsewhere(
    log: PromptLog,
    partings: Sequence[Parting],
    clusters: Iterable[Cluster],
    token_bytes: TokenBytes | None,
    told: Callable[[int], None] = lambda done: None,
) -> list[SameElsewhere]:
    """One a request. `token_bytes`: to compare texts; None leaves them out. `told` hears of every request done."""
    found: dict[int, tuple[int, int]] = {}
    for cluster in clusters:
        found |= _in_cluster(log, partings, cluster)
    lonely = [n for n, parting in enumerate(partings) if n not in found and parting.nearest is not None]
    lonely.sort(key=lambda n: partings[n].num_common - log.requests[n].num_tokens)  # most tokens behind first
    compared = set(lonely[:_MOST_PAIRS])
    result = []
    for number, parting in enumerate(partings):
        boundary = 0
        if parting.nearest is not None:
            if token_bytes is not None:
                boundary = _tokens_of_same_text(log, number, parting, token_bytes)[0]
                boundary = boundary if boundary >= _LEAST_BOUNDARY else 0
            if number in compared:
                found[number] = _in_pair(log, number, parting)
        result.append(SameElsewhere(boundary, *found.get(number, (0, 0))))
        told(number + 1)
    return result


def _in_cluster(log: PromptLog, partings: Sequence[Parting], cluster: Cluster) -> dict[int, tuple[int, int]]:
    """Tokens behind a changed span, and in moved documents, of the cluster's requests."""
    found, seen = {}, set()
    for place, number in enumerate(cluster.members):
        prompt, start = log.requests[number].prompt, partings[number].num_common * TOKEN_BYTES
        changed = reordered = 0
        filled = None if cluster.template is None else cluster.template.fill(prompt)
        if filled is not None and place:
            end = len(cluster.template.segments[0])
            for value, segment in zip(filled.values, cluster.template.segments[1:], strict=True):
                end += len(value) + len(segment)
                changed += max(0, min(len(segment), end - start))
        for at, document in place_documents(prompt, cluster.documents):
            if document in seen:
                reordered += max(0, min(len(document), at + len(document) - start))
            seen.add(document)
        found[number] = changed // TOKEN_BYTES, reordered // TOKEN_BYTES
    return found


def _in_pair(log: PromptLog, number: int, parting: Parting) -> tuple[int, int]:
    """The same of a request and the nearest earlier one alone."""
    ours, theirs = pair_behind(log, number, parting)
    if not are_alike(ours, theirs):
        return 0, 0
    order = {chunk: place for place, chunk in enumerate(theirs.chunks)}
    in_order = moved = 0
    last = -1
    for chunk in ours.chunks:
        if chunk in theirs.known:
            if order[chunk] > last:
                in_order += len(chunk)
                last = order[chunk]
            else:
                moved += len(chunk)
    return in_order // TOKEN_BYTES, moved // TOKEN_BYTES


def pair_behind(log: PromptLog, number: int, parting: Parting) -> list[Chunked]:
    """A request and its nearest earlier one behind the place where they part, in chunks."""
    start = parting.num_common * TOKEN_BYTES
    sequences = log.requests[number].prompt[start:], log.requests[parting.nearest].sequence[start:]
    return cut_into_chunks(sequences)


def _tokens_of_same_text(log: PromptLog, number: int, parting: Parting, token_bytes: TokenBytes) -> tuple[int, int]:
    """Tokens of a request, and of its nearest, that differ but cover the same text, from where they part."""
    start = parting.num_common * TOKEN_BYTES
    end = start + _BOUNDARY_WINDOW * TOKEN_BYTES
    ours, theirs = log.requests[number].prompt[start:end], log.requests[parting.nearest].sequence[start:end]
    return num_agreeing_tokens(unpacked(ours), unpacked(theirs), token_bytes)
