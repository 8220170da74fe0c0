"""What a serving benchmark asks, and when. Prompts are made of symbols; equal symbols become equal tokens, so that prefixes
are shared as planned, whatever the endpoint takes: token ids, or text.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxkv.core.errors import ConfigError
from jaxkv.simulation.traces import Trace

Symbols = tuple[int, ...]
# One token each in most vocabularies.
_WORDS = (
    "the of and to in is was for on that with as it by at from his an be this which or are not had but one were her all "
    "they you their first been has have who into more when there can some other time than only may about over such new "
    "these two out up after also its most any then many where through under between three years made work part world "
    "house water place small large long high school state city last great right well way day man people life number"
).split()


@dataclasses.dataclass(frozen=True)
class Turn:
    symbols: Symbols
    output_len: int


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Turns that follow each other, each with all before it as its history. Most have one.

    Attributes:
      arrival: seconds after the start, for the first turn; the others come when the answer before them has come.
    """

    arrival: float
    turns: tuple[Turn, ...]


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Tokens of prompts and answers. `range_ratio` r draws each from (1 - r) to (1 + r) times its length."""

    input_len: int
    output_len: int
    prefix_len: int = 0
    range_ratio: float = 0.0


def arrivals(count: int, request_rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds after the start: gamma-distributed intervals, a Poisson process for a burstiness of 1 and a fixed schedule
    for infinity; the last request comes at count / request_rate exactly. All at once for an infinite rate."""
    if np.isinf(request_rate):
        return [0.0] * count
    if np.isinf(burstiness):
        return [(i + 1) / request_rate for i in range(count)]
    times = np.cumsum(np.random.default_rng([seed, 0]).gamma(burstiness, size=count))
    return (times * (count / request_rate / times[-1])).tolist()


def shared_prefix(count: int, lengths: Lengths, num_prefixes: int, seed: int) -> list[list[Turn]]:
    """Prompts of their own behind prefixes that they take in turn; without `prefix_len` they share nothing."""
    rng = np.random.default_rng([seed, 1])
    return [
        [Turn(_symbols(seed, 1, i % num_prefixes, lengths.prefix_len) + turn.symbols, turn.output_len)]
        for i, turn in enumerate(_turns(count, lengths, seed, rng))
    ]


def multi_turn(count: int, lengths: Lengths, num_turns: int, seed: int) -> list[list[Turn]]:
    """Conversations of `num_turns` requests behind one prefix, `count` requests in all."""
    turns = _turns(count, lengths, seed, np.random.default_rng([seed, 1]))
    system = _symbols(seed, 1, 0, lengths.prefix_len)
    talks = [turns[i : i + num_turns] for i in range(0, count, num_turns)]
    return [[Turn(system + talk[0].symbols, talk[0].output_len), *talk[1:]] for talk in talks]


def of_trace(trace: Trace, scale: float, seed: int) -> list[list[Turn]]:
    """A trace's prompts and lengths: equal block ids are equal tokens. `scale` multiplies all lengths.

    Raises:
      ConfigError: blocks would not have a whole number of tokens.
    """
    if trace.block_size is None:
        return [
            [Turn(_symbols(seed, 0, i, _scaled(row.input_length, scale)), _scaled(row.output_length, scale))]
            for i, row in enumerate(trace.requests)
        ]
    block = trace.block_size * scale
    if block != int(block) or block < 1:
        raise ConfigError(
            f"trace_scale is {scale:g}, so that a block of {trace.block_size} tokens would have {block:g}: "
            f"choose a scale that gives whole blocks, such as {16 / trace.block_size:g} for blocks of 16"
        )
    return [
        [
            Turn(
                sum((_symbols(seed, 2, i, int(block)) for i in row.block_ids), ())[: _scaled(row.input_length, scale)],
                _scaled(row.output_length, scale),
            )
        ]
        for row in trace.requests
    ]


def scheduled(prompts: Sequence[Sequence[Turn]], times: Sequence[float]) -> list[Conversation]:
    return [Conversation(time, tuple(turns)) for time, turns in zip(times, prompts, strict=True)]


def token_ids(symbols: Symbols, vocab_size: int) -> list[int]:
    """From 100 on: below lie special tokens in many vocabularies."""
    return [100 + symbol % (vocab_size - 100) for symbol in symbols]


def text(symbols: Symbols) -> str:
    return " ".join(_WORDS[symbol % len(_WORDS)] for symbol in symbols)


def _turns(count: int, lengths: Lengths, seed: int, rng: np.random.Generator) -> list[Turn]:
    low, high = 1 - lengths.range_ratio, 1 + lengths.range_ratio
    return [
        Turn(
            _symbols(seed, 0, i, _scaled(lengths.input_len, rng.uniform(low, high))),
            _scaled(lengths.output_len, rng.uniform(low, high)),
        )
        for i in range(count)
    ]


def _symbols(seed: int, kind: int, number: int, count: int) -> Symbols:
    return tuple(np.random.default_rng([seed, kind, number]).integers(0, 2**31, count).tolist())


def _scaled(length: int, factor: float) -> int:
    return max(1, round(length * factor))
