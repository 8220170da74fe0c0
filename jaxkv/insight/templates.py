"""Templates that requests were filled into, found by comparing them.

    seg0 | value 1 | seg1 | value 2 | seg2 | ... | the rest
    same   varies    same   varies    same         anything

seg0 is the common head of all of them, so every request parts from the others where the first value begins, and what
is the same behind it must be computed again each time.
"""

import dataclasses
import itertools
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

from jaxkv.control.prefix_index import TOKEN_BYTES, num_common, token_bytes
from jaxkv.insight.chunks import COMMON_SHARE, GAP_TO_COMMON, MIN_COMMON_TOKENS, Chunked
from jaxkv.insight.documents import place_documents
from jaxkv.insight.packing import find_tokens, unpacked


@dataclasses.dataclass(frozen=True)
class Filled:
    """A prompt taken apart: values[i] stands before segment i + 1."""

    values: tuple[bytes, ...]
    rest: bytes


@dataclasses.dataclass(frozen=True)
class Field:
    """A span that differs between requests while what follows is the same, in tokens.

    Attributes:
      start: of the first field exact in every request; of later ones the median.
      min_length / max_length: of its values. num_values: different ones.
    """

    start: int
    min_length: int
    max_length: int
    num_values: int


@dataclasses.dataclass(frozen=True)
class Template:
    """Attributes:
    segments: seg0, which may be empty, and those behind the values.
    """

    segments: tuple[bytes, ...]

    @property
    def num_fields(self) -> int:
        return len(self.segments) - 1

    @property
    def num_common_behind(self) -> int:
        """Tokens that are the same in all requests, behind the first field."""
        return sum(map(len, self.segments[1:])) // TOKEN_BYTES

    def fill(self, prompt: bytes) -> Filled | None:
        """The prompt taken apart; None if it is not of this template."""
        if not prompt.startswith(self.segments[0]):
            return None
        values, place = [], len(self.segments[0])
        for segment in self.segments[1:]:
            found = find_tokens(prompt, segment, place)
            if found == -1:
                return None
            values.append(prompt[place:found])
            place = found + len(segment)
        return Filled(tuple(values), prompt[place:])

    def tightened(self, prompts: Sequence[Filled]) -> "Template | None":
        """With what all values of a field begin or end with in its neighbours, and fields that never vary in them;
        None if no field is left. `prompts`: all of this template, taken apart."""
        segments = [self.segments[0]]
        for i, segment in enumerate(self.segments[1:]):
            values = [filled.values[i] for filled in prompts]
            head = _common_head(values)
            tail = _common_tail([value[len(head) :] for value in values])
            segments[-1] += head
            if all(len(value) == len(head) + len(tail) for value in values):
                segments[-1] += tail + segment
            else:
                segments.append(tail + segment)
        segments[-1] += _common_head([filled.rest for filled in prompts])
        return Template(tuple(segments)) if len(segments) > 1 else None

    def with_fields_last(self, filled: Filled, num_moved: int) -> bytes:
        """The prompt with its first `num_moved` values moved behind the last segment; the tokens are the same."""
        moved, kept = filled.values[:num_moved], filled.values[num_moved:]
        parts = [*self.segments[: num_moved + 1]]
        for value, segment in zip(kept, self.segments[num_moved + 1 :], strict=True):
            parts += (value, segment)
        return b"".join([*parts, *moved, filled.rest])

    def fields(self, prompts: Sequence[Filled]) -> tuple[Field, ...]:
        fields = []
        for i in range(self.num_fields):
            before = sum(map(len, self.segments[: i + 1]))
            starts = [before + sum(map(len, filled.values[:i])) for filled in prompts]
            values = Counter([filled.values[i] for filled in prompts])
            lengths = [len(value) // TOKEN_BYTES for value in values]
            start = int(statistics.median(starts)) // TOKEN_BYTES
            fields.append(Field(start, min(lengths), max(lengths), len(values)))
        return tuple(fields)


def template_of(head: bytes, behind: Sequence[Chunked], documents: frozenset[bytes] = frozenset()) -> Template | None:
    """The template of prompts that begin with `head` and go on in these chunks, up to the first of the documents that
    come in any order; None if nothing is common behind."""
    enough = COMMON_SHARE * len(behind)
    bodies = [_up_to_first(b"".join(one.chunks), documents) for one in behind]
    chunks = [_within(one.chunks, len(body)) for one, body in zip(behind, bodies, strict=True)]
    counts = Counter(chunk for some in chunks for chunk in set(some))
    pairs = Counter(pair for some in chunks for pair in set(zip(some, some[1:])))
    cursors: list[int | None] = [0] * len(bodies)
    segments = [head]
    for run in _common_runs(chunks[0], counts, pairs, enough):
        found = [_after(body, run, cursor) for body, cursor in zip(bodies, cursors, strict=True)]
        passed = [end - start - len(run) for start, end in zip(cursors, found, strict=True) if end is not None]
        # Not worth a move: the end of a chat template behind a long question, say.
        if len(passed) >= enough and sum(passed) <= GAP_TO_COMMON * len(run) * len(passed):
            cursors = found
            segments.append(run)
    return Template(tuple(segments)) if len(segments) > 1 else None


def _up_to_first(body: bytes, documents: frozenset[bytes]) -> bytes:
    placed = place_documents(body, documents)
    return body[: placed[0][0]] if placed else body


def _within(chunks: Sequence[bytes], size: int) -> list[bytes]:
    """The chunks that end within so many bytes."""
    ends = itertools.accumulate(map(len, chunks))
    return [chunk for chunk, end in zip(chunks, ends, strict=True) if end <= size]


def _common_head(values: Sequence[bytes]) -> bytes:
    low, high = min(values), max(values)
    return low[: num_common(low, high) * TOKEN_BYTES]


def _common_tail(values: Sequence[bytes]) -> bytes:
    """At whole tokens."""
    first = values[0]
    size = min(num_common(_backwards(first), _backwards(value)) for value in values) * TOKEN_BYTES
    return first[len(first) - size :]


def _backwards(data: bytes) -> bytes:
    return token_bytes(unpacked(data)[::-1])


def _common_runs(chunks: Sequence[bytes], counts: Counter, pairs: Counter, enough: float) -> Iterator[bytes]:
    """Chunks in a row that nearly all have, joined where nearly all have them in a row."""
    run, last = b"", b""
    for chunk in chunks:
        if counts[chunk] >= enough and run and pairs[last, chunk] >= enough:
            run += chunk
        else:
            if len(run) >= MIN_COMMON_TOKENS * TOKEN_BYTES:
                yield run
            run = chunk if counts[chunk] >= enough else b""
        last = chunk
    if len(run) >= MIN_COMMON_TOKENS * TOKEN_BYTES:
        yield run


def _after(body: bytes, run: bytes, cursor: int | None) -> int | None:
    """Where `run`, looked for from `cursor` on, ends; None if it is not there."""
    if cursor is None:
        return None
    found = find_tokens(body, run, cursor)
    return None if found == -1 else found + len(run)
