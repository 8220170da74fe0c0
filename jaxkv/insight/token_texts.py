"""What can be said of tokens once their texts are known: how far two texts agree, and what a varying span looks like.

Patterns only name what comparison has found; they find nothing.
"""

import re
from collections.abc import Callable, Sequence

TokenBytes = Callable[[int], bytes]
"""The bytes of a token id."""

_PATTERNS = {
    "a UUID": r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}",
    "a timestamp": r"\d{4}-\d\d-\d\d[T ]\d\d?:\d\d(?::\d\d)?|\b\d\d?:\d\d(?::\d\d)?\b|\b1[5-9]\d{8}(?:\d{3})?\b",
    "a date": r"\d{4}-\d\d?-\d\d?|\d\d?[./]\d\d?[./]\d{2,4}|(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day"
    r"|\d{1,2}(?:st|nd|rd|th)? (?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
    r"|(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]* \d{1,2}",
    "an e-mail address": r"[\w.+-]+@[\w-]+\.[\w.]+",
    "a URL": r"https?://\S+",
    "an IP address": r"\b(?:\d{1,3}\.){3}\d{1,3}\b",
    "a request id": r"\b(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[\w-]{6,}\b|\b[0-9a-f]{12,}\b",
    "a number": r"\d+(?:[.,]\d+)*",
    "a name": r"\b[A-Z][a-z]+(?: [A-Z][a-z]+)+\b|\b[A-Z][a-z]+\b",
}
_LABEL_SHARE = 0.8
_CONTEXT = 24  # characters on both sides of a span that a pattern may reach into


def as_text(tokens: Sequence[int], token_bytes: TokenBytes) -> str:
    return b"".join(map(token_bytes, tokens)).decode("utf-8", "replace")


def num_agreeing_tokens(tokens: Sequence[int], other: Sequence[int], token_bytes: TokenBytes) -> tuple[int, int]:
    """How many tokens of each are covered whole by text that both begin with."""
    a = b = b""
    counts = [0, 0]
    ends: tuple[list[int], list[int]] = ([], [])
    for place in range(max(len(tokens), len(other))):
        a += token_bytes(tokens[place]) if place < len(tokens) else b""
        b += token_bytes(other[place]) if place < len(other) else b""
        ends[0].append(len(a))
        ends[1].append(len(b))
        size = min(len(a), len(b))
        if a[:size] != b[:size]:
            break
    size = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    for side, limit in enumerate((len(tokens), len(other))):
        counts[side] = min(limit, sum(end <= size for end in ends[side]))
    return counts[0], counts[1]


def looks_like(spans: Sequence[tuple[str, str, str]]) -> str | None:
    """What most of these spans look like, each told as (text before, the span, text behind); None if like nothing."""
    for name, pattern in _PATTERNS.items():
        if sum(_reaches_into(pattern, *span) for span in spans) >= _LABEL_SHARE * len(spans) > 0:
            return name
    return None


def _reaches_into(pattern: str, before: str, span: str, behind: str) -> bool:
    """Whether a match of the pattern has most of the span's letters and digits in it."""
    before, behind = before[-_CONTEXT:], behind[:_CONTEXT]
    start, end = len(before), len(before) + len(span)
    wanted = sum(map(str.isalnum, span)) or 1
    text = before + span + behind
    return any(
        2 * sum(map(str.isalnum, text[max(start, match.start()) : min(end, match.end())])) >= wanted
        for match in re.finditer(pattern, text)
    )
