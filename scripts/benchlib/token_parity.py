"""Whether two engines that round differently said the same."""

import itertools
import math

from jaxkv.core.request import TokenLogprobs

Told = dict[str, tuple[TokenLogprobs, ...]]
"""By request: its greedy tokens, each with the likeliest two."""


def compare_tokens(ours: Told, theirs: Told, near_tie: float) -> tuple[int, int, list[str]]:
    """(requests that agree, tokens up to where they part, what is wrong). Requests agree when all tokens are equal, or part
    at a step where they hold both tokens for almost equally likely; from there on the texts are different ones."""
    right, equal, wrong = 0, 0, []
    for name, mine in ours.items():
        pairs = list(zip(mine, theirs[name], strict=True))
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0].token_id == pair[1].token_id, pairs))
        equal += same
        if same == len(pairs):
            right += 1
            continue
        a, b = pairs[same]
        # What each gives the other's choice, against its own.
        gaps = [x.logprob - dict(x.top).get(y.token_id, -math.inf) for x, y in ((a, b), (b, a))]
        if max(gaps) <= near_tie:
            right += 1
        else:
            wrong.append(
                f"prompt of {name}: token {same} is {a.token_id}, with xla {b.token_id}, {max(gaps):.3f} apart"
            )
    return right, equal, wrong
