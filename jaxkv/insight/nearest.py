"""For each request, the earlier one whose sequence agrees longest with its prompt.

Sequences are kept sorted. Whatever the order of symbols, the longest common head with a prompt is then held by one of
the two neighbours of the place where it would stand: a request costs O(log n) comparisons, each a memcmp, and two
searches for the first difference.
"""

import bisect
import dataclasses

from jaxkv.insight.prompt_log import PromptLog


@dataclasses.dataclass(frozen=True, slots=True)
class Parting:
    """Where a request parts from what came before.

    Attributes:
      nearest: number of the earlier request that agrees longest with it, under any salt; None if none agrees.
      num_common: tokens of their common head. From logs of block names: a multiple of the block size, and they part
        somewhere in the block after it.
      num_same_salt: the same to the nearest earlier request of its own salt.
    """

    nearest: int | None
    num_common: int
    num_same_salt: int


def find_partings(log: PromptLog) -> list[Parting]:
    """One a request, in the log's order."""
    has_salts = any(request.salt is not None for request in log.requests)
    everyone, of_salt = _Earlier(), {}
    partings = []
    for number, request in enumerate(log.requests):
        nearest, num_common = everyone.nearest(log, request.prompt)
        num_same = num_common
        if has_salts:
            own = of_salt.setdefault(request.salt, _Earlier())
            num_same = own.nearest(log, request.prompt)[1]
            own.add(request.sequence, number)
        everyone.add(request.sequence, number)
        partings.append(Parting(nearest, num_common, num_same))
    return partings


class _Earlier:
    def __init__(self):
        self._sequences: list[tuple[bytes, int]] = []

    def add(self, sequence: bytes, number: int) -> None:
        bisect.insort(self._sequences, (sequence, number))

    def nearest(self, log: PromptLog, prompt: bytes) -> tuple[int | None, int]:
        """Number of a request and the common tokens; of two that agree as long the later one."""
        place = bisect.bisect_left(self._sequences, (prompt,))
        around = self._sequences[max(0, place - 1) : place + 1]
        found = max(((log.num_common_tokens(prompt, other), number) for other, number in around), default=(0, None))
        return (found[1], found[0]) if found[0] else (None, 0)
