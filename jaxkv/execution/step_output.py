"""StepOutput: what a call brings back to the host, tokens and ends packed so that one copy reads them."""

import dataclasses

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
    packed: jax.Array  # i32[B, 2 + C] number emitted, finish flags, tokens
    logprobs: Logprobs  # leaves [C, B, ...]; read only for rows that asked

    @staticmethod
    def of_one_step(
        tokens: jax.Array, emitted: jax.Array, stopped: jax.Array, exhausted: jax.Array, logprobs: Logprobs
    ) -> "StepOutput":
        packed = jnp.stack([emitted, pack_flags(stopped, exhausted), tokens], axis=1)
        return StepOutput(packed, jax.tree.map(lambda x: x[None], logprobs))


def pack_flags(stopped: jax.Array, exhausted: jax.Array) -> jax.Array:
    return stopped * STOPPED + exhausted * EXHAUSTED


def finish_flags(tokens: jax.Array, stop_ids: jax.Array, budget: jax.Array) -> tuple[jax.Array, jax.Array]:
    """bool[B] each: the token is a stop id; it uses up the budget (as it was before the token)."""
    return (tokens[:, None] == stop_ids).any(axis=1), budget <= 1


def read_rows(packed: np.ndarray, request_ids: list[str], logprobs: Logprobs | None, num_top: list[int | None]):
    """RowResults of the first len(request_ids) rows. `num_top[i]` is None where row i wants no logprobs."""
    results = []
    for i, request_id in enumerate(request_ids):
        emitted, flags = int(packed[i, 0]), int(packed[i, 1])
        tokens = tuple(packed[i, _HEADER : _HEADER + emitted].tolist())
        news = None
        if num_top[i] is not None:
            news = tuple(_token_logprobs(logprobs, step, i, token, num_top[i]) for step, token in enumerate(tokens))
        results.append(RowResult(request_id, tokens, bool(flags & STOPPED), bool(flags & EXHAUSTED), news))
    return results


def _token_logprobs(logprobs: Logprobs, step: int, row: int, token: int, num_top: int) -> TokenLogprobs:
    ids = logprobs.top_ids[step, row, :num_top].tolist()
    values = logprobs.top[step, row, :num_top].tolist()
    return TokenLogprobs(
        token_id=token,
        logprob=float(logprobs.chosen[step, row]),
        rank=int(logprobs.rank[step, row]),
        top=tuple(zip(ids, values, strict=True)),
    )
