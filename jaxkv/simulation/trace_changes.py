"""Traces made out of traces: other arrivals, other lengths, tokens for block ids."""

import dataclasses
import itertools
import random

from jaxkv.core.errors import ConfigError
from jaxkv.simulation.trace_requests import has_tokens
from jaxkv.simulation.traces import Trace


def poisson_arrivals(trace: Trace, seed: int = 0) -> Trace:
    """The same requests in the same order, at random times: one a second on average, independent of each other."""
    rng = random.Random(seed)
    arrivals = itertools.accumulate(rng.expovariate(1.0) for _ in trace.requests)
    requests = [
        dataclasses.replace(request, arrival=arrival) for request, arrival in zip(trace.requests, arrivals, strict=True)
    ]
    return dataclasses.replace(trace, requests=tuple(requests))


def with_token_ids(trace: Trace, vocab_size: int = 32_000) -> Trace:
    """The same prompts spelled out, so that a model can read them, and an engine share them in blocks of any size.

    A block's tokens are a function of its id: prompts part at the first token of a block. As it is if they have tokens.

    Raises ConfigError for a trace without ids.
    """
    if has_tokens(trace):
        return trace
    if trace.block_size is None:
        raise ConfigError(f"{trace.name} has neither token ids nor hash_ids, so its prompts cannot be spelled out")
    size, blocks = trace.block_size, {}

    def tokens(block: int) -> tuple[int, ...]:
        if block not in blocks:
            rng = random.Random(block)
            blocks[block] = tuple([rng.randrange(vocab_size) for _ in range(size)])
        return blocks[block]

    requests = []
    for row in trace.requests:
        prompt = tuple(itertools.chain.from_iterable(map(tokens, row.block_ids)))[: row.input_length]
        requests.append(dataclasses.replace(row, token_ids=prompt))
    return dataclasses.replace(trace, requests=tuple(requests))


def scaled(trace: Trace, factor: int) -> Trace:
    """Prompts, outputs and blocks so many times shorter, for a smaller model; requests share the same blocks.

    Raises ConfigError where blocks cannot be cut so.
    """
    if factor == 1:
        return trace
    if has_tokens(trace):
        raise ConfigError(f"scale is {factor}, but {trace.name} has token ids, which cannot be scaled: set it to 1")
    if trace.block_size is not None and trace.block_size % factor:
        raise ConfigError(
            f"scale is {factor}; it must divide the {trace.block_size} tokens of the blocks of {trace.name}"
        )
    requests = [
        dataclasses.replace(
            row, input_length=-(-row.input_length // factor), output_length=max(1, round(row.output_length / factor))
        )
        for row in trace.requests
    ]
    size = None if trace.block_size is None else trace.block_size // factor
    return dataclasses.replace(trace, requests=tuple(requests), block_size=size)
