"""Why each prompt token was computed: every token that was not cached has one cause.

What the engine counted when it admitted the request (MissReason) is taken as it is; what was first seen to it is told
apart by comparison with earlier requests:

    0        cached      num_same_salt      num_common                                              num_tokens
    |  found  | was there once  | under a salt |  other tokens, same text | same again, elsewhere |  new  |
"""

import dataclasses
import enum

from jaxkv.core.metrics import MissReason
from jaxkv.insight.nearest import Parting
from jaxkv.insight.prompt_log import LoggedRequest
from jaxkv.insight.prompt_replay import Served


class Cause(enum.Enum):
    CHANGED_TEXT = "changed_text"  # an earlier prompt has the same tokens behind a span that differs
    REORDERED = "reordered"  # earlier prompts have the same documents in another order
    TOKEN_BOUNDARY = "token_boundary"  # an earlier prompt has the same text in other tokens
    SALT = "salt"  # cached, but under another cache_salt
    EVICTED = "evicted"  # cached once, and overwritten
    SHORTER_THAN_BLOCK = (
        "shorter_than_block"  # cached in a block that agrees in part only, and could not be copied from
    )
    NOT_CACHED = "not_cached"  # an earlier request had it, but it was not there: not computed yet, a restart, a reset
    NEEDS_LOGITS = "needs_logits"  # cached, but prompt log-probabilities are wanted
    LAST_TOKEN = "last_token"  # of a wholly cached prompt
    NEW_TEXT = "new_text"  # no earlier request has it


@dataclasses.dataclass(frozen=True, slots=True)
class SameElsewhere:
    """Tokens behind the place where a request parts that earlier requests have too: as other tokens of the same text,
    behind a changed span, or in documents in another order."""

    boundary: int = 0
    changed: int = 0
    reordered: int = 0


def causes_of(
    request: LoggedRequest,
    served: Served,
    parting: Parting,
    same: SameElsewhere,
    block_size: int,
    num_overwritten: int = 0,
) -> dict[Cause, int]:
    """Tokens by cause; their sum is what was not cached. Causes without tokens are left out.

    `num_overwritten`: tokens that the pool cannot have kept, which the engine counts as first seen once it has forgotten
    that it evicted them.
    """
    left = request.num_tokens - served.cached
    causes: dict[Cause, int] = {}

    def take(cause: Cause, tokens: int) -> int:
        nonlocal left
        tokens = max(0, min(tokens, left))
        left -= tokens
        if tokens:
            causes[cause] = causes.get(cause, 0) + tokens
        return tokens

    missed = served.missed
    taken = take(Cause.NEEDS_LOGITS, missed.get(MissReason.NEEDS_LOGITS.value, 0))
    taken += take(Cause.EVICTED, missed.get(MissReason.EVICTED.value, 0))
    taken += take(Cause.EVICTED, num_overwritten - causes.get(Cause.EVICTED, 0))
    taken += take(Cause.LAST_TOKEN, missed.get(MissReason.LAST_TOKEN.value, 0))
    once_there = parting.num_same_salt - served.cached - taken
    in_a_block = once_there if once_there < block_size else missed.get(MissReason.SHORTER_THAN_BLOCK.value, 0)
    once_there -= take(Cause.SHORTER_THAN_BLOCK, in_a_block)
    take(Cause.NOT_CACHED, once_there)
    take(Cause.SALT, parting.num_common - max(parting.num_same_salt, served.cached))
    take(Cause.TOKEN_BOUNDARY, same.boundary)
    take(Cause.CHANGED_TEXT, same.changed)
    take(Cause.REORDERED, same.reordered)
    take(Cause.NEW_TEXT, left)
    return causes


def num_recomputed(request: LoggedRequest) -> int:
    """Tokens that were computed once more, after preemptions; outputs included."""
    record = request.record
    if record is None or not record.preemptions:
        return 0
    return max(0, record.computed_tokens - (record.prompt_tokens - record.cached_tokens))
