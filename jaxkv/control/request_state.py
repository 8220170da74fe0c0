"""What the scheduler knows of one request, and the queue of those that wait."""

import bisect
import dataclasses
import enum
import hashlib
from collections.abc import Mapping

from jaxkv.control.executor import ExecutorLimits
from jaxkv.control.lookahead import LookAhead
from jaxkv.control.prefix_index import BlockHash, chain_hashes, root_hash, split_blocks
from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.control.token_choice import TokenChoice
from jaxkv.core.errors import RequestError
from jaxkv.core.metrics import MissReason, RequestMetrics
from jaxkv.core.plan import Admission, DecodeRow, Masking, PrefillChunk, RowResult, RowUpdate
from jaxkv.core.request import FinishReason, Request, RequestOutput, SamplingParams, TokenLogprobs
from jaxkv.core.token_constraint import ConstraintError
from jaxkv.core.unseen_tokens import UnseenTokens


class Status(enum.Enum):
    WAITING = enum.auto()  # owns no row and no blocks: new, or preempted
    RUNNING = enum.auto()  # owns a row and blocks for all its known tokens
    FINISHED = enum.auto()


@dataclasses.dataclass(slots=True)
class SequenceGroup:
    """The n sequences of one request. `most_generated`: tokens, of any that has ended."""

    num_sequences: int = 1
    num_ended: int = 0
    most_generated: int = 0


@dataclasses.dataclass(eq=False, slots=True)
class RequestState:
    """There is no prefill or decode phase, only KV that follows tokens:

        |<-------------- token_ids: known on the host -------------->|<- num_sampled_in_flight ->|
        |<- num_computed ->|<- num_in_flight ->|<--- to be planned --->
                           (planned, not yet read)

    A row keeps going until it stops or its budget is used up, so both in-flight numbers are exact for every request
    that is not finished by the time the result is read.

    Attributes:
      rank: order among requests, smaller first: (priority, arrival number); priority is 0 under fcfs.
      sampling: the request's, with a concrete seed.
      max_total_tokens: prompt plus output at which it ends with LENGTH.
      blocks: owned block ids in order; the device's table knows the first num_uploaded_blocks of them.
      num_kept_from: place of the first block behind the sinks' that has not been given back (see retention).
      block_hashes: of the leading full blocks, as far as computed; the first num_published_blocks are findable.
      block_tokens: `token_bytes` of the same blocks.
      unsalted_hashes: of the same blocks as if the request had no salt; empty when it has none.
      num_tail_tokens: tokens under which the block behind the published ones is findable; 0 when it is not.
      num_plans_in_flight: submitted plans that hold this request.
      is_decoding: the last known token's chunk has been planned; from then on the device knows the next token.
      num_cached_tokens: prompt tokens found in the prefix cache, or shared with `parent`, at the first admission.
      prompt_logprobs: those read so far, of the prompt's second token and on; told with the first token, then dropped.
      parent: of a fork that has not been admitted yet: whom to share K/V with.
      num_inherited_tokens: of a fork: output tokens that its parent had generated; they are not delivered again.
      has_waited_for_copy: it has been set aside for a plan, to copy the head of a block that was just being written.
      prefilled_in: id of the plan with the chunk of the last known token.
      group: the sequences that were asked for together.
      choice: which tokens it may choose; None for any.
      missed: known tokens that the first admission did not find, by why not.
      num_prefilled: tokens run through prefill so far, again after preemptions included.
      longest_gap: between two deliveries.
    """

    request: Request
    rank: tuple[int, int]
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    max_total_tokens: int
    arrival: float
    token_ids: list[int] | UnseenTokens
    root: BlockHash
    unsalted_root: BlockHash
    request_id: str = dataclasses.field(init=False)
    num_prompt_tokens: int = dataclasses.field(init=False)
    status: Status = Status.WAITING
    row: int = -1
    decode_row: DecodeRow | None = None
    blocks: list[int] = dataclasses.field(default_factory=list)
    num_kept_from: int = 0
    num_uploaded_blocks: int = 0
    block_hashes: list[BlockHash] = dataclasses.field(default_factory=list)
    block_tokens: list[bytes] = dataclasses.field(default_factory=list)
    unsalted_hashes: list[BlockHash] = dataclasses.field(default_factory=list)
    num_published_blocks: int = 0
    num_tail_tokens: int = 0
    num_computed: int = 0
    num_in_flight: int = 0
    num_sampled_in_flight: int = 0
    num_plans_in_flight: int = 0
    is_decoding: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    parent: "RequestState | None" = None
    num_inherited_tokens: int = 0
    has_waited_for_copy: bool = False
    prefilled_in: int = -1
    group: SequenceGroup = dataclasses.field(default_factory=SequenceGroup)
    choice: TokenChoice | None = None
    num_preemptions: int = 0
    missed: Mapping[MissReason, int] = dataclasses.field(default_factory=dict)
    num_prefilled: int = 0
    longest_gap: float | None = None
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    def __post_init__(self) -> None:
        self.request_id = self.request.request_id
        self.num_prompt_tokens = len(self.request.prompt_token_ids)

    @property
    def num_generated_tokens(self) -> int:
        """Those that a fork inherited included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_scheduled(self) -> int:
        """Tokens whose KV is computed or planned."""
        return self.num_computed + self.num_in_flight

    @property
    def num_remaining(self) -> int:
        """Tokens it may still produce beyond those in flight."""
        return self.max_total_tokens - len(self.token_ids) - self.num_sampled_in_flight

    @property
    def awaits_masks(self) -> bool:
        """Each of its tokens needs a mask, which hangs on the token before."""
        return self.choice is not None and self.choice.masking is Masking.EACH_TOKEN

    @property
    def needs_prompt_logits(self) -> bool:
        """Its prompt must be computed from the start: prompt log-probabilities are wanted and not all there yet."""
        missing = self.num_prompt_tokens - 1 - len(self.prompt_logprobs)
        return self.sampling.prompt_logprobs is not None and self.num_generated_tokens == 0 and missing > 0

    def admission(self) -> Admission:
        """What a row must know to continue from the known tokens."""
        history = self.sampling.has_penalties
        return Admission(
            sampling=self.sampling,
            max_new_tokens=self.max_total_tokens - len(self.token_ids),
            # A choice of tokens sees to it itself.
            min_new_tokens=max(0, self.sampling.min_tokens - self.num_generated_tokens) if self.choice is None else 0,
            stop_ids=self.stop_ids,
            masking=Masking.NONE if self.choice is None else self.choice.masking,
            prompt_token_ids=self.request.prompt_token_ids if history else (),
            output_token_ids=tuple(self.token_ids[self.num_prompt_tokens :]) if history else (),
        )

    def untold_blocks(self) -> RowUpdate:
        """Table entries that the device does not know yet; they count as told from here on."""
        first, self.num_uploaded_blocks = self.num_uploaded_blocks, len(self.blocks)
        return RowUpdate(self.row, first, tuple(self.blocks[first:]))

    def chunk(self, start: int, end: int) -> PrefillChunk:
        """Known tokens start to end. Prompt log-probabilities that were read before a preemption are not asked for."""
        is_last = end == len(self.token_ids)
        tokens = self.token_ids[start:end]
        targets, first = (), start
        if self.needs_prompt_logits:
            first = max(start, len(self.prompt_logprobs))  # the token at i tells of entry i, which is token i + 1
            targets = tuple(self.token_ids[first + 1 : end + 1])
        return PrefillChunk(
            self.request_id,
            self.row,
            start,
            tokens if self.is_unseen else tuple(tokens),
            is_last,
            targets,
            first - start,
        )

    def extend_hashes(self, block_size: int) -> None:
        """Hash the full blocks of known tokens that are not hashed yet; those of unseen ones have their names."""
        num_hashed, num_full = len(self.block_hashes), len(self.token_ids) // block_size
        if num_hashed >= num_full:
            return
        if self.is_unseen:
            names = self.request.names(num_hashed, num_full)
            self.block_tokens += [b""] * len(names)  # nothing is known of their heads
            if self.is_salted:
                self.unsalted_hashes += names
                names = [self.root + name for name in names]
            self.block_hashes += names
        else:
            blocks = split_blocks(self.token_ids[num_hashed * block_size :], block_size)
            self.block_hashes += chain_hashes(self.parent_hash(num_hashed), blocks)
            self.block_tokens += blocks
            if self.is_salted:
                self.unsalted_hashes += chain_hashes(self.unsalted_parent_hash(num_hashed), blocks)

    @property
    def is_unseen(self) -> bool:
        """Its tokens are only counted, and its blocks have names instead of hashes."""
        return self.request.is_unseen

    @property
    def is_salted(self) -> bool:
        return self.request.cache_salt is not None

    def parent_hash(self, place: int) -> BlockHash:
        """Hash of the block before the one at `place`, or the root."""
        return self.block_hashes[place - 1] if place else self.root

    def unsalted_parent_hash(self, place: int) -> BlockHash:
        """The same without the salt that the request has."""
        return self.unsalted_hashes[place - 1] if place else self.unsalted_root

    def output(self, row: RowResult | None = None, finish_reason: FinishReason | None = None) -> RequestOutput:
        """News for the caller: the tokens in `row`, and the end if it came."""
        token_ids, logprobs, stopped_by, prompt_logprobs = (), None, None, None
        if row is not None:
            token_ids, logprobs = row.token_ids, row.logprobs
            if row.stopped:
                stopped_by = token_ids[-1]
            if self.sampling.prompt_logprobs is not None and self.num_generated_tokens == len(token_ids):  # its first
                prompt_logprobs = (None, *self.prompt_logprobs)
                self.prompt_logprobs = []
        return RequestOutput(
            self.request_id,
            token_ids,
            finish_reason,
            stopped_by,
            logprobs,
            self.num_prompt_tokens,
            self.num_cached_tokens,
            None,
            prompt_logprobs,
        )

    def end(self, finish_reason: FinishReason, now: float) -> RequestMetrics:
        """It is finished from here on; returns what its life took."""
        self.status = Status.FINISHED
        group, num_generated = self.group, self.num_generated_tokens - self.num_inherited_tokens
        group.num_ended += 1
        group.most_generated = max(group.most_generated, num_generated)
        return RequestMetrics(
            request_id=self.request_id,
            arrival=self.arrival,
            finished=now,
            finish_reason=finish_reason,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_generated_tokens=num_generated,
            num_preemptions=self.num_preemptions,
            first_scheduled=self.first_scheduled,
            first_token=self.first_token,
            last_token=self.last_token,
            max_tokens=self.max_total_tokens - self.num_prompt_tokens - self.num_inherited_tokens,
            num_sequences=group.num_sequences if group.num_ended == group.num_sequences else None,
            most_generated_tokens=group.most_generated,
            num_computed_tokens=self.num_prefilled,
            missed=self.missed,
            longest_gap=self.longest_gap,
            caller=self.request.caller,
            cache_salt=self.request.cache_salt,
        )


def forked_request(parent: RequestState, request_id: str, sampling: SamplingParams, now: float) -> Request:
    """The parent's request with another id and other sampling. Raises RequestError for what a fork cannot have."""
    constraint = None
    if isinstance(sampling, SamplingParams):
        if sampling.prompt_logprobs is not None:
            raise RequestError(
                "a fork has no prompt of its own: ask its parent for prompt_logprobs", param="prompt_logprobs"
            )
        if sampling.has_constraint:
            if sampling.token_limits != parent.sampling.token_limits:
                raise RequestError(
                    "a fork goes on under its parent's allowed_token_ids, bad_words and structured_outputs, or without "
                    "any: give the same ones or none",
                    param="sampling",
                )
            constraint = parent.choice.constraint
    return dataclasses.replace(
        parent.request, request_id=request_id, sampling=sampling, arrival_time=now, constraint=constraint
    )


def new_request_state(
    request: Request,
    limits: ExecutorLimits,
    config: SchedulerConfig,
    arrival_number: int,
    now: float,
    parent: RequestState | None = None,
) -> RequestState:
    """State of a request that has just arrived, and been checked. Raises RequestError when it can never be served.

    `parent`: whose tokens it continues, for a fork.
    """
    max_total_tokens = _max_total_tokens(request, limits, config)
    sampling = request.sampling
    if sampling.seed is None:
        sampling = dataclasses.replace(sampling, seed=_derive_seed(config.seed, arrival_number))
    eos = () if sampling.ignore_eos else config.eos_token_ids
    stop_ids = tuple(dict.fromkeys((*eos, *sampling.stop_token_ids)))
    if len(stop_ids) > limits.max_stop_ids:
        raise RequestError(
            f"{len(stop_ids)} ids would end the request, the model's own {len(eos)} included; at most "
            f"{limits.max_stop_ids} can: shorten stop_token_ids",
            param="stop_token_ids",
        )
    state = RequestState(
        request=request,
        rank=(request.priority if config.policy == "priority" else 0, arrival_number),
        sampling=sampling,
        stop_ids=stop_ids,
        max_total_tokens=max_total_tokens,
        arrival=now if request.arrival_time is None else request.arrival_time,
        token_ids=request.prompt_token_ids.copy() if request.is_unseen else list(request.prompt_token_ids),
        root=root_hash(config.cache_root, request.cache_salt),
        unsalted_root=root_hash(config.cache_root, None),
    )
    if parent is not None:
        _inherit(state, parent)
    if request.constraint is not None:
        try:
            constraint, generated = request.constraint.copy(), state.num_generated_tokens
            state.choice = TokenChoice(constraint, stop_ids, sampling.min_tokens, generated)
        except ConstraintError as error:
            raise RequestError(f"no token may come next: {error}", param="structured_outputs") from error
    if config.enable_prefix_caching:
        state.extend_hashes(limits.block_size)
    return state


def _inherit(state: RequestState, parent: RequestState) -> None:
    state.parent = parent
    state.token_ids = parent.token_ids.copy()
    state.num_inherited_tokens = parent.num_generated_tokens
    state.block_hashes, state.unsalted_hashes = parent.block_hashes.copy(), parent.unsalted_hashes.copy()
    state.block_tokens = parent.block_tokens.copy()
    if len(state.token_ids) >= state.max_total_tokens:
        raise RequestError(
            f"max_tokens is {state.sampling.max_tokens}, but request {parent.request_id!r} has generated "
            f"{state.num_inherited_tokens} tokens, which count: raise max_tokens above that",
            param="max_tokens",
        )


def _max_total_tokens(request: Request, limits: ExecutorLimits, config: SchedulerConfig) -> int:
    """Prompt plus output at which the request ends: as asked, at most max_model_len.

    A max_tokens of None also stops at what the whole pool holds; one that asks for more than the pool holds is refused.
    """
    num_prompt, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
    max_pinned_blocks = config.max_pinned_blocks
    num_usable = limits.num_blocks - 1 - max_pinned_blocks
    # The last token's KV is never computed, so one token more than the pool holds can be produced.
    pool_tokens = num_usable * limits.block_size + 1
    retention = config.retention(limits)
    if retention is not None and retention.max_blocks <= num_usable:
        pool_tokens = limits.max_model_len + 1
    if max_tokens is None:
        total = max(num_prompt + 1, min(limits.max_model_len, pool_tokens))
    else:
        total = min(num_prompt + max_tokens, limits.max_model_len)
    if total > pool_tokens:
        raise RequestError(
            f"{num_prompt} prompt tokens and {total - num_prompt} output tokens need "
            f"{-(-(total - 1) // limits.block_size)} KV blocks of {limits.block_size} tokens, but the pool has "
            f"{num_usable}{f' beside {max_pinned_blocks} that may be pinned' if max_pinned_blocks else ''}. "
            "Shorten the prompt, lower max_tokens, or raise num_gpu_blocks_override, "
            "kv_cache_memory_bytes or gpu_memory_utilization.",
            param="prompt" if num_prompt + 1 > pool_tokens else "max_tokens",
        )
    return total


def _derive_seed(engine_seed: int, arrival_number: int) -> int:
    """A seed of its own for each request; 31 bits, so that it fits whatever integer the device holds it in."""
    digest = hashlib.sha256(f"{engine_seed}:{arrival_number}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


class WaitingQueue:
    """Requests without a row, best rank first. A preempted request keeps its rank, so it comes before newer ones.

    Kept as a list sorted backwards: the head is popped in O(1); push and remove find their place by bisection and move
    8 bytes a request (microseconds at 10,000 waiting).
    """

    def __init__(self, lookahead: LookAhead | None = None, window: int = 0):
        """`lookahead` is told of the first `window` requests, and of no others: so its cost is bounded."""
        self._states: list[RequestState] = []
        self._lookahead = lookahead
        self._window = window

    @staticmethod
    def _key(state: RequestState) -> tuple[int, int]:
        return (-state.rank[0], -state.rank[1])

    def push(self, state: RequestState) -> None:
        place = bisect.bisect_left(self._states, self._key(state), key=self._key)
        self._states.insert(place, state)
        if self._lookahead is not None:
            if place >= len(self._states) - self._window:
                self._lookahead.wait(state.rank, state.block_hashes)
            if len(self._states) > self._window:
                self._lookahead.stop_waiting(self._states[-self._window - 1].rank)

    def head(self) -> RequestState:
        return self._states[-1]

    def pop(self) -> RequestState:
        state = self._states.pop()
        self._left(state)
        return state

    def remove(self, state: RequestState) -> None:
        place = bisect.bisect_left(self._states, self._key(state), key=self._key)
        assert self._states[place] is state, f"request {state.request_id} is not in the queue"
        del self._states[place]
        self._left(state)

    def _left(self, state: RequestState) -> None:
        if self._lookahead is not None:
            self._lookahead.stop_waiting(state.rank)
            if len(self._states) >= self._window:
                entered = self._states[-self._window]
                self._lookahead.wait(entered.rank, entered.block_hashes)

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self):
        return reversed(self._states)
