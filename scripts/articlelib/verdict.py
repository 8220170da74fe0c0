"""What is said of a claim, and of a row of claims."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal

Says = Literal["confirmed", "refuted", "not measurable here"]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Of one claim of a row; `claimed` and `ours` are what is compared.

    Attributes:
      claim: id of the row.
      numbers: of `ours`.
    """

    claim: str
    what: str
    claimed: str
    ours: str
    verdict: Says
    why: str
    numbers: tuple[float, ...] = ()


def says(holds: bool) -> Says:
    return "confirmed" if holds else "refuted"


def not_measured(claim: str, what: str, claimed: str, why: str) -> Verdict:
    return Verdict(claim, what, claimed, "-", "not measurable here", why)


def of_row(verdicts: Sequence[Verdict]) -> Says:
    """A row stands as it is written if none of its claims that could be measured is refuted."""
    found = {verdict.verdict for verdict in verdicts}
    return next((word for word in ("refuted", "confirmed") if word in found), "not measurable here")


def slashed(values: Iterable[object]) -> str:
    return " / ".join(map(str, values))


ROUGHLY = 0.8
"""The articles' figures are rough: a gain counts as reached from so much of it."""


def reaches(found: float, claimed: float) -> bool:
    """Whether a factor is as large as claimed, its gain (what it is above 1) counted: 1.32 reaches 1.4."""
    return found - 1 >= ROUGHLY * (claimed - 1)
