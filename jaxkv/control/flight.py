"""What the scheduler remembers of a submitted plan until its result comes."""

import dataclasses
from collections.abc import Sequence

from jaxkv.control.request_state import RequestState, Status
from jaxkv.core.plan import StepResult


@dataclasses.dataclass(eq=False, slots=True)
class Flight:
    """One request's part of a submitted plan: KV tokens it adds, and most tokens it samples."""

    state: RequestState
    num_kv: int
    num_sampled: int


def check_result(step_id: int, flights: Sequence[Flight], result: StepResult) -> None:
    """A live row gets what was planned unless it stops: anything else means that host and device disagree.

    Checked as a whole before any of it is used, so that no request ends without being told.
    """
    if result.step_id != step_id:
        raise RuntimeError(f"Expected the result of step {step_id}, got {result.step_id=}: results come in order")
    sampling = [flight for flight in flights if flight.num_sampled]
    if len(sampling) != len(result.rows):
        raise RuntimeError(f"Expected {len(sampling)} rows from step {step_id}, got {len(result.rows)}")
    for flight, row in zip(sampling, result.rows, strict=True):
        state, count = flight.state, len(row.token_ids)
        if row.request_id != state.request.request_id:
            raise RuntimeError(f"Expected a result for request {state.request_id}, got one for {row.request_id}")
        if count == flight.num_sampled or state.status is Status.FINISHED:
            continue
        if not (row.stopped and 0 < count < flight.num_sampled):
            raise RuntimeError(
                f"request {row.request_id} was to get {flight.num_sampled} tokens in step {step_id}, got {count} "
                f"with {row.stopped=}"
            )
