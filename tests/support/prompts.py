"""Prompts as lists of token ids, and logs of them."""

from jaxkv.control.prefix_index import token_bytes
from jaxkv.insight.prompt_log import LoggedRequest, PromptLog, token_log


def logged(number: int, tokens, output=(), **fields) -> LoggedRequest:
    """A request that arrived at second `number`."""
    prompt = token_bytes(tokens)
    return LoggedRequest(str(number), float(number), len(tokens), prompt, token_bytes(output), **fields)


def log_of(prompts, block_size: int = 16, **fields) -> PromptLog:
    """One request a second, in this order; `fields` are the same for all."""
    return token_log([logged(number, tokens, **fields) for number, tokens in enumerate(prompts)], block_size)
