"""Engine requests out of a trace: as long, and sharing as many prefix blocks, as the trace tells.

What the ids of a trace's blocks say is exact for engine blocks that are a part or a multiple of the trace's: an id
names everything up to its block's end, so

    engine blocks of 1/k    (id, 0), (id, 1), ... (id, k - 1)     equal where the ids are
    engine blocks of k      the last of the k ids                 equal where all k are

Prompts that part inside a block of the trace share nothing of that block, whatever they really had in common: of small
engine blocks a replay finds the least that they could share.
"""

from collections.abc import Iterator, Sequence

from jaxkv.core.errors import ConfigError
from jaxkv.core.request import Request, SamplingParams
from jaxkv.core.unseen_tokens import UnseenTokens
from jaxkv.simulation.traces import Trace, TraceRequest


class BlockNames(Sequence[bytes]):
    """Names of a request's leading engine blocks, made when asked for: in small blocks a trace has millions."""

    __slots__ = ("_ids", "_size", "_trace_size", "_count", "_num_tokens")

    def __init__(self, ids: Sequence[int], block_size: int, trace_block_size: int, num_tokens: int):
        """`num_tokens`: covered by the ids; the last block of them may be partial."""
        self._ids = ids
        self._size = block_size
        self._trace_size = trace_block_size
        self._num_tokens = num_tokens
        self._count = -(-num_tokens // block_size)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: int | slice) -> bytes | list[bytes]:
        if isinstance(place, slice):
            return [self._name(one) for one in range(self._count)[place]]
        return self._name(range(self._count)[place])

    def _name(self, place: int) -> bytes:
        last = min((place + 1) * self._size, self._num_tokens) - 1  # its last token, which the name vouches for
        block, offset = divmod(last, self._trace_size)
        if self._size >= self._trace_size:
            return b"%d" % self._ids[block]
        return b"%d.%d" % (self._ids[block], offset // self._size)


def check_block_size(trace: Trace, block_size: int) -> None:
    """Raises ConfigError where the trace's ids say nothing exact of blocks of this size."""
    size = trace.block_size
    if has_tokens(trace) or size is None or size % block_size == 0 or block_size % size == 0:
        return
    raise ConfigError(
        f"block_size is {block_size}, but {trace.name} has ids of blocks of {size} tokens: choose a divisor or a multiple "
        f"of {size}"
    )


def has_tokens(trace: Trace) -> bool:
    """Whether it has token ids, so that it can be replayed with blocks of any size and shared heads of blocks."""
    return all(request.token_ids is not None for request in trace.requests)


def trace_requests(
    trace: Trace, block_size: int, *, full_blocks_only: bool = True, speed: float = 1.0
) -> Iterator[Request]:
    """The requests, in the trace's order, with ids "0", "1", ...

    Prompts with token ids are those tokens; others are `UnseenTokens`, and need `SchedulerConfig.unseen_tokens`.
    Outputs are as long as the trace has them, but at least one token. Nobody shares them, but what a request log tells
    of their blocks.

    Args:
      block_size: of the engine.
      full_blocks_only: a last, partial block of a prompt is nobody else's. Otherwise it counts as a full one: the prompt is
        that much longer.
      speed: arrivals come so many times as fast.

    Raises ConfigError; see `check_block_size`.
    """
    check_block_size(trace, block_size)
    named = not has_tokens(trace)
    sampling: dict[int, SamplingParams] = {}
    for number, row in enumerate(trace.requests):
        most = max(1, row.output_length)
        if most not in sampling:
            sampling[most] = SamplingParams(max_tokens=most, ignore_eos=True)
        yield Request(
            str(number),
            UnseenTokens(prompt_length(trace, row, block_size, full_blocks_only)) if named else row.token_ids,
            sampling[most],
            arrival_time=row.arrival / speed,
            cache_salt=row.salt,
            block_names=block_names(trace, row, block_size, full_blocks_only) if named else (),
        )


def known_sequences(trace: Trace) -> dict[str, tuple[int, ...]]:
    """By request id: prompt and output of requests whose tokens the trace has, for `SimExecutor`."""
    if not has_tokens(trace):
        return {}
    return {str(number): row.token_ids + (row.output_token_ids or ()) for number, row in enumerate(trace.requests)}


def prompt_length(trace: Trace, row: TraceRequest, block_size: int, full_blocks_only: bool) -> int:
    if full_blocks_only or row.block_ids is None or trace.is_log:
        return row.input_length
    return -(-row.input_length // block_size) * block_size


def block_names(trace: Trace, row: TraceRequest, block_size: int, full_blocks_only: bool = True) -> Sequence[bytes]:
    """Names of the leading blocks that others may share; see the module."""
    size = trace.block_size
    if row.block_ids is None or size is None:
        return ()
    if trace.is_log:
        num_tokens = len(row.block_ids) * size
    else:
        num_tokens = row.input_length // size * size if full_blocks_only else row.input_length
    if full_blocks_only or trace.is_log:
        num_tokens -= num_tokens % block_size
    return BlockNames(row.block_ids, block_size, size, num_tokens)


def longest(trace: Trace, block_size: int, full_blocks_only: bool = True) -> int:
    """Tokens of the longest request, output included: the least max_model_len that refuses none."""
    return max(
        prompt_length(trace, row, block_size, full_blocks_only) + max(1, row.output_length) for row in trace.requests
    )


def most_blocks(trace: Trace, block_size: int, full_blocks_only: bool = True) -> int:
    """Blocks with which nothing is ever evicted: no request shares anything."""
    return sum(
        -(-(prompt_length(trace, row, block_size, full_blocks_only) + max(1, row.output_length)) // block_size)
        for row in trace.requests
    )
