"""The log as it would be if a fault were mended, to be replayed. No token is made up: they change places, or salts."""

import dataclasses
from collections.abc import Sequence

from jaxkv.control.prefix_index import TOKEN_BYTES
from jaxkv.insight.clusters import Cluster
from jaxkv.insight.documents import sort_documents
from jaxkv.insight.nearest import Parting
from jaxkv.insight.packing import unpacked
from jaxkv.insight.prompt_log import PromptLog
from jaxkv.insight.token_texts import TokenBytes, num_agreeing_tokens


def with_fields_last(log: PromptLog, cluster: Cluster, num_moved: int) -> PromptLog:
    """The cluster's prompts with their first `num_moved` varying spans behind all that is common."""
    template, prompts = cluster.template, {}
    for number in cluster.members:
        if (filled := template.fill(log.requests[number].prompt)) is not None:
            prompts[number] = template.with_fields_last(filled, num_moved)
    return log.replaced(prompts)


def with_sorted_documents(log: PromptLog, cluster: Cluster) -> PromptLog:
    """The cluster's prompts with their documents in one order."""
    return log.replaced({n: sort_documents(log.requests[n].prompt, cluster.documents) for n in cluster.members})


def with_one_salt(log: PromptLog) -> PromptLog:
    requests = tuple([dataclasses.replace(request, salt=None) for request in log.requests])
    return dataclasses.replace(log, requests=requests)


def with_same_tokens(log: PromptLog, partings: Sequence[Parting], token_bytes: TokenBytes) -> PromptLog:
    """Prompts whose text agrees further with their nearest's than their tokens do, with the nearest's tokens as far as
    both texts have a boundary of tokens in common."""
    prompts: dict[int, bytes] = {}
    for number, parting in enumerate(partings):
        if parting.nearest is None:
            continue
        prompt, size = log.requests[number].prompt, parting.num_common * TOKEN_BYTES
        other = (
            prompts.get(parting.nearest, log.requests[parting.nearest].prompt) + log.requests[parting.nearest].output
        )
        ours, theirs = (unpacked(data[size:]) for data in (prompt, other))
        joint = _last_joint(ours, theirs, token_bytes)
        if joint is not None:
            own, taken = (size + count * TOKEN_BYTES for count in joint)
            prompts[number] = other[:taken] + prompt[own:]
    return log.replaced(prompts)


def _last_joint(ours: Sequence[int], theirs: Sequence[int], token_bytes: TokenBytes) -> tuple[int, int] | None:
    """The last place that both texts have reached after whole tokens, counted in tokens of each; None if there is none
    behind the start."""
    counts = num_agreeing_tokens(ours, theirs, token_bytes)
    places: list[dict[int, int]] = []
    for tokens, count in zip((ours, theirs), counts, strict=True):
        end, ends = 0, {}
        for place, token in enumerate(tokens[:count], 1):
            end += len(token_bytes(token))
            ends[end] = place
        places.append(ends)
    common = places[0].keys() & places[1].keys()
    return (places[0][max(common)], places[1][max(common)]) if common else None
