"""Requests that part from each other at one place although what follows is the same, or is the same in another order.

The prompts of a group are sorted, so that those with a common head stand together, as in a trie. From the root down, at
each place where some part, a sample of what follows is cut into chunks and those that are alike make a cluster; what
is in none goes down its branch of the trie. The place where a cluster's requests part comes from this comparison alone.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from jaxkv.control.prefix_index import TOKEN_BYTES, num_common
from jaxkv.insight.chunks import GAP_TO_COMMON, Chunked, are_alike, cut_into_chunks, have_common_grams
from jaxkv.insight.documents import movable_documents, place_documents
from jaxkv.insight.templates import Template, template_of

MIN_REQUESTS = 3
SMALLEST_SHARE = 0.01  # of a group's requests; smaller branches are not looked into
_SAMPLE = (8, 64)  # fewest and most prompts to compare at a place
_SAME_SHARE = 0.1  # of a sample, that makes a group of those more alike than not
_SAMPLE_TOKENS = 131_072  # compared at a place, within these


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Attributes:
    members: numbers of requests. start: tokens that all of them have in common.
    template: None if nothing behind `start` is the same in the same order.
    documents: that come in different orders; empty if there are none.
    """

    members: tuple[int, ...]
    start: int
    template: Template | None
    documents: frozenset[bytes]


def find_clusters(prompts: Sequence[bytes], numbers: Sequence[int]) -> Iterator[Cluster]:
    """Clusters among the prompts of these numbers; every request is in one at most."""
    least = max(MIN_REQUESTS, SMALLEST_SHARE * len(numbers))
    waiting = [sorted(numbers, key=lambda number: prompts[number])]
    while waiting:
        members = waiting.pop()
        head = prompts[members[0]]
        size = num_common(head, prompts[members[-1]]) * TOKEN_BYTES
        head = head[:size]
        if len(members) < least or prompts[members[-1]] == head:
            continue
        for cluster in _clusters_at(prompts, members, head):
            yield cluster
            taken = set(cluster.members)
            members = [number for number in members if number not in taken]
        branches = itertools.groupby(members, key=lambda number: prompts[number][size : size + TOKEN_BYTES])
        waiting += [list(branch) for token, branch in branches if token]


def _clusters_at(prompts: Sequence[bytes], members: list[int], head: bytes) -> Iterator[Cluster]:
    """Members that are alike behind their common head."""
    length = max(1, sum(len(prompts[number]) - len(head) for number in members) // TOKEN_BYTES // len(members))
    count = min(max(_SAMPLE_TOKENS // length, _SAMPLE[0]), _SAMPLE[1], len(members))
    bodies = [prompts[members[i * len(members) // count]][len(head) :] for i in range(count)]
    if not have_common_grams(bodies):
        return
    left = members
    for group in _groups(cut_into_chunks(bodies)):
        cluster = _cluster_of(prompts, left, head, group)
        if cluster is not None:
            yield cluster
            taken = set(cluster.members)
            left = [number for number in left if number not in taken]


def _cluster_of(
    prompts: Sequence[bytes], members: Sequence[int], head: bytes, group: Sequence[Chunked]
) -> Cluster | None:
    """Of the members, which are sorted, those that are like this group; None if too few are, or if nothing is wrong."""
    documents = movable_documents(group)
    template = template_of(head, group, documents)
    found = [number for number in members if _belongs(prompts[number], template, documents)]
    if template is not None:
        filled = [one for number in found if (one := template.fill(prompts[number])) is not None]
        template = template.tightened(filled) if len(filled) >= MIN_REQUESTS else None
    if len(found) < MIN_REQUESTS or (template is None and not documents):
        return None
    if template is None:
        start = num_common(prompts[found[0]], prompts[found[-1]])
    else:
        start = len(template.segments[0]) // TOKEN_BYTES
    return Cluster(tuple(sorted(found)), start, template, documents)


def _groups(behind: Sequence[Chunked]) -> list[list[Chunked]]:
    """Those that are more alike than not and in the same order, of which there must be many; then of the others those that
    hang together at all. So templates that have a sentence in common stay apart, and requests with a few documents each
    out of a large collection do not."""
    many = max(MIN_REQUESTS, _SAME_SHARE * len(behind))
    close = _alike(behind, gap_to_common=1, num_compared=4)
    groups = [group for group in close if len(group) >= many and not movable_documents(group)]
    grouped = {id(one) for group in groups for one in group}
    groups += _alike([one for one in behind if id(one) not in grouped], GAP_TO_COMMON, num_compared=len(behind))
    return [group for group in groups if len(group) >= min(MIN_REQUESTS, len(behind))]


def _alike(behind: Sequence[Chunked], gap_to_common: float, num_compared: int) -> list[list[Chunked]]:
    """Groups, the largest first: each sequence joins all groups among whose first `num_compared` is one like it."""
    groups: list[list[Chunked]] = []
    for one in behind:
        joined, apart = [one], []
        for group in groups:
            if any(are_alike(one, other, gap_to_common) for other in group[:num_compared]):
                joined = group + joined
            else:
                apart.append(group)
        groups = [joined, *apart]
    return sorted(groups, key=len, reverse=True)


def _belongs(prompt: bytes, template: Template | None, documents: frozenset[bytes]) -> bool:
    if template is not None and template.fill(prompt) is not None:
        return True
    return len(place_documents(prompt, documents)) > 1
