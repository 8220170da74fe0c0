"""The settings that must not change a token, and a run of the engine under one of them."""

import dataclasses
from collections.abc import Callable, Sequence

from jaxkv.control.engine import Engine
from jaxkv.core.request import Request
from tests.support.tiny_programs import run_requests, tokens_of

FACTORS = {
    "chunk": (7, 64),
    "decode_steps": (1, 8),
    "max_in_flight": (1, 2),
    "cache": ("off", "cold", "full", "partial", "in_flight"),
    "preempt_every": (0, 3),
    "neighbours": ("alone", "together", "reordered"),
    "block_size": (8, 16, 32),
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One point of FACTORS.

    cache: off; cold: every engine starts empty; full: the same prompts have run before; partial: prompts with the first
    two thirds of each in common have; in_flight: each prompt comes twice, in the same step.
    neighbours: each request in an engine by itself, all at once, or all at once in reverse order.
    """

    chunk: int
    decode_steps: int
    max_in_flight: int
    cache: str
    preempt_every: int
    neighbours: str
    block_size: int


def run_setting(
    setting: Setting, requests: Sequence[Request], make: Callable[[Setting], Engine], *, vocab_size: int
) -> tuple[dict[str, list[tuple[int, ...]]], list[Engine]]:
    """Tokens of each request, once for each time it ran, and the engines that were used."""
    order = list(requests) if setting.neighbours != "reordered" else list(reversed(requests))
    groups = [[request] for request in order] if setting.neighbours == "alone" else [order]
    tokens: dict[str, list[tuple[int, ...]]] = {request.request_id: [] for request in requests}
    engines = []
    for group in groups:
        engine = make(setting)
        engines.append(engine)
        if setting.cache in ("full", "partial"):
            run_requests(engine, [_earlier(request, setting.cache, vocab_size) for request in group])
        if setting.cache == "in_flight":
            group = [dataclasses.replace(r, request_id=f"{r.request_id}{twin}") for r in group for twin in ("", "+")]
        news = run_requests(engine, group, preempt_every=setting.preempt_every)
        for request_id, outputs in news.items():
            tokens[request_id.rstrip("+")].append(tokens_of(outputs))
    return tokens, engines


def _earlier(request: Request, cache: str, vocab_size: int) -> Request:
    prompt = request.prompt_token_ids
    common = len(prompt) if cache == "full" else 2 * len(prompt) // 3
    changed = tuple((token + 1) % vocab_size for token in prompt[common:])
    sampling = dataclasses.replace(request.sampling, max_tokens=2)
    return dataclasses.replace(
        request,
        request_id=f"earlier {request.request_id}",
        prompt_token_ids=prompt[:common] + changed,
        sampling=sampling,
    )
