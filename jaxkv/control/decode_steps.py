"""How many decode steps a device call runs: C.

More steps a call hide the host and the dispatch; fewer let waiting requests start sooner. Only powers of two are
chosen, so that an executor that compiles per C compiles few.
"""


def floor_power_of_two(n: int) -> int:
    return 1 << (n.bit_length() - 1)


def ceil_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def adaptive_decode_steps(
    largest: int, *, least_remaining: int, most_remaining: int, prefilling: bool, waiting: bool
) -> int:
    """C for the next call.

    Args:
      largest: the executor's limit.
      least_remaining / most_remaining: fewest and most tokens that a decode row may still produce (>= 1).
      prefilling: the plan prefills. Its first tokens, and the next chunk, wait for this call's end: C = 1.
      waiting: requests wait for a row or for blocks. The call ends no later than the first row that must end, so that
        a place is filled as soon as it is free; a stop id costs at most C - 1 steps more.
    """
    if prefilling:
        return 1
    if waiting:
        largest = min(largest, least_remaining)
    return floor_power_of_two(min(largest, ceil_power_of_two(most_remaining)))
