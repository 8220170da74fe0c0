"""StepOutput: what a call brings back to the host, tokens and ends packed so that one copy reads them."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.core.plan import RowResult
from jaxkv.core.request import TokenLogprobs
from jaxkv.execution.sampling import Logprobs

STOPPED, EXHAUSTED = 1, 2
_HEADER = 2  # columns before the tokens: number emitted, finish flags


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepOutput:
    packed: jax.Array | np.ndarray  # i32[B, 2 + C] number emitted, finish flags, tokens
    logprobs: Logprobs | None  # leaves [C, B, ...]; read only for rows that asked
    prompt_logprobs: Logprobs | None = None  # of prefill: leaves [T, ...]; read only where chunks have targets

    @staticmethod
    def of_one_step(
        tokens: jax.Array, emitted: jax.Array, stopped: jax.Array, exhausted: jax.Array, logprobs: Logprobs
    ) -> "StepOutput":
        packed = jnp.stack([emitted, pack_flags(stopped, exhausted), tokens], axis=1)
        return StepOutput(packed, jax.tree.map(lambda x: x[None], logprobs))

    @staticmethod
    def of_prefill(sampled: "StepOutput | None", prompt_logprobs: Logprobs, num_rows: int) -> "StepOutput":
        """`sampled` is None where no chunk ends its prompt: nothing is emitted then."""
        if sampled is None:
            sampled = StepOutput(np.zeros((num_rows, _HEADER), np.int32), None)
        return dataclasses.replace(sampled, prompt_logprobs=prompt_logprobs)


def pack_flags(stopped: jax.Array, exhausted: jax.Array) -> jax.Array:
    return stopped * STOPPED + exhausted * EXHAUSTED


def finish_flags(tokens: jax.Array, stop_ids: jax.Array, budget: jax.Array) -> tuple[jax.Array, jax.Array]:
    """bool[B] each: the token is a stop id; it uses up the budget (as it was before the token)."""
    return (tokens[:, None] == stop_ids).any(axis=1), budget <= 1


class Owner(NamedTuple):
    """Whose row of an output it is, and what the request wants to know.

    Attributes:
      num_logprobs: alternatives a sampled token; None for no logprobs.
      targets: prompt tokens whose log-probabilities are wanted, with `num_prompt_logprobs` alternatives each.
      first_target: where the first of them stands in the call's tokens.
    """

    request_id: str
    num_logprobs: int | None = None
    targets: tuple[int, ...] = ()
    first_target: int = 0
    num_prompt_logprobs: int = 0


def read_rows(output: StepOutput, owners: Sequence[Owner | None]) -> list[RowResult]:
    """Results of the first len(owners) rows but those without an owner: one copy to the host, and one more for each
    kind of log-probabilities where a row wants them."""
    packed = np.asarray(output.packed)
    logprobs = prompt_logprobs = None
    if output.logprobs is not None and any([o is not None and o.num_logprobs is not None for o in owners]):
        logprobs = jax.device_get(output.logprobs)
    if any([owner is not None and owner.targets for owner in owners]):
        prompt_logprobs = jax.device_get(output.prompt_logprobs)
    results = []
    for i, owner in enumerate(owners):
        if owner is None:
            continue
        emitted, flags = int(packed[i, 0]), int(packed[i, 1])
        tokens = tuple(packed[i, _HEADER : _HEADER + emitted].tolist())
        news = None
        if owner.num_logprobs is not None:
            places = [(step, i) for step in range(emitted)]
            news = _token_logprobs(logprobs, places, tokens, owner.num_logprobs)
        of_prompt = ()
        if owner.targets:
            places = [(owner.first_target + place,) for place in range(len(owner.targets))]
            of_prompt = _token_logprobs(prompt_logprobs, places, owner.targets, owner.num_prompt_logprobs)
        stopped, exhausted = bool(flags & STOPPED), bool(flags & EXHAUSTED)
        results.append(RowResult(owner.request_id, tokens, stopped, exhausted, news, of_prompt))
    return results


def _token_logprobs(
    logprobs: Logprobs, places: Sequence[tuple[int, ...]], tokens: Sequence[int], num_top: int
) -> tuple[TokenLogprobs, ...]:
    """What stands at `places`, one a token."""
    return tuple(
        TokenLogprobs(
            token_id=token,
            logprob=float(logprobs.chosen[place]),
            rank=int(logprobs.rank[place]),
            top=tuple(
                zip(logprobs.top_ids[place][:num_top].tolist(), logprobs.top[place][:num_top].tolist(), strict=True)
            ),
        )
        for place, token in zip(places, tokens, strict=True)
    )
