"""Invariants of the requests in a scheduler, asserted after every step in tests."""

from collections.abc import Collection, Sequence

from jaxkv.control.block_manager import NULL_BLOCK
from jaxkv.control.request_state import RequestState, Status
from jaxkv.core.retention import Retention


def check_states(
    running: Sequence[RequestState],
    waiting: Sequence[RequestState],
    live: Collection[RequestState],
    block_size: int,
    retention: Retention | None = None,
) -> None:
    """Every live request is in one place, in order, and its counts fit what it owns."""
    assert list(running) == sorted(running, key=lambda state: state.rank), "running requests are out of order"
    assert list(waiting) == sorted(waiting, key=lambda state: state.rank), "waiting requests are out of order"
    assert {*running, *waiting} == set(live), "a live request is lost"
    assert len(running) + len(waiting) == len(live), "a request runs and waits at once"
    for state in waiting:
        assert state.status is Status.WAITING and not state.blocks and not state.is_decoding, state
        if state.parent is not None:
            _check_fork(state, state.parent)
    for state in running:
        assert state.status is Status.RUNNING and state.num_remaining >= 0 and state.parent is None, state
        known = len(state.token_ids) + state.num_sampled_in_flight
        assert state.num_scheduled == known - 1 if state.is_decoding else state.num_scheduled < known, state
        assert state.num_scheduled <= len(state.blocks) * block_size, state
        num_sink_blocks = 0 if retention is None else min(retention.num_sink_blocks, len(state.blocks))
        given_back = range(num_sink_blocks, state.num_kept_from)
        assert all((block == NULL_BLOCK) == (place in given_back) for place, block in enumerate(state.blocks)), state
        if given_back:
            assert state.num_kept_from <= retention.first_seen(state.num_scheduled), "a block that is seen was given back"
        if state.awaits_masks:
            assert state.num_sampled_in_flight <= 1, "a token is chosen before its mask is known"


def _check_fork(state: RequestState, parent: RequestState) -> None:
    assert parent.rank < state.rank, "a fork comes before its parent"
    assert parent.token_ids[: len(state.token_ids)] == state.token_ids, "a fork does not continue its parent"
