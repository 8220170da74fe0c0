"""Which implementation of the operations runs: named, or chosen once.

A named implementation runs or raises with the reason; unset, the first supported one of PREFERENCE is taken. Nothing
falls back silently.
"""

from typing import NamedTuple

PREFERENCE = ("xla",)
ALL = ("xla", "reference")


class Support(NamedTuple):
    ok: bool
    reason: str


def supports(implementation: str, *, block_size: int) -> Support:
    """Whether `implementation` can run on this configuration, and why or why not."""
    if implementation not in ALL:
        return Support(False, f"unknown implementation {implementation!r}; known: {', '.join(ALL)}")
    if block_size < 8 or block_size & (block_size - 1):
        return Support(False, f"block_size must be a power of two of at least 8, not {block_size}")
    if implementation == "reference":
        return Support(True, "runs anywhere, gathers every row's whole padded table: for tests")
    return Support(True, "runs on any device")


def resolve(implementation: str | None, *, block_size: int) -> tuple[str, str]:
    """The implementation to use and the reason for it; raises ValueError when the named one can't run."""
    for name in (implementation,) if implementation is not None else PREFERENCE:
        support = supports(name, block_size=block_size)
        if support.ok:
            return name, support.reason
    asked = "" if implementation is None else f"attention_implementation={implementation!r} can't run: "
    raise ValueError(asked + support.reason)
