"""Bytes for people, both ways."""

import re

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def human_bytes(n: int) -> str:
    """1536 -> "1.50 KiB"."""
    size = float(n)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def parse_bytes(text: str) -> int:
    """"2GiB", "500M", "1.5 GB" or plain bytes. Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", text.upper())
    if match is None or match[2] == "I":
        raise ValueError(f"{text!r} is not a size; write bytes, or a number with K, M, G, T (1000) or KiB, MiB, GiB, TiB")
    return int(float(match[1]) * _UNITS[match[2]])
