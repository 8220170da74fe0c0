"""Decides what each step computes. One owner thread; no jax, no clock of its own, no I/O.

A plan is built in this order, the later parts getting what the earlier ones leave:

  1. decode rows, best rank first: blocks for one step each, by preemption where there is no other way
  2. the next chunk of running requests that still prefill
  3. waiting requests, in rank order, as long as rows, blocks and the token budget last
  4. C, the number of decode steps, and the lookahead blocks for all of them; C is halved until they fit

The budget counts one for each decode row, whatever C, and one for each prefill token.

Nothing starves under fcfs: a request takes blocks only from newer ones, so the oldest always advances, and the queue's
head is never overtaken but by leave (below). Under the priority policy this holds among requests of equal priority;
better ones go first.

K/V can be copied from the plan after the one that writes it. So two kinds of request are early at their turn: a fork in the
plan of its parent's last chunk, and, once in its life, one that could copy a quarter of a block or more from what this plan
writes. They are set aside for the one plan, rows and blocks are kept for them, and those behind may have what else is left.
They come first in the next. A fork ranks behind its parent, so when it heads the queue its parent runs, has ended, or is
early itself.
"""

import bisect
import collections
import heapq
import logging
from collections.abc import Callable

from jaxkv.control.block_manager import BlockManager
from jaxkv.control.decode_steps import StepTimer, adaptive_decode_steps, ceil_power_of_two, reserve_steps
from jaxkv.control.eviction_choice import make_eviction_policy
from jaxkv.control.executor import ExecutorLimits
from jaxkv.control.flight import Flight, check_result, untold_masks
from jaxkv.control.lookahead import LookAhead
from jaxkv.control.preemption import choose_victim
from jaxkv.control.prefix_groups import PrefixGroups
from jaxkv.control.prefix_sharing import PUBLISHED_AT_ONCE, PrefixExplanation, PrefixHit, PrefixSharing
from jaxkv.control.request_state import RequestState, Status, WaitingQueue, forked_request, new_request_state
from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.control.state_checks import check_states
from jaxkv.control.validation import checked_request
from jaxkv.core.errors import RequestError
from jaxkv.core.metrics import EngineStats, RequestMetrics
from jaxkv.core.plan import DecodeRow, PrefillChunk, RowUpdate, StepPlan, StepResult
from jaxkv.core.request import FinishReason, Request, RequestOutput, SamplingParams
from jaxkv.core.token_constraint import ConstraintError

logger = logging.getLogger(__name__)


class Scheduler:
    """`add` and `finish` requests at any moment; `schedule` a plan; `update` with each plan's result, in order.

    Attributes:
      on_end: called with every request that has ended, whose state does not change any more, and what its life took.
    """

    def __init__(
        self,
        limits: ExecutorLimits,
        config: SchedulerConfig = SchedulerConfig(),
        *,
        stats: EngineStats | None = None,
    ):
        config.check(limits)
        self.limits = limits
        self.config = config
        self.stats = EngineStats() if stats is None else stats
        self.on_end: Callable[[RequestState, RequestMetrics], None] | None = None
        policy = make_eviction_policy(config.eviction_policy, limits.num_blocks - 1)
        lookahead = LookAhead(policy) if config.eviction_lookahead and config.enable_prefix_caching else None
        self.blocks = BlockManager(
            limits.num_blocks,
            limits.block_size,
            policy if lookahead is None else lookahead,
            num_ghosts=config.ghost_blocks,
            stats=self.stats,
        )
        self.retention = config.retention(limits)
        self.prefixes = PrefixSharing(config, self.blocks, self.stats, self.retention)
        self.prefix_groups = PrefixGroups(
            # Not where a window hides a part of the prefix, another one from each row.
            config.cascade if self.retention is None else None,
            block_size=limits.block_size,
            max_groups=limits.max_prefix_groups,
        )
        self.waiting = WaitingQueue(lookahead, config.eviction_lookahead)
        self.running: list[RequestState] = []  # sorted by rank
        self._live: dict[str, RequestState] = {}
        self._free_rows = list(range(limits.max_num_seqs))  # a heap
        self._in_flight: collections.deque[tuple[StepPlan, list[Flight]]] = collections.deque()
        self._step_timer = StepTimer()
        self._num_arrivals = 0
        self._next_step_id = 0

    # -- requests come and go

    def add(self, request: Request, now: float = 0.0) -> None:
        """Queue a request: its `Request.sequences`, the others as forks of the first.

        Raises:
          RequestError: it can never be served, or an id is in use. Then nothing of it is queued.
        """
        first, *others = self._checked(request).sequences()
        self._check_ids([first.request_id, *[other.request_id for other in others]])
        parent = new_request_state(first, self.limits, self.config, self._num_arrivals, now)
        self._enqueue(parent)
        parent.group.num_sequences += len(others)
        for other in others:
            state = new_request_state(other, self.limits, self.config, self._num_arrivals, now, parent)
            state.group = parent.group
            self._enqueue(state)

    def explain_prefix(self, request: Request) -> PrefixExplanation:
        """What the request would find in the prefix cache if it came now. Raises RequestError as `add` does."""
        state = new_request_state(self._checked(request), self.limits, self.config, self._num_arrivals, 0.0)
        return self.prefixes.explain(state)

    def fork(self, parent_id: str, request_id: str, sampling: SamplingParams, now: float = 0.0) -> tuple[int, ...]:
        """Queue a request that goes on from a live one's known tokens; see `Engine.fork`."""
        parent = self._live.get(parent_id)
        if parent is None:
            raise RequestError(
                f"request {parent_id!r} has ended or never was: only a live one can be forked", param="parent_id",
                status=404,
            )  # fmt: skip
        request = self._checked(forked_request(parent, request_id, sampling, now))
        self._check_ids([request_id])
        state = new_request_state(request, self.limits, self.config, self._num_arrivals, now, parent)
        self._enqueue(state)
        return tuple(state.token_ids[state.num_prompt_tokens :])

    def _checked(self, request: Request) -> Request:
        config, limits = self.config, self.limits
        return checked_request(
            request,
            vocab_size=config.vocab_size,
            max_model_len=limits.max_model_len,
            max_logprobs=config.max_logprobs,
            unseen_tokens=config.unseen_tokens,
        )

    def _check_ids(self, request_ids: list[str]) -> None:
        if taken := self._live.keys() & request_ids:
            raise RequestError(f"request id {min(taken)!r} is already in use", param="request_id")

    def _enqueue(self, state: RequestState) -> None:
        self._num_arrivals += 1
        self._live[state.request_id] = state
        self.waiting.push(state)
        self.stats.num_requests += 1

    def finish(self, request_id: str, reason: FinishReason, now: float = 0.0) -> RequestOutput | None:
        """End a live request at any moment; None if there is none of that id. Tokens still in flight are dropped."""
        state = self._live.get(request_id)
        if state is None:
            return None
        self.blocks.now = now
        self._end(state, reason, now)
        return state.output(finish_reason=reason)

    def abandon(self, reason: FinishReason, now: float = 0.0) -> list[RequestOutput]:
        """End all live requests without tidying up: for a broken engine, whose books may not be trusted either."""
        states = list(self._live.values())
        self._live.clear()
        self.running, self.waiting = [], WaitingQueue()
        self._in_flight.clear()
        for state in states:
            self._tell_end(state, reason, now)
        return [state.output(finish_reason=reason) for state in states]

    def preempt(self, request_id: str) -> None:
        """Send a running request back to the queue; its blocks are freed and later recomputed or found in the cache."""
        state = self._live[request_id]
        if state.status is Status.RUNNING:
            self._preempt(state)

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Forget the cached blocks that nobody uses: later prompts find nothing of them, and count as first seen.

        Pinned blocks stay, and so do those that running requests use; with `preempt_running` these lose them too, and
        compute everything again. Returns whether nothing but pinned blocks is left.
        """
        if preempt_running:
            for state in self.running.copy():
                self._preempt(state)
        self.blocks.drop_cached()
        return not self.running

    @property
    def live_ids(self) -> tuple[str, ...]:
        return tuple(self._live)

    @property
    def has_requests(self) -> bool:
        return bool(self._live)

    # -- planning

    def schedule(self, now: float = 0.0) -> StepPlan | None:
        """The next step, which must be submitted; None when nothing can run before an unread step is read."""
        self.blocks.now = now
        flights: list[Flight] = []
        updates: list[RowUpdate] = []
        chunks: list[PrefillChunk] = []
        preemptions = self.stats.preemptions
        decoding, remaining = self._reserve_decode_rows()
        budget = self.limits.max_num_batched_tokens - len(decoding)
        for state in self.running:
            if budget <= 0 or len(chunks) == self.limits.max_prefill_seqs:
                break
            if not state.is_decoding:
                budget -= self._add_chunk(state, budget, chunks, flights, updates)
        # A step that took blocks away gives none out, or the victim's place would be refilled at once.
        if self.stats.preemptions == preemptions:
            early: list[RequestState] = []  # their time is the next plan
            num_kept = 0  # blocks for them
            while (
                self.waiting
                and len(self._free_rows) > len(early)
                and budget > 0
                and len(chunks) < self.limits.max_prefill_seqs
            ):
                state = self.waiting.head()
                if self._is_early(state):
                    early.append(self.waiting.pop())
                    num_kept += 2
                    continue
                hit = self._admissible_hit(state, num_kept)
                if hit is None:
                    break
                if not state.has_waited_for_copy and hit.num_early_tokens * 4 >= self.blocks.block_size:
                    state.has_waited_for_copy = True
                    early.append(self.waiting.pop())
                    num_kept += self._num_missing(state, hit) + 1
                    continue
                updates.append(self._admit(self.waiting.pop(), hit, now))
                budget -= self._add_chunk(state, budget, chunks, flights, updates)
            for state in early:
                self.waiting.push(state)
        copies = self.prefixes.end_admissions()
        num_steps = self._choose_steps(decoding, remaining, prefilling=bool(chunks))
        num_steps = reserve_steps(self.blocks, decoding, remaining, num_steps)
        in_groups, prefix_groups = self.prefix_groups.choose(decoding)
        if prefix_groups:
            left_of = dict(zip(decoding, remaining, strict=True))
            decoding, remaining = in_groups, [left_of[state] for state in in_groups]
        decode_kv_tokens = 0
        for state, left in zip(decoding, remaining, strict=True):
            if state.num_uploaded_blocks < len(state.blocks):
                updates.append(state.untold_blocks())
            steps = num_steps if num_steps < left else left
            decode_kv_tokens += state.num_computed + state.num_in_flight + 1
            state.num_in_flight += steps
            state.num_sampled_in_flight += steps
            state.num_plans_in_flight += 1
            flights.append(Flight(state, steps, steps))
        if not flights:
            return None
        plan = StepPlan(
            step_id=self._next_step_id,
            updates=tuple(updates),
            block_copies=copies,
            token_masks=untold_masks(flights),
            prefill=tuple(chunks),
            decode=tuple([state.decode_row for state in decoding]),
            num_steps=num_steps,
            decode_kv_tokens=decode_kv_tokens,
            prefix_groups=prefix_groups,
        )
        self._next_step_id += 1
        self._in_flight.append((plan, flights))
        self.stats.steps += 1
        self.stats.computed_tokens += sum(len(chunk.token_ids) for chunk in chunks)
        if num_steps:
            self.stats.decode_calls += 1
            self.stats.loop_steps[num_steps] += 1
        return plan

    def _reserve_decode_rows(self) -> tuple[list[RequestState], list[int]]:
        """Requests that decode in this plan, each with the block that its next token is written to, and how many
        tokens each may produce in it, if C were endless."""
        block_size = self.limits.block_size
        decoding, remaining = [], []
        for state in self.running.copy():  # victims come later in this order, so none is in `decoding` already
            if not state.is_decoding:  # still prefilling, or preempted just now
                if self.retention is not None and state.status is Status.RUNNING:
                    self._has_room(state)
                continue
            left = state.max_total_tokens - len(state.token_ids) - state.num_sampled_in_flight  # its num_remaining
            if left <= 0:
                continue
            if state.choice is not None and state.awaits_masks:
                if state.num_sampled_in_flight:  # its mask hangs on that token
                    continue
                left = 1
            if (state.num_computed + state.num_in_flight) // block_size < len(state.blocks) or self._has_room(state):
                decoding.append(state)
                remaining.append(left)
        return decoding, remaining

    def _has_room(self, state: RequestState) -> bool:
        """A block for the request's next token, which others may have to give; False when it is preempted itself."""
        if self.retention is not None:
            self.prefixes.give_back(state)
        if state.num_scheduled // self.limits.block_size == len(state.blocks):
            if self.blocks.num_free == 0 and not self._make_room(state):
                return False
            state.blocks += self.blocks.allocate(1)
        return True

    def _make_room(self, needer: RequestState) -> bool:
        """Preempt a request of a worse rank; failing that the needer itself, then False.

        Preemptions are bounded: each gives a block to an elder that grows, and no victim comes back before there is room
        for it and a block more for every running row. So there are fewer than blocks that decoding fills.
        """
        worse = self.running[bisect.bisect_right(self.running, needer.rank, key=lambda state: state.rank) :]
        victim = choose_victim(worse, self.blocks) or needer
        self._preempt(victim)
        return victim is not needer

    def _preempt(self, state: RequestState) -> None:
        logger.info("preempted request %s: %d tokens to recompute", state.request_id, state.num_scheduled)
        self._release(state)
        state.num_preemptions += 1
        self.stats.preemptions += 1
        state.status = Status.WAITING
        self.waiting.push(state)

    def _is_early(self, state: RequestState) -> bool:
        """A fork whose parent's K/V is not there before this plan: its last chunk is in it, or it is early itself."""
        parent = state.parent
        if parent is None or parent.status is Status.FINISHED:
            return False
        return not (parent.is_decoding and parent.prefilled_in < self._next_step_id)

    def _admissible_hit(self, state: RequestState, num_kept: int) -> PrefixHit | None:
        """What the cache has for the request, if it can be admitted now and `num_kept` blocks stay free.

        Room for all known tokens at once, or with windows for all that is held at once, so that a half-prefilled prompt
        is not stuck and preempts nobody (but where the blocks it gives back are still shared by others). One more
        block for every running row stays free: without it a request would be admitted only to be preempted as soon as
        its elders grow.
        """
        if state.num_plans_in_flight:  # preempted a moment ago: its next token is not known yet
            return None
        hit = self.prefixes.find(state)
        headroom = len(self.running) + 1 + num_kept if self.running else 0
        for hit in (hit, hit.without_head()):  # the block to copy from may be the one that is missing
            if self.blocks.num_free_without(hit.used_blocks) >= self._num_missing(state, hit) + headroom:
                return hit
        return None

    def _admit(self, state: RequestState, hit: PrefixHit, now: float) -> RowUpdate:
        self.prefixes.take(state, hit, len(hit.blocks) + self._num_missing(state, hit))
        state.row = heapq.heappop(self._free_rows)
        state.decode_row = DecodeRow(state.request_id, state.row)
        state.status = Status.RUNNING
        bisect.insort(self.running, state, key=lambda other: other.rank)
        if state.first_scheduled is None:
            state.first_scheduled = now
            state.num_cached_tokens = min(hit.num_tokens, state.num_prompt_tokens)
            self.stats.prompt_tokens += len(state.token_ids)
            self.stats.cached_tokens += hit.num_tokens
            self.stats.queue_time.add(now - state.arrival)
        state.parent = None
        state.num_uploaded_blocks = len(state.blocks)
        self.prefix_groups.add(state)
        return RowUpdate(state.row, 0, tuple(state.blocks), state.admission())

    def _add_chunk(
        self,
        state: RequestState,
        budget: int,
        chunks: list[PrefillChunk],
        flights: list[Flight],
        updates: list[RowUpdate],
    ) -> int:
        """Plan the next chunk of at most `budget` known tokens; returns its length."""
        start = state.num_scheduled
        end = min(start + budget, len(state.token_ids))
        missing = self._num_blocks(end) - len(state.blocks)
        if missing > 0:  # only where blocks are given back on the way: else all are there from the admission on
            state.blocks += self.blocks.allocate(min(missing, self.blocks.num_free))
            end = min(end, len(state.blocks) * self.limits.block_size)
        if state.num_uploaded_blocks < len(state.blocks):
            updates.append(state.untold_blocks())
        chunk = state.chunk(start, end)
        chunks.append(chunk)
        flights.append(Flight(state, end - start, int(chunk.is_last), len(chunk.targets)))
        state.num_in_flight += end - start
        state.num_sampled_in_flight += chunk.is_last
        state.num_plans_in_flight += 1
        state.is_decoding = chunk.is_last
        state.num_prefilled += end - start
        state.prefilled_in = self._next_step_id
        # Already now: any plan that finds these blocks runs later than this one, or in it, where writes come first.
        self.prefixes.publish(state, end, planned=True, with_tail=chunk.is_last)
        return end - start

    def _choose_steps(self, decoding: list[RequestState], remaining: list[int], *, prefilling: bool) -> int:
        """C, before it is known whether there are blocks for so many steps; 0 when nothing decodes."""
        if not decoding:
            return 0
        if self.config.decode_steps:
            return min(self.config.decode_steps, ceil_power_of_two(max(remaining)))
        if prefilling:  # its first tokens, and the next chunk, wait for this call's end
            return 1
        waiting = len(self.waiting) > 0
        # A row whose last token is in flight is free as soon as the step before this one is read.
        ending = waiting and any([state.is_decoding and state.num_remaining <= 0 for state in self.running])
        return adaptive_decode_steps(
            self.limits.max_decode_steps,
            least_remaining=1 if ending else min(remaining),
            most_remaining=max(remaining),
            waiting=waiting,
            num_rows=len(decoding),
            step_seconds=self._step_timer.seconds,
            host_chooses=any([state.awaits_masks for state in self.running]),
        )

    # -- results

    def update(self, result: StepResult) -> list[RequestOutput]:
        """Take in the oldest unread plan's result; returns news of the requests that it gave tokens to."""
        plan, flights = self._in_flight.popleft()
        check_result(plan.step_id, flights, result)
        self._step_timer.record(0 if plan.prefill else plan.num_steps, result.timing)
        now = self.blocks.now = result.timing.finished
        rows = iter(result.rows)
        publish_tokens = PUBLISHED_AT_ONCE * self.limits.block_size
        running, finished = Status.RUNNING, Status.FINISHED  # looking up an enum's member takes 0.1 us
        outputs: list[RequestOutput] = []
        gaps: list[float] = []
        num_generated = 0
        for flight in flights:
            state = flight.state
            state.num_plans_in_flight -= 1
            row = next(rows) if flight.num_sampled or flight.num_prompt_logprobs else None
            status = state.status
            if status is finished:
                continue
            if flight.num_prompt_logprobs:
                state.prompt_logprobs += row.prompt_logprobs
                row = row if flight.num_sampled else None
            num_kv = flight.num_kv
            if row is not None:
                num_kv -= flight.num_sampled - len(row.token_ids)  # a stopped row wrote less than planned
                state.num_sampled_in_flight -= flight.num_sampled
                state.token_ids += row.token_ids
                num_generated += len(row.token_ids)
                if state.first_token is None:
                    state.first_token = now
                    self.stats.ttft.add(now - state.arrival)
                else:
                    gap = now - state.last_token
                    gaps.append(gap)
                    if state.longest_gap is None or gap > state.longest_gap:
                        state.longest_gap = gap
                state.last_token = now
            if status is running:  # a preempted request keeps its new tokens, but has no KV any more
                state.num_in_flight -= flight.num_kv
                state.num_computed += num_kv
                if state.num_computed - state.num_published_blocks * self.limits.block_size >= publish_tokens:
                    self.prefixes.publish(state, state.num_computed, planned=False)
            if row is not None:
                reason = error = None
                if row.stopped:
                    reason = FinishReason.STOP
                elif len(state.token_ids) >= state.max_total_tokens:
                    reason = FinishReason.LENGTH
                elif state.choice is not None:
                    try:
                        state.choice.advance(row.token_ids, state.num_generated_tokens)
                    except ConstraintError as dead_end:
                        reason, error = FinishReason.ERROR, str(dead_end)
                if reason is not None:
                    self._end(state, reason, now)
                output = state.output(row, reason)
                outputs.append(output if error is None else output._replace(error=error))
        if plan.prefix_groups:
            in_groups = sum([group.num_rows for group in plan.prefix_groups])
            decoded = result.rows[len(result.rows) - len(plan.decode) :]
            self.stats.cascade_rows += sum([len(row.token_ids) for row in decoded[:in_groups]])
        self.stats.generated_tokens += num_generated
        self.stats.compiles += result.num_compiled
        self.stats.step_tokens.add(sum([len(chunk.token_ids) for chunk in plan.prefill]) + num_generated)
        self.stats.itl.extend(gaps)
        return outputs

    # -- ends

    def _release(self, state: RequestState) -> None:
        """Give row and blocks back. What is in flight still runs, before anything that later plans do with them."""
        del self.running[bisect.bisect_left(self.running, state.rank, key=lambda other: other.rank)]
        heapq.heappush(self._free_rows, state.row)
        self.prefix_groups.remove(state)
        self.prefixes.publish(state, state.num_computed, planned=False, with_tail=True)
        self.blocks.free(state.blocks)
        state.row, state.decode_row = -1, None
        state.blocks = []
        state.num_uploaded_blocks = state.num_published_blocks = state.num_tail_tokens = state.num_kept_from = 0
        state.num_computed = state.num_in_flight = 0
        state.is_decoding = False
        if state.choice is not None:
            state.choice.is_told = False

    def _end(self, state: RequestState, reason: FinishReason, now: float) -> None:
        if state.status is Status.RUNNING:
            self._release(state)
        else:
            self.waiting.remove(state)
        del self._live[state.request_id]
        self._tell_end(state, reason, now)

    def _tell_end(self, state: RequestState, reason: FinishReason, now: float) -> None:
        metrics = state.end(reason, now)
        self.stats.record_finished(metrics)
        if self.on_end is not None:
            self.on_end(state, metrics)

    def check(self) -> None:
        """Assert every invariant of blocks, rows and queues. For tests: O(pool)."""
        self.blocks.check([state.blocks for state in self.running] + self.prefixes.pins.owners())
        rows = [state.row for state in self.running]
        assert sorted(rows + self._free_rows) == list(range(self.limits.max_num_seqs)), "a row leaked or is used twice"
        self.prefix_groups.check(self.running)
        check_states(self.running, list(self.waiting), self._live.values(), self.limits.block_size, self.retention)

    def _num_missing(self, state: RequestState, hit: PrefixHit) -> int:
        """Blocks that an admission takes beside those of the hit."""
        num_known = len(state.token_ids)
        retention = self.retention
        end = self._num_blocks(num_known) if retention is None else retention.end(hit.num_tokens, num_known)
        return end - len(hit.blocks)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.block_size)
