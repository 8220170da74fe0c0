"""Requests that part from each other at one place although what follows is the same, or is the same in another order.

The prompts of a group are sorted, so that those with a common head stand together, as in a trie. From the root down, at
each place where some part, a sample of what follows is cut into chunks and those that are alike make a cluster; what
is in none goes down its branch of the trie. The place where a cluster's requests part comes from this comparison alone.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from jaxkv.control.prefix_index import TOKEN_BYTES, num_common
from jaxkv.insight.chunks import Chunked, are_alike, cut_into_chunks, have_common_grams
from jaxkv.insight.documents import movable_documents, place_documents
from jaxkv.insight.templates import Template, template_of

MIN_REQUESTS = 3
SMALLEST_SHARE = 0.01  # of a group's requests; smaller branches are not looked into
_SAMPLE = (8, 64)  # fewest and most prompts to compare at a place
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
            if len(cluster.members) >= MIN_REQUESTS:
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
    for group in _alike(cut_into_chunks(bodies)):
        if len(group) < min(MIN_REQUESTS, count):
            continue
        documents = movable_documents(group)
        template = template_of(head, group, documents)
        if not documents and template is None:
            continue
        found = [number for number in left if _belongs(prompts[number], template, documents)]
        taken = set(found)
        left = [number for number in left if number not in taken]
        start = len(head)
        if template is not None:
            filled = [one for number in found if (one := template.fill(prompts[number])) is not None]
            template = template.tightened(filled)
        if template is not None:
            start = len(template.segments[0])
        if template is not None or documents:
            yield Cluster(tuple(sorted(found)), start // TOKEN_BYTES, template, documents)


def _alike(behind: Sequence[Chunked]) -> list[list[Chunked]]:
    """Groups, the largest first; each sequence goes with the first that one of its first four is alike."""
    groups: list[list[Chunked]] = []
    for one in behind:
        group = next((group for group in groups if any(are_alike(one, other) for other in group[:4])), None)
        if group is None:
            groups.append([one])
        else:
            group.append(one)
    return sorted(groups, key=len, reverse=True)


def _belongs(prompt: bytes, template: Template | None, documents: frozenset[bytes]) -> bool:
    if template is not None and template.fill(prompt) is not None:
        return True
    return len(place_documents(prompt, documents)) > 1
