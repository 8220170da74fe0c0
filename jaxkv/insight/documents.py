"""Pieces that stand in one order in some prompts and in another in others: documents, tools, examples."""

import itertools
from collections import Counter
from collections.abc import Collection, Sequence

from jaxkv.control.prefix_index import TOKEN_BYTES
from jaxkv.insight.chunks import COMMON_SHARE, MIN_COMMON_TOKENS, Chunked
from jaxkv.insight.packing import find_tokens

_MOST_A_PROMPT = 64  # of its pieces, so many are compared with each other
# Of the sequences that have two pieces, those with the rarer order; and of all sequences, those that have any such pair.
# Where there are fewer, one quotes what is in the other.
_TURNED_SHARE = 0.2


def movable_documents(behind: Sequence[Chunked]) -> frozenset[bytes]:
    """Pieces that come in both orders with another one, if many sequences have such; and then all others that stand
    before these in some and are lacking in others: of a large collection few pairs are seen twice. Pieces that always
    go together are one."""
    counts = Counter(chunk for one in behind for chunk in one.known)
    sequences = [_pieces(one, counts) for one in behind]
    pairs = [list(itertools.combinations(pieces[:_MOST_A_PROMPT], 2)) for pieces in sequences]
    orders = Counter(itertools.chain.from_iterable(pairs))
    turned_pairs = {
        (a, b)
        for (a, b), times in orders.items()
        if min(times, orders[b, a]) >= max(1, _TURNED_SHARE * (times + orders[b, a]))
    }
    if sum(not turned_pairs.isdisjoint(some) for some in pairs) < max(2, _TURNED_SHARE * len(behind)):
        return frozenset()
    turned = set(itertools.chain.from_iterable(turned_pairs))
    movable = turned.copy()
    for pieces in sequences:
        last = max((place for place, piece in enumerate(pieces) if piece in turned), default=0)
        movable |= {piece for piece in pieces[:last] if counts[piece] < COMMON_SHARE * len(behind)}
    bodies = [b"".join(one.chunks) for one in behind]
    return _joined([[piece for piece in pieces if piece in movable] for pieces in sequences], bodies)


def _pieces(one: Chunked, counts: Counter[bytes]) -> list[bytes]:
    """Chunks that others have too, once each, in order."""
    times = Counter(one.chunks)
    least = MIN_COMMON_TOKENS * TOKEN_BYTES
    return [chunk for chunk in one.chunks if counts[chunk] > 1 and times[chunk] == 1 and len(chunk) >= least]


def _joined(sequences: Sequence[Sequence[bytes]], bodies: Sequence[bytes]) -> frozenset[bytes]:
    """The pieces, those that always follow each other with the same between them joined: a tool's name, the words that
    every tool has, and its description."""
    counts = Counter(piece for pieces in sequences for piece in pieces)
    links: Counter[tuple[bytes, bytes, bytes]] = Counter()
    for pieces, body in zip(sequences, bodies, strict=True):
        ends = [body.find(piece) + len(piece) for piece in pieces]
        for i, (a, b) in enumerate(itertools.pairwise(pieces)):
            links[a, body[ends[i] : ends[i + 1] - len(b)], b] += 1
    following = {a: (between, b) for (a, between, b), times in links.items() if times == counts[a] == counts[b]}
    documents = []
    for piece in counts.keys() - {b for _, b in following.values()}:
        document, last = piece, piece
        while last in following:
            between, last = following[last]
            document += between + last
        documents.append(document)
    return frozenset(documents)


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
