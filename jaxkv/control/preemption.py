"""Who gives its blocks back when an elder has none to grow into."""

from collections.abc import Sequence

from jaxkv.control.block_manager import BlockManager
from jaxkv.control.request_state import RequestState

# The cheapest request may be the victim so often before others take their turns.
_IN_A_ROUND = 2


def choose_victim(candidates: Sequence[RequestState], blocks: BlockManager) -> RequestState | None:
    """The cheapest of running requests, given in rank order; None when none of them owns a block alone.

    Cheapest: fewest blocks that nobody else shares, since only they must be computed again; of equals the newest. But
    nobody is preempted a third time more while there is another that has been less often.
    """
    victims = [
        (state.num_preemptions // _IN_A_ROUND, count, -place)
        for place, state in enumerate(candidates)
        if (count := blocks.num_exclusive(state.blocks)) > 0
    ]
    return candidates[-min(victims)[2]] if victims else None
