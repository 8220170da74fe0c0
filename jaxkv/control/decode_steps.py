"""How many decode steps a device call runs: C.

More steps a call hide the host and the dispatch; fewer let waiting requests start sooner, and tokens reach their
readers more evenly. Only powers of two are chosen, so that an executor that compiles per C compiles few.
"""

from collections.abc import Sequence

from jaxkv.control.block_manager import BlockManager
from jaxkv.control.request_state import RequestState
from jaxkv.core.plan import StepTiming

# A request that arrives waits for the two calls in flight. Where steps are so slow that calls are longer than this, C
# hides nothing worth hiding: the host takes some 3 ms a call.
SHARED_CALL_SECONDS = 0.2
# What the host needs for a call, some 2 ms, and as much again to be behind by: calls this long hide it.
HOST_CALL_SECONDS = 0.005


def floor_power_of_two(n: int) -> int:
    return 1 << (n.bit_length() - 1)


def ceil_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def adaptive_decode_steps(
    largest: int,
    *,
    least_remaining: int,
    most_remaining: int,
    waiting: bool,
    num_rows: int,
    step_seconds: float,
    host_chooses: bool = False,
) -> int:
    """C for the next call.

    Args:
      largest: the executor's limit.
      least_remaining / most_remaining: fewest and most tokens that a decode row may still produce (>= 1).
      waiting: requests wait for a row or for blocks. The call ends no later than the first row that must end, so that
        a place is filled as soon as it is free; a stop id costs at most C - 1 steps more.
      num_rows: rows that decode. step_seconds: what a step takes, 0 if unknown. From two rows on the server is shared,
        and more arrivals are likely: no call of several steps may outlast SHARED_CALL_SECONDS.
      host_chooses: running rows get a mask from the host before each token, so one token in two calls: these are as
        short as still hides the host, HOST_CALL_SECONDS.
    """
    if waiting:
        largest = min(largest, least_remaining)
    most_seconds = HOST_CALL_SECONDS if host_chooses else SHARED_CALL_SECONDS
    if (num_rows > 1 or host_chooses) and step_seconds * largest > most_seconds:
        largest = max(1, int(most_seconds / step_seconds))
    return floor_power_of_two(min(largest, ceil_power_of_two(most_remaining)))


def reserve_steps(
    blocks: BlockManager, decoding: Sequence[RequestState], remaining: Sequence[int], num_steps: int
) -> int:
    """Give the rows the lookahead blocks for `num_steps` steps, or half as many until they fit; returns how many.

    Args:
      remaining: tokens that each row may still produce, at least 1; there is a block for the first of them.
    """
    block_size, num_free = blocks.block_size, blocks.num_free
    lengths = [state.num_computed + state.num_in_flight for state in decoding]
    while num_steps > 1:
        missing = [
            -(-(length + (num_steps if num_steps < left else left)) // block_size) - len(state.blocks)
            for state, length, left in zip(decoding, lengths, remaining, strict=True)
        ]
        if sum(missing) <= num_free:
            for state, count in zip(decoding, missing, strict=True):
                if count:
                    state.blocks += blocks.allocate(count)
            break
        num_steps //= 2
    return num_steps


class StepTimer:
    """How long a decode step takes, from the calls read so far.

    Attributes:
      seconds: a moving average over some four calls; 0 before the first.
    """

    def __init__(self):
        self.seconds = 0.0
        self._last_finished = 0.0

    def record(self, num_steps: int, timing: StepTiming) -> None:
        """A call was read; `num_steps` is 0 if it did anything but decode."""
        begin = max(timing.submitted, self._last_finished)  # it waited for the call before
        self._last_finished = timing.finished
        if num_steps:
            seconds = max(0.0, timing.finished - begin) / num_steps
            self.seconds = seconds if self.seconds == 0 else 0.75 * self.seconds + 0.25 * seconds
