"""An executor that remembers what every block holds.

It keeps, for each slot, the position, cache salt and a sum of all tokens up to the one whose K/V were written there, and
asserts at every attention that a row sees exactly its own history, or with a `retention` what its window and sinks cover.
Tokens are a function of the whole history.
"""

import dataclasses
import zlib

from jaxkv.control.executor import ExecutorLimits
from jaxkv.core.plan import Masking, RowResult, StepPlan, StepResult, StepTiming
from jaxkv.core.request import FinishReason, Request, TokenLogprobs
from jaxkv.core.retention import Retention
from jaxkv.core.token_constraint import allows
from tests.support.constraints import constraint_for

VOCAB = 5


def next_token(history, seed, forbidden=()):
    token = zlib.crc32(bytes(history) + seed.to_bytes(4, "little")) % VOCAB
    while token in forbidden:
        token = (token + 1) % VOCAB
    return token


def not_in(mask):
    return {token for token in range(VOCAB) if not allows(mask, token)}


def naive_generate(request, seed, limits, inherited=(), retention=None):
    """Output tokens and finish reason by full recompute, one request at a time.

    `inherited`: output that a fork continues; it is part of the output returned.
    """
    prompt, sampling = request.prompt_token_ids, request.sampling
    longest = limits.max_model_len
    if retention is None or retention.max_blocks > limits.num_blocks - 1:
        longest = min(longest, (limits.num_blocks - 1) * limits.block_size + 1)
    if sampling.max_tokens is not None:
        longest = min(limits.max_model_len, len(prompt) + sampling.max_tokens)
    history = [*prompt, *inherited]
    constraint = constraint_for(sampling, VOCAB)
    if constraint is not None:
        constraint.accept(inherited)
    while True:
        early = len(history) - len(prompt) < sampling.min_tokens
        forbidden = set(sampling.stop_token_ids) if early else set()
        if constraint is not None:
            outside = not_in(constraint.mask())
            forbidden = outside if len(outside | forbidden) == VOCAB else outside | forbidden
        history.append(next_token(history, seed, forbidden))
        if constraint is not None:
            constraint.accept(history[-1:])
        if history[-1] in sampling.stop_token_ids:
            return tuple(history[len(prompt) :]), FinishReason.STOP
        if len(history) == longest:
            return tuple(history[len(prompt) :]), FinishReason.LENGTH


@dataclasses.dataclass
class Row:
    admission: object
    table: dict[int, int]
    request_id: str | None = None
    last_token: int = -1
    seq_len: int = 0  # tokens with K/V
    emitted: int = 0
    active: bool = False
    mask: bytes | None = None


class HistoryExecutor:
    """Runs each plan when it is submitted; `salts` and `histories` are what the tests know of each request."""

    def __init__(self, limits: ExecutorLimits, retention: Retention | None = None):
        self.limits, self.retention = limits, retention
        self.slots = {}  # (block, offset) -> (position, salt, sum of the tokens so far)
        self.rows: dict[int, Row] = {}
        self.requests: dict[str, tuple[Request, tuple[int, ...]]] = {}  # with prompt + naive output
        self.num_submitted = 0

    def submit(self, plan: StepPlan) -> StepResult:
        limits = self.limits
        assert plan.step_id == self.num_submitted
        assert sum(len(c.token_ids) for c in plan.prefill) + len(plan.decode) <= limits.max_num_batched_tokens
        assert len(plan.prefill) <= limits.max_prefill_seqs
        assert 0 <= plan.num_steps <= limits.max_decode_steps and bool(plan.num_steps) == bool(plan.decode)
        used = [chunk.row for chunk in plan.prefill] + [entry.row for entry in plan.decode]
        assert len(set(used)) == len(used) and all(0 <= row < limits.max_num_seqs for row in used)
        self.num_submitted += 1
        self._copy_blocks(plan.block_copies)
        for update in plan.updates:
            if update.admission is not None:
                assert update.first_column == 0
                self.rows[update.row] = Row(update.admission, {})
            row = self.rows[update.row]
            for column, block in enumerate(update.blocks, update.first_column):
                assert block or update.admission and self.retention, "the null block in a table"
                assert 0 <= block < limits.num_blocks and column * limits.block_size < limits.max_model_len
                assert column not in row.table or update.admission is not None, "a column is written twice"
                row.table[column] = block
        for index, mask in plan.token_masks:
            assert self.rows[index].admission.masking is not Masking.NONE
            self.rows[index].mask = mask
        results = []
        for chunk in plan.prefill:  # all writes of a call come before its first read
            self._write(chunk.request_id, self.rows[chunk.row], chunk.start, chunk.token_ids)
        for chunk in plan.prefill:
            row = self.rows[chunk.row]
            row.request_id, row.seq_len = chunk.request_id, chunk.start + len(chunk.token_ids)
            assert not row.active and len(chunk.token_ids) > 0
            history = self._attend(row, chunk.start)
            result = RowResult(chunk.request_id, ())
            if chunk.is_last:
                row.active = True
                result = self._result(row, [self._sample(row, history)])
            if chunk.targets:
                result = result._replace(prompt_logprobs=self._prompt_logprobs(chunk))
            if chunk.is_last or chunk.targets:
                results.append(result)
        kv_tokens = sum(self.rows[entry.row].seq_len + 1 for entry in plan.decode)
        if all(self.rows[entry.row].active for entry in plan.decode):
            assert plan.decode_kv_tokens == kv_tokens
        self._check_groups(plan)
        emitted = {entry.row: [] for entry in plan.decode}
        for entry in plan.decode:
            assert self.rows[entry.row].request_id == entry.request_id
        for step in range(plan.num_steps):
            active = [entry.row for entry in plan.decode if self.rows[entry.row].active]
            active = [r for r in active if step == 0 or self.rows[r].admission.masking is not Masking.EACH_TOKEN]
            for index in active:
                row = self.rows[index]
                self._write(row.request_id, row, row.seq_len, (row.last_token,))
                row.seq_len += 1
            for index in active:
                row = self.rows[index]
                emitted[index].append(self._sample(row, self._attend(row, row.seq_len - 1)))
        results += [self._result(self.rows[entry.row], emitted[entry.row]) for entry in plan.decode]
        when = float(self.num_submitted)
        return StepResult(plan.step_id, tuple(results), StepTiming(submitted=when, finished=when))

    def _check_groups(self, plan):
        """Blocks that a group shares are in all its rows' tables, and full of their history already."""
        assert len(plan.prefix_groups) <= self.limits.max_prefix_groups
        rows = iter(plan.decode)
        for group in plan.prefix_groups:
            assert group.num_rows >= 2 and group.num_blocks >= 1
            members = [self.rows[next(rows).row] for _ in range(group.num_rows)]
            for row in members:
                assert row.seq_len >= group.num_blocks * self.limits.block_size
                for column in range(group.num_blocks):
                    assert row.table[column] == members[0].table[column], "a group shares what it does not"

    def _copy_blocks(self, copies):
        """Real executors copy some at a time, so that no source may be another copy's target."""
        targets = [copy.dst for copy in copies]
        assert len(set(targets)) == len(targets) and not {copy.src for copy in copies} & set(targets)
        for copy in copies:
            assert 0 < copy.num_tokens < self.limits.block_size and 0 < copy.dst < self.limits.num_blocks
            for offset in range(copy.num_tokens):
                self.slots[copy.dst, offset] = self.slots[copy.src, offset]

    def _write(self, request_id, row, start, tokens):
        history = self.requests[request_id][1]
        for position, token in enumerate(tokens, start):
            assert token == history[position]
            block = row.table[position // self.limits.block_size]
            assert block, "K/V are written to the null block"
            self.slots[block, position % self.limits.block_size] = self._stored(request_id, position)

    def _stored(self, request_id, position):
        request, history = self.requests[request_id]
        return position, request.cache_salt, zlib.crc32(bytes(history[: position + 1]))

    def _attend(self, row, first_query):
        """The row's history, of which queries from `first_query` on see what they may."""
        size, start, num_sinks = self.limits.block_size, 0, 0
        if self.retention is not None:
            start = max(0, first_query + 1 - self.retention.window)
            num_sinks = min(self.retention.num_sinks, start)
        places = [*range(num_sinks), *range(start, row.seq_len)]
        seen = [self.slots.get((row.table[p // size], p % size)) for p in places]
        expected = [self._stored(row.request_id, p) for p in places]
        assert seen == expected, f"request {row.request_id} sees {seen} in place of {expected}"
        return self.requests[row.request_id][1][: row.seq_len]

    def _sample(self, row, history):
        admission = row.admission
        forbidden = set(admission.stop_ids) if row.emitted < admission.min_new_tokens else set()
        if admission.masking is not Masking.NONE:
            assert row.mask is not None, "a token without a mask for it"
            forbidden |= not_in(row.mask)
            if admission.masking is Masking.EACH_TOKEN:
                row.mask = None
        row.last_token = next_token(history, admission.sampling.seed, forbidden)
        row.emitted += 1
        row.active = row.last_token not in admission.stop_ids and row.emitted < admission.max_new_tokens
        return row.last_token

    def _prompt_logprobs(self, chunk):
        """Entry i tells of prompt token i + 1: its rank is its position, so that a lost or doubled one shows."""
        prompt = self.requests[chunk.request_id][0].prompt_token_ids
        first = chunk.start + chunk.first_target + 1
        assert chunk.targets == prompt[first : first + len(chunk.targets)], "targets are not the tokens that follow"
        assert chunk.first_target + len(chunk.targets) <= len(chunk.token_ids)
        return tuple(TokenLogprobs(token, -1.0, first + i) for i, token in enumerate(chunk.targets))

    def _result(self, row, tokens):
        stopped = bool(tokens) and tokens[-1] in row.admission.stop_ids
        exhausted = bool(tokens) and row.emitted == row.admission.max_new_tokens
        return RowResult(row.request_id, tuple(tokens), stopped=stopped, exhausted=exhausted)
