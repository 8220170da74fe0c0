"""What a request may ask for: checked once, before it reaches the engine, for the server and for LLM alike."""

import dataclasses
import math
from collections.abc import Sequence

from jaxkv.core.errors import RequestError
from jaxkv.core.request import SamplingParams

# Every stop string is searched for with each token.
MAX_STOPS = 64
# Half of the device's table of stop ids a row, which holds the model's own end-of-sequence ids too.
MAX_STOP_TOKEN_IDS = 32
MAX_STOP_LENGTH = 1024


def checked_sampling(
    params: SamplingParams,
    prompt_token_ids: Sequence[int],
    *,
    vocab_size: int,
    max_model_len: int,
    max_logprobs: int,
    clip: bool = False,
) -> SamplingParams:
    """The same parameters, ready for the device: top_k and seed fit 31 bits (equal seeds stay equal).

    Args:
      clip: stop at max_model_len where max_tokens asks for more, rather than refuse.

    Raises:
      RequestError: naming the field, its value and what is allowed.
    """
    _check_types(params)
    room = _check_prompt(prompt_token_ids, vocab_size, max_model_len, None if clip else params.max_tokens)
    if params.min_tokens > room:
        raise RequestError(
            f"min_tokens is {params.min_tokens}, but only {room} tokens fit after the prompt", param="min_tokens"
        )
    _in_range("n", params.n, 1, math.inf)
    _in_range("temperature", params.temperature, 0, math.inf)
    _in_range("top_p", params.top_p, 0, 1)
    if params.top_p == 0:
        raise RequestError("top_p is 0; it must be above 0 and at most 1", param="top_p")
    _in_range("min_p", params.min_p, 0, 1)
    if params.top_k < -1:
        raise RequestError(f"top_k is {params.top_k}; it must be positive, or 0 or -1 to keep all", param="top_k")
    if params.max_tokens is not None and params.max_tokens < 1:
        raise RequestError(f"max_tokens is {params.max_tokens}; it must be at least 1", param="max_tokens")
    if params.min_tokens < 0:
        raise RequestError(f"min_tokens is {params.min_tokens}; it must be at least 0", param="min_tokens")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise RequestError(
            f"min_tokens is {params.min_tokens}, more than max_tokens = {params.max_tokens}", param="min_tokens"
        )
    if params.logprobs is not None and not 0 <= params.logprobs <= max_logprobs:
        raise RequestError(
            f"{params.logprobs} logprobs asked for; 0 to {max_logprobs} can be had (the server's max_logprobs)",
            param="logprobs",
        )
    for name, stops, most in (
        ("stop", params.stop, MAX_STOPS),
        ("stop_token_ids", params.stop_token_ids, MAX_STOP_TOKEN_IDS),
    ):
        if len(stops) > most:
            raise RequestError(f"{name} has {len(stops)} entries; at most {most} are allowed", param=name)
    for stop in params.stop:
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise RequestError(
                f"a stop string has {len(stop)} characters; 1 to {MAX_STOP_LENGTH} are allowed", param="stop"
            )
    for token_id in params.stop_token_ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"stop_token_ids has {token_id}; ids of this model are 0 to {vocab_size - 1}", param="stop_token_ids"
            )
    top_k = params.top_k if params.top_k < vocab_size else 0  # a huge k keeps all, and must not overflow 32 bits
    seed = None if params.seed is None else params.seed % 2**31
    return dataclasses.replace(params, top_k=max(top_k, 0), seed=seed)


def _check_prompt(token_ids: Sequence[int], vocab_size: int, max_model_len: int, max_tokens: int | None) -> int:
    """Refuses a prompt that is empty, has ids out of range or is too long; returns the most tokens that may follow."""
    if not token_ids:
        raise RequestError("the prompt is empty: at least one token is needed", param="prompt")
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise RequestError(f"prompt has token id {wrong}; ids of this model are 0 to {vocab_size - 1}", param="prompt")
    room = max_model_len - len(token_ids)
    limit = f"This model's maximum context length is {max_model_len} tokens. However, "
    if room < 1:
        raise RequestError(
            f"{limit}your prompt contains {len(token_ids)} input tokens, which leaves no room for output. "
            "Please reduce the length of the input prompt.",
            param="input_tokens",
        )
    if max_tokens is not None and max_tokens > room:
        raise RequestError(
            f"{limit}you requested {max_tokens} output tokens and your prompt contains {len(token_ids)} input tokens: "
            f"{max_tokens + len(token_ids)} in total. "
            f"Please ask for at most {room} output tokens or shorten the prompt.",
            param="max_tokens",
        )
    return room


def _check_types(params: SamplingParams) -> None:
    """A wrong type would fail later, in the engine, where it takes every other request with it."""
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if field.name in ("temperature", "top_p", "min_p"):
            ok, wanted = isinstance(value, int | float) and not isinstance(value, bool), "a number"
        elif field.name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            ok, wanted = isinstance(value, bool), "a bool"
        elif field.name in ("stop", "stop_token_ids"):
            item = str if field.name == "stop" else int
            ok = isinstance(value, list | tuple) and all(isinstance(entry, item) for entry in value)
            wanted = f"a tuple of {item.__name__}"
        else:
            optional = field.name in ("max_tokens", "seed", "logprobs")
            ok = (isinstance(value, int) and not isinstance(value, bool)) or (optional and value is None)
            wanted = "an integer or None" if optional else "an integer"
        if not ok:
            raise RequestError(f"{field.name} is {value!r}; it must be {wanted}", param=field.name)


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        allowed = f"{low} to {high}" if math.isfinite(high) else f"at least {low}"
        raise RequestError(f"{name} is {value}; it must be {allowed}", param=name)
