"""What the scheduler remembers of a submitted plan until its result comes."""

import dataclasses
from collections.abc import Sequence

from jaxkv.control.request_state import RequestState, Status
from jaxkv.core.plan import StepResult, TokenMask


@dataclasses.dataclass(eq=False, slots=True)
class Flight:
    """One request's part of a submitted plan: KV tokens it adds, most tokens it samples, prompt logprobs it brings."""

    state: RequestState
    num_kv: int
    num_sampled: int
    num_prompt_logprobs: int = 0

    @property
    def has_result(self) -> bool:
        return self.num_sampled > 0 or self.num_prompt_logprobs > 0


def check_result(step_id: int, flights: Sequence[Flight], result: StepResult) -> None:
    """A live row gets what was planned unless it stops: anything else means that host and device disagree.

    Checked as a whole before any of it is used, so that no request ends without being told.
    """
    if result.step_id != step_id:
        raise RuntimeError(f"Expected the result of step {step_id}, got {result.step_id=}: results come in order")
    telling = [flight for flight in flights if flight.num_sampled or flight.num_prompt_logprobs]
    if len(telling) != len(result.rows):
        raise RuntimeError(f"Expected {len(telling)} rows from step {step_id}, got {len(result.rows)}")
    for flight, row in zip(telling, result.rows, strict=True):
        state, count = flight.state, len(row.token_ids)
        if row.request_id != state.request_id:
            raise RuntimeError(f"Expected a result for request {state.request_id}, got one for {row.request_id}")
        if len(row.prompt_logprobs) != flight.num_prompt_logprobs:
            raise RuntimeError(
                f"request {row.request_id} was to get {flight.num_prompt_logprobs} prompt logprobs in step {step_id}, "
                f"got {len(row.prompt_logprobs)}"
            )
        if count == flight.num_sampled or state.status is Status.FINISHED:
            continue
        if not (row.stopped and 0 < count < flight.num_sampled):
            raise RuntimeError(
                f"request {row.request_id} was to get {flight.num_sampled} tokens in step {step_id}, got {count} "
                f"with {row.stopped=}"
            )


def untold_masks(flights: Sequence[Flight]) -> tuple[TokenMask, ...]:
    """Masks that the device needs before these parts of a plan; they count as told from here on."""
    masks = []
    for flight in flights:
        choice = flight.state.choice
        if choice is not None and flight.num_sampled and not choice.is_told:
            choice.is_told = True
            masks.append(TokenMask(flight.state.row, choice.mask))
    return tuple(masks)
