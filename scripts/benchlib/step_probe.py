"""Times single calls of an executor on hand-made plans, so that no prompt need be computed to stand at some context.

Rows claim a context that nobody wrote: attention reads blocks full of whatever is there, which costs the same.
"""

import time

from jaxkv.control.executor import Executor
from jaxkv.core.plan import Admission, DecodeRow, PrefillChunk, RowUpdate, StepPlan
from jaxkv.core.request import SamplingParams

_SAMPLING = SamplingParams(temperature=0.0, ignore_eos=True, seed=0)


class StepProbe:
    """Owns the executor's rows and blocks while it is used; whoever comes next must start afresh, as an Engine does."""

    def __init__(self, executor: Executor):
        self._executor = executor
        self._next_step_id = 0

    def holds(self, rows: int, seq_len: int) -> bool:
        """Whether that many rows of that length fit rows, pool and model length."""
        limits = self._executor.limits
        blocks = rows * -(-seq_len // limits.block_size)
        return rows <= limits.max_num_seqs and blocks < limits.num_blocks and seq_len <= limits.max_model_len

    def decode_seconds(self, *, rows: int, context_len: int, num_steps: int = 1, repeats: int = 4) -> list[float]:
        """Seconds of each of `repeats` calls that decode `rows` rows, each with about `context_len` tokens in cache."""
        seq_len = context_len + 1 + num_steps * (repeats + 1)
        self._admit(rows, seq_len)
        # One prompt token each: a row starts to decode after its last chunk.
        chunks = [PrefillChunk(str(row), row, context_len, (1,), is_last=True) for row in range(rows)]
        most = min(self._executor.limits.max_prefill_seqs, self._executor.limits.max_num_batched_tokens)
        for start in range(0, rows, most):
            self._run(prefill=tuple(chunks[start : start + most]))
        decode = tuple(DecodeRow(str(row), row) for row in range(rows))
        seconds = [self._run(decode=decode, num_steps=num_steps) for _ in range(repeats + 1)]
        return seconds[1:]

    def prefill_seconds(self, *, tokens: int, context_len: int, repeats: int = 4) -> list[float]:
        """Seconds of each of `repeats` calls that compute `tokens` prompt tokens after `context_len` in cache.

        The prompt ends with them, first token included: a chunk that ends nothing has no result to wait for, and
        only its dispatch would be timed.
        """
        self._admit(1, context_len + tokens + 1)
        chunk = PrefillChunk("0", 0, context_len, (1,) * tokens, is_last=True)
        return [self._run(prefill=(chunk,)) for _ in range(repeats + 1)][1:]

    def _admit(self, rows: int, seq_len: int) -> None:
        """Rows 0, 1, ... with blocks of their own."""
        limits = self._executor.limits
        if not self.holds(rows, seq_len):
            raise ValueError(f"{rows} rows of {seq_len} tokens do not fit {limits}")
        admission = Admission(_SAMPLING, max_new_tokens=seq_len, min_new_tokens=0, stop_ids=())
        per_row = -(-seq_len // limits.block_size)
        firsts = [1 + row * per_row for row in range(rows)]  # block 0 is the null block
        updates = [
            RowUpdate(row, 0, tuple(range(first, first + per_row)), admission) for row, first in enumerate(firsts)
        ]
        self._run(updates=tuple(updates))

    def _run(self, **plan) -> float:
        begin = time.perf_counter()
        self._executor.submit(StepPlan(self._next_step_id, **plan)).result()
        self._next_step_id += 1
        return time.perf_counter() - begin
