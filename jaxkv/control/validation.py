"""What a request may ask for. The scheduler checks all that it takes in; whoever wants to refuse earlier, or more, may too."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from jaxkv.core.errors import RequestError
from jaxkv.core.request import MAX_LOGIT_BIASES, Request, SamplingParams, StructuredOutputs
from jaxkv.core.unseen_tokens import UnseenTokens

# Every stop string is searched for with each token.
MAX_STOPS = 64
# Half of the device's table of stop ids a row, which holds the model's own end-of-sequence ids too.
MAX_STOP_TOKEN_IDS = 32
MAX_STOP_LENGTH = 1024
# Sequences of one request, whose states are all made at once.
MAX_SEQUENCES = 1024
MAX_BAD_WORDS = 1000
# Far beyond what is useful, and no float32 logit overflows.
REPETITION_PENALTIES = (0.01, 100.0)
# As vLLM has it: smaller ones count as greedy, since logits divided by them may overflow.
LEAST_TEMPERATURE = 1e-5
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def checked_sampling(
    params: SamplingParams,
    prompt_token_ids: Sequence[int],
    *,
    vocab_size: int,
    max_model_len: int,
    max_logprobs: int,
    clip: bool = False,
) -> SamplingParams:
    """The same parameters, ready for the device: top_k and seed fit 31 bits (equal seeds stay equal), logit_bias is a
    tuple of pairs.

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
    if not 1 <= params.n <= MAX_SEQUENCES:
        raise RequestError(f"n is {str(params.n)[:50]}; it must be 1 to {MAX_SEQUENCES}", param="n")
    _in_range("temperature", params.temperature, 0, math.inf)
    _in_range("top_p", params.top_p, 0, 1)
    if params.top_p == 0:
        raise RequestError("top_p is 0; it must be above 0 and at most 1", param="top_p")
    _in_range("min_p", params.min_p, 0, 1)
    _in_range("repetition_penalty", params.repetition_penalty, *REPETITION_PENALTIES)
    _in_range("presence_penalty", params.presence_penalty, -2, 2)
    _in_range("frequency_penalty", params.frequency_penalty, -2, 2)
    logit_bias = _checked_bias(params.logit_bias, vocab_size)
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
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and not 0 <= count <= max_logprobs:
            raise RequestError(
                f"{count} {name} asked for; 0 to {max_logprobs} can be had (the server's max_logprobs)", param=name
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
    check_token_limits(params, vocab_size)
    temperature = params.temperature if params.temperature >= LEAST_TEMPERATURE else 0.0
    top_k = params.top_k if params.top_k < vocab_size else 0  # a huge k keeps all, and must not overflow 32 bits
    seed = None if params.seed is None else params.seed % 2**31
    return dataclasses.replace(params, temperature=temperature, top_k=max(top_k, 0), seed=seed, logit_bias=logit_bias)


def check_token_limits(params: SamplingParams, vocab_size: int) -> None:
    """Raises RequestError for what no constraint can be made from."""
    if params.allowed_token_ids is not None:
        if not params.allowed_token_ids:
            raise RequestError("allowed_token_ids is empty: name at least one id", param="allowed_token_ids")
        for token_id in params.allowed_token_ids:
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"allowed_token_ids has {token_id}; ids of this model are 0 to {vocab_size - 1}",
                    param="allowed_token_ids",
                )
    if len(params.bad_words) > MAX_BAD_WORDS:
        raise RequestError(
            f"bad_words has {len(params.bad_words)} entries; at most {MAX_BAD_WORDS} are allowed", param="bad_words"
        )
    for word in params.bad_words:
        if not 1 <= len(word.strip()) <= len(word) <= MAX_STOP_LENGTH:
            raise RequestError(
                f"bad_words has {word[:50]!r}; a word has 1 to {MAX_STOP_LENGTH} characters, not all of them spaces",
                param="bad_words",
            )
    if params.structured_outputs is not None:
        _check_structured_outputs(params.structured_outputs)


def _check_structured_outputs(wanted: StructuredOutputs) -> None:
    given = {
        field.name: value
        for field in dataclasses.fields(wanted)
        if (value := getattr(wanted, field.name)) is not None and (field.name, value) != ("json_object", False)
    }
    if len(given) != 1:
        raise RequestError(
            f"structured_outputs sets {', '.join(given) or 'nothing'}; it must set exactly one of "
            f"{', '.join(field.name for field in dataclasses.fields(wanted))}",
            param="structured_outputs",
        )
    ((name, value),) = given.items()
    kinds = {"json": (str, bool, Mapping), "json_object": (bool,), "choice": (list, tuple)}
    if not isinstance(value, kinds.get(name, (str,))) or (name == "choice" and not _is_list_of(str, value)):
        wanted_kind = {"json": "a JSON Schema", "json_object": "true", "choice": "a list of texts"}.get(name, "a text")
        raise RequestError(f"{name} is a {type(value).__name__}; it must be {wanted_kind}", param="structured_outputs")
    texts = value if name == "choice" else [value] if isinstance(value, str) else []
    if name == "choice" and not (texts and all(texts)):
        raise RequestError("choice needs at least one text, and none may be empty", param="structured_outputs")


def checked_request(
    request: Request, *, vocab_size: int, max_model_len: int, max_logprobs: int, unseen_tokens: bool = False
) -> Request:
    """The same request, ready for the device; its output is cut at max_model_len.

    Args:
      unseen_tokens: there is no device: the prompt may be `UnseenTokens`, and the request may name its blocks.

    Raises:
      RequestError: naming the field, its value and what is allowed.
    """
    is_unseen = unseen_tokens and request.is_unseen
    for name, ok, wanted in (
        ("request_id", isinstance(request.request_id, str), "a string"),
        ("prompt_token_ids", is_unseen or _is_prompt(request.prompt_token_ids), "a tuple of integers"),
        ("block_names", is_unseen or request.block_names == (), "empty: only unseen tokens have names"),
        ("sampling", isinstance(request.sampling, SamplingParams), "SamplingParams"),
        ("arrival_time", request.arrival_time is None or _is_finite(request.arrival_time), "a number or None"),
        ("priority", _is_integer(request.priority), "an integer"),
        ("cache_salt", request.cache_salt is None or isinstance(request.cache_salt, str), "a string or None"),
        ("constraint", request.constraint is None or hasattr(request.constraint, "mask"), "a TokenConstraint or None"),
    ):
        if not ok:
            value = repr(getattr(request, name))
            raise RequestError(f"{name} is {value[:100]}; it must be {wanted}", param=name)
    sampling = checked_sampling(
        request.sampling,
        request.prompt_token_ids,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        max_logprobs=max_logprobs,
        clip=True,
    )
    if request.constraint is None and request.sampling.has_constraint:
        raise RequestError(
            "allowed_token_ids, bad_words and structured_outputs need a constraint made of them: set Request.constraint "
            "to what ConstraintCompiler.compile returns"
        )
    return dataclasses.replace(request, sampling=sampling)


def _checked_bias(
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]], vocab_size: int
) -> tuple[tuple[int, float], ...]:
    pairs = tuple(map(tuple, logit_bias.items() if isinstance(logit_bias, Mapping) else logit_bias))
    if len(pairs) > MAX_LOGIT_BIASES:
        raise RequestError(
            f"logit_bias has {len(pairs)} entries; at most {MAX_LOGIT_BIASES} are allowed", param="logit_bias"
        )
    if len(dict(pairs)) < len(pairs):
        raise RequestError("logit_bias names a token id twice", param="logit_bias")
    for token_id, bias in pairs:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"logit_bias has token id {token_id}; ids of this model are 0 to {vocab_size - 1}", param="logit_bias"
            )
        if not -100 <= bias <= 100:
            raise RequestError(
                f"logit_bias of token id {token_id} is {bias}; it must be -100 to 100", param="logit_bias"
            )
    return pairs


def check_token_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    if isinstance(token_ids, UnseenTokens):
        return
    low, high = min(token_ids, default=0), max(token_ids, default=0)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise RequestError(f"prompt has token id {wrong}; ids of this model are 0 to {vocab_size - 1}", param="prompt")


def _check_prompt(token_ids: Sequence[int], vocab_size: int, max_model_len: int, max_tokens: int | None) -> int:
    """Refuses a prompt that is empty, has ids out of range or is too long; returns the most tokens that may follow."""
    if not token_ids:
        raise RequestError("the prompt is empty: at least one token is needed", param="prompt")
    check_token_ids(token_ids, vocab_size)
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
        if field.name in _NUMBERS:
            ok, wanted = _is_number(value), "a number"
        elif field.name == "logit_bias":
            ok, wanted = _is_bias(value), "a mapping, or a tuple of pairs, of token ids to numbers"
        elif field.name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            ok, wanted = isinstance(value, bool), "a bool"
        elif field.name in ("stop", "stop_token_ids", "bad_words"):
            item = int if field.name == "stop_token_ids" else str
            ok, wanted = _is_list_of(item, value), f"a tuple of {item.__name__}"
        elif field.name == "allowed_token_ids":
            ok, wanted = value is None or _is_list_of(int, value), "a tuple of int or None"
        elif field.name == "structured_outputs":
            ok, wanted = value is None or isinstance(value, StructuredOutputs), "StructuredOutputs or None"
        else:
            optional = field.name in ("max_tokens", "seed", "logprobs", "prompt_logprobs")
            ok = _is_integer(value) or (optional and value is None)
            wanted = "an integer or None" if optional else "an integer"
        if not ok:
            raise RequestError(f"{field.name} is {repr(value)[:100]}; it must be {wanted}", param=field.name)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (_is_integer(value) and abs(value) <= 2**63)  # larger ones are no floats


def _is_finite(value: object) -> bool:
    return _is_number(value) and math.isfinite(value)


def _is_list_of(item: type, value: object) -> bool:
    return isinstance(value, list | tuple) and all(type(entry) is item for entry in value)


def _is_prompt(value: object) -> bool:
    return isinstance(value, tuple) and set(map(type, value)) <= {int}


def _is_bias(value: object) -> bool:
    if not isinstance(value, Mapping | list | tuple):
        return False
    pairs = value.items() if isinstance(value, Mapping) else value
    return all(
        isinstance(pair, list | tuple) and len(pair) == 2 and _is_integer(pair[0]) and _is_number(pair[1])
        for pair in pairs
    )


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        allowed = f"{low} to {high}" if math.isfinite(high) else f"at least {low}"
        raise RequestError(f"{name} is {value}; it must be {allowed}", param=name)
