"""Pieces that stand in one order in some prompts and in another in others: documents, tools, examples."""

import itertools
from collections import Counter
from collections.abc import Collection, Sequence

from jaxkv.control.prefix_index import TOKEN_BYTES
from jaxkv.insight.chunks import MIN_COMMON_TOKENS, Chunked, find_tokens

_MOST_A_PROMPT = 64  # of its pieces, so many are compared with each other


def movable_documents(behind: Sequence[Chunked]) -> frozenset[bytes]:
    """Chunks that occur in both orders with another one."""
    counts = Counter(chunk for one in behind for chunk in one.known)
    before: set[tuple[bytes, bytes]] = set()
    for one in behind:
        common = [c for c in one.chunks if counts[c] > 1 and len(c) >= MIN_COMMON_TOKENS * TOKEN_BYTES]
        common = [c for c, times in Counter(common).items() if times == 1][:_MOST_A_PROMPT]
        before.update(itertools.combinations(common, 2))
    return frozenset([document for a, b in before if (b, a) in before for document in (a, b)])


def place_documents(prompt: bytes, documents: Collection[bytes]) -> list[tuple[int, bytes]]:
    """Where these documents begin in the prompt, in order, without overlaps; the first occurrence of each."""
    found = sorted((place, document) for document in documents if (place := find_tokens(prompt, document)) != -1)
    placed, end = [], 0
    for place, document in found:
        if place >= end:
            placed.append((place, document))
            end = place + len(document)
    return placed


def sort_documents(prompt: bytes, documents: Collection[bytes]) -> bytes:
    """The prompt with these documents in one order, that of their tokens, each in the place of another."""
    placed = place_documents(prompt, documents)
    parts, end = [], 0
    for (place, old), new in zip(placed, sorted(document for _, document in placed), strict=True):
        parts += (prompt[end:place], new)
        end = place + len(old)
    return b"".join([*parts, prompt[end:]])
