"""The seam between the control plane (decides) and the data plane (computes): one StepPlan down, one StepResult up.

Inside a step the order is: block copies, row updates, token masks, prefill chunks, then up to `num_steps` decode steps. Steps run in
the order of their ids, also when the next one is submitted before the last one is read, so a block freed by the host
may be given to any later plan.

What is made for every row of every step is a NamedTuple: a frozen dataclass takes several times as long to make.
"""

import dataclasses
import enum
from collections.abc import Sequence
from typing import NamedTuple

from jaxkv.core.request import SamplingParams, TokenLogprobs

NULL_BLOCK = 0
"""Never allocated: what padding and finished rows write to, and what stands in a table where nothing looks any more."""


@dataclasses.dataclass(frozen=True)
class PrefillChunk:
    """Consecutive known tokens of one request whose KV this step computes.

    Attributes:
      row: the request's row; its block table (after this plan's updates) covers start + len(token_ids) tokens.
      start: position of the first token; everything before it is already in blocks.
      is_last: the chunk reaches the request's last known token: sample the next token and activate the row.
      targets: tokens whose log-probabilities are wanted (prompt_logprobs): those that follow the chunk's tokens
        first_target, first_target + 1, ... The last of them may be the first token of the next chunk.
    """

    request_id: str
    row: int
    start: int
    token_ids: Sequence[int]
    is_last: bool
    targets: tuple[int, ...] = ()
    first_target: int = 0

    @property
    def has_result(self) -> bool:
        """Whether the step's result has a row for it."""
        return self.is_last or bool(self.targets)


class Masking(enum.IntEnum):
    NONE = 0
    FIXED = 1  # one mask for all tokens
    EACH_TOKEN = 2  # the host gives a mask for each: the row takes one step a call


@dataclasses.dataclass(frozen=True)
class Admission:
    """What a row must know of its new owner.

    Attributes:
      sampling: with a concrete `seed`.
      max_new_tokens: tokens the row may still produce (after a preemption: what is left).
      min_new_tokens: tokens before which no stop id may be chosen.
      stop_ids: ids that end the row, end-of-sequence ids included; they are emitted, then the row goes inactive.
      prompt_token_ids / output_token_ids: what penalties look at (after a preemption: with the output so far); empty
        when there are none.
      masking: whether tokens are chosen among a mask's, and how long it holds.
    """

    sampling: SamplingParams
    max_new_tokens: int
    min_new_tokens: int
    stop_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...] = ()
    output_token_ids: tuple[int, ...] = ()
    masking: Masking = Masking.NONE


class RowUpdate(NamedTuple):
    """New table entries of a row: `blocks` go to columns first_column, first_column + 1, ...

    `admission` is set when the row gets a new owner: its old state is replaced and it stays inactive until the request's
    last prefill chunk has run.
    """

    row: int
    first_column: int
    blocks: tuple[int, ...]
    admission: Admission | None = None


@dataclasses.dataclass(frozen=True)
class BlockCopy:
    """Copy the first `num_tokens` tokens of block `src` into block `dst`, in every layer (copy-on-write)."""

    src: int
    dst: int
    num_tokens: int


@dataclasses.dataclass(frozen=True)
class DecodeRow:
    request_id: str
    row: int


class TokenMask(NamedTuple):
    """What a row may choose from now on; `mask` as in `core.token_constraint`."""

    row: int
    mask: bytes


class PrefixGroup(NamedTuple):
    """`num_rows` decode rows, neighbours in the plan, whose tables begin with the same `num_blocks` full blocks."""

    num_rows: int
    num_blocks: int


@dataclasses.dataclass(frozen=True)
class PlanShape:
    """All that a cost model may see of a plan.

    Attributes:
      prefill_tokens: new prompt tokens computed; prefill_context: tokens already in cache that they attend to, summed.
      decode_rows / decode_kv_tokens: rows that decode, and the KV tokens they attend to in the first step, summed.
      num_steps: most decode steps. bucket: padded (prefill tokens, decode rows) as the executor would run them.
      copied_tokens: whose K/V are copied from block to block.
      prefill_pairs: pairs of a computed prompt token and one that it attends to, itself included.
    """

    prefill_tokens: int
    prefill_context: int
    decode_rows: int
    decode_kv_tokens: int
    num_steps: int
    bucket: tuple[int, int] = (0, 0)
    copied_tokens: int = 0
    prefill_pairs: int = 0


@dataclasses.dataclass(frozen=True)
class StepPlan:
    step_id: int
    updates: tuple[RowUpdate, ...] = ()
    block_copies: tuple[BlockCopy, ...] = ()
    token_masks: tuple[TokenMask, ...] = ()
    prefill: tuple[PrefillChunk, ...] = ()
    decode: tuple[DecodeRow, ...] = ()
    num_steps: int = 0
    """Most decode steps in this call, C; 0 when nothing decodes."""
    decode_kv_tokens: int = 0
    """KV tokens the decode rows attend to in the first step, summed (for cost models)."""
    prefix_groups: tuple[PrefixGroup, ...] = ()
    """Of the leading rows of `decode`, group after group: what they share is attended to once. The others are alone."""

    def shape(self) -> PlanShape:
        return PlanShape(
            prefill_tokens=sum([len(c.token_ids) for c in self.prefill]),
            prefill_context=sum([c.start for c in self.prefill]),
            decode_rows=len(self.decode),
            decode_kv_tokens=self.decode_kv_tokens,
            num_steps=self.num_steps,
            copied_tokens=sum([copy.num_tokens for copy in self.block_copies]),
            prefill_pairs=sum([(n := len(c.token_ids)) * c.start + n * (n + 1) // 2 for c in self.prefill]),
        )


class RowResult(NamedTuple):
    """What one request got out of a step: sampled tokens, and whether the device saw it end.

    Attributes:
      token_ids: in order; empty when the row was already inactive, or its chunk does not end the prompt.
      stopped: the last token is one of the row's stop ids.
      exhausted: max_new_tokens is used up.
      prompt_logprobs: of the chunk's targets, in order.
    """

    request_id: str
    token_ids: tuple[int, ...]
    stopped: bool = False
    exhausted: bool = False
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclasses.dataclass(frozen=True)
class StepTiming:
    """Seconds on the engine's clock."""

    submitted: float
    finished: float


@dataclasses.dataclass(frozen=True)
class StepResult:
    """`rows` has one entry for each prefill chunk that is last or has targets and for each decode row of the plan, in
    the plan's order. `num_compiled`: executables that had to be compiled for it, none after a complete warm-up."""

    step_id: int
    rows: tuple[RowResult, ...]
    timing: StepTiming
    num_compiled: int = 0
