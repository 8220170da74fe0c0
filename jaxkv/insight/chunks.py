"""Cut sequences where they differ from each other, without knowing what they are made of.

Every K tokens in a row (a gram) that occur in the sequences are followed by one token everywhere, or by several; and
likewise preceded. A cut is where the gram before is followed by several tokens or the gram behind is preceded by
several. What lies between two cuts is a chunk: a piece of text that goes along whole wherever it occurs, be it a part of
a template, a document or a tool. (A chunk is a unitig of the de Bruijn graph of the sequences: Kececioglu and Myers,
Combinatorial algorithms for DNA sequence assembly, Algorithmica 1995.)

    You are a helper. Now: | 10:42 |  Answer in JSON. Cite every source. | What is ...
    You are a helper. Now: | 10:57 |  Answer in JSON. Cite every source. | Who wrote ...
"""

import dataclasses
from collections.abc import Sequence

from jaxkv.control.prefix_index import TOKEN_BYTES

GRAM_TOKENS = 8  # what agrees for less, between two differences, is not seen as common
MIN_COMMON_TOKENS = 16  # sequences that have less in common are not told to be alike
COMMON_SHARE = 0.9  # what so many of the sequences compared have is common to them
GAP_TO_COMMON = 4  # what differs may be so many times longer than what is common behind it
_WIDTH = GRAM_TOKENS * TOKEN_BYTES
_DIFFERENT = b"several"


@dataclasses.dataclass(frozen=True)
class Chunked:
    """One sequence in chunks; their concatenation is the sequence."""

    chunks: tuple[bytes, ...]
    known: frozenset[bytes]  # those of at least GRAM_TOKENS


def cut_into_chunks(sequences: Sequence[bytes]) -> list[Chunked]:
    """Chunks of packed token ids; some 1 us a token."""
    followers: dict[bytes, bytes] = {}
    leaders: dict[bytes, bytes] = {}
    for data in sequences:
        before = b""
        for start in range(0, len(data) - _WIDTH + 1, TOKEN_BYTES):
            end = start + _WIDTH
            gram, after = data[start:end], data[end : end + TOKEN_BYTES]
            if followers.setdefault(gram, after) != after:
                followers[gram] = _DIFFERENT
            if leaders.setdefault(gram, before) != before:
                leaders[gram] = _DIFFERENT
            before = data[start : start + TOKEN_BYTES]
    return [_chunked(data, followers, leaders) for data in sequences]


def _chunked(data: bytes, followers: dict[bytes, bytes], leaders: dict[bytes, bytes]) -> Chunked:
    cuts = {0, len(data)}
    for start in range(0, len(data) - _WIDTH + 1, TOKEN_BYTES):
        gram = data[start : start + _WIDTH]
        if followers[gram] is _DIFFERENT:
            cuts.add(start + _WIDTH)
        if leaders[gram] is _DIFFERENT:
            cuts.add(start)
    places = sorted(cuts)
    chunks = tuple([data[start:end] for start, end in zip(places, places[1:])])
    return Chunked(chunks, frozenset([chunk for chunk in chunks if len(chunk) >= _WIDTH]))


def are_alike(a: Chunked, b: Chunked, gap_to_common: float = GAP_TO_COMMON) -> bool:
    """Whether `a` and `b` are made after one template, or of the same documents in whatever order: what they share is at
    least MIN_COMMON_TOKENS, and what else stands before the last of it is not so many times longer."""
    return _is_like(a, b, gap_to_common) and _is_like(b, a, gap_to_common)


def _is_like(a: Chunked, b: Chunked, gap_to_common: float) -> bool:
    place = shared = last = 0
    for chunk in a.chunks:
        place += len(chunk)
        if chunk in b.known:
            shared += len(chunk)
            last = place
    return shared >= MIN_COMMON_TOKENS * TOKEN_BYTES and last - shared <= gap_to_common * shared


def have_common_grams(sequences: Sequence[bytes], num_compared: int = 16, stride: int = 4) -> bool:
    """Whether any has something in common with one of some `num_compared` of them: cheap, for a first look. What is common
    for GRAM_TOKENS + stride is seen for certain."""
    owners: dict[bytes, int] = {}
    for owner in range(0, len(sequences), max(1, len(sequences) // num_compared)):
        data = sequences[owner]
        for start in range(0, len(data) - _WIDTH + 1, TOKEN_BYTES):
            owners.setdefault(data[start : start + _WIDTH], owner)
    return any(
        owners.get(data[start : start + _WIDTH], number) != number
        for number, data in enumerate(sequences)
        for start in range(0, len(data) - _WIDTH + 1, TOKEN_BYTES * stride)
    )
