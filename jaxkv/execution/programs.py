"""The compiled step functions: one executable for each bucket, all built before serving.

Executables are compiled ahead of time from abstract shapes (no weight and no cache need exist yet), so their temporaries
are known before anything is allocated, and steady state cannot compile: a shape without an executable is a KeyError.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import os
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.control.executor import ExecutorLimits
from jaxkv.core.model_config import ModelConfig
from jaxkv.core.plan import BlockCopy, PrefillChunk, PrefixGroup, StepPlan, TokenMask
from jaxkv.core.progress import Progress
from jaxkv.core.token_constraint import mask_bytes
from jaxkv.execution import compile_watch
from jaxkv.execution.batch import pack_groups, pack_prefill
from jaxkv.execution.decode_loop import decode_steps
from jaxkv.execution.decode_state import DecodeState, apply_updates, empty_state, pack_updates
from jaxkv.execution.executable_store import ExecutableStore
from jaxkv.execution.kv_cache import KVCache, empty_cache
from jaxkv.execution.logit_adjustments import apply_adjustments, apply_masks, pack_adjustments, pack_masks
from jaxkv.execution.prefill import first_tokens, prefill_step
from jaxkv.execution.step_output import StepOutput
from jaxkv.models.llama import KVStorage, Llama
from pallas_kernels.block_copy import block_copy
from pallas_kernels.cascade import RowGroups

# Rows of the one compiled block-copy call; more copies take more calls.
MAX_COPIES = 16

Work = tuple[str, int | None]
"""A step function, as `Programs.lower` names them, and its bucket."""


@dataclasses.dataclass(frozen=True)
class WarmUp:
    """What building the executables took.

    Attributes:
      executables: how many there are; from_cache: of these, out of the store (or JAX's own cache, if the user turned it on).
      seconds: wall-clock time.
    """

    executables: int
    from_cache: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class ProgramShapes:
    """Everything that decides what is compiled.

    Attributes:
      prefill_buckets: padded token counts T, rising. decode_buckets: padded row counts B, rising.
      cascade_buckets: those of them that rows with shared prefixes can run in; none without limits.max_prefix_groups.
      num_top: logprob alternatives computed when a row asks.
      storage: see models.llama.KVStorage.
      cache_as_bits: for XLA:CPU, which converts pools of 16-bit floats whole (see LayerKV).
    """

    model: ModelConfig
    dtype: str
    kv_dtype: str
    limits: ExecutorLimits
    prefill_buckets: tuple[int, ...]
    decode_buckets: tuple[int, ...]
    num_top: int
    implementation: str
    cascade_buckets: tuple[int, ...] = ()
    storage: KVStorage = KVStorage()
    cache_as_bits: bool = False

    @property
    def max_blocks_per_row(self) -> int:
        return -(-self.limits.max_model_len // self.limits.block_size)

    @property
    def max_update_entries(self) -> int:
        """Block-table entries one update call takes: a decode step adds few a row, a long prompt many."""
        return max(256, 2 * self.limits.max_num_seqs)

    def empty_state(self) -> DecodeState:
        limits = self.limits
        return empty_state(limits.max_num_seqs, self.max_blocks_per_row, limits.max_stop_ids, self.model.vocab_size)

    def empty_cache(self) -> KVCache:
        limits = self.limits
        return empty_cache(
            self.model,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            dtype=self.kv_dtype,
            as_bits=self.cache_as_bits,
        )


def geometric_buckets(smallest: int, largest: int, factor: int) -> tuple[int, ...]:
    """Buckets smallest, factor*smallest, ... up to and including `largest`."""
    buckets = [smallest]
    while buckets[-1] < largest:
        buckets.append(min(buckets[-1] * factor, largest))
    return tuple(buckets)


def bucket_for(buckets: tuple[int, ...], size: int) -> int:
    """The smallest bucket that holds `size`."""
    return next(bucket for bucket in buckets if bucket >= size)


def abstract_model(
    config: ModelConfig, *, dtype: str, max_model_len: int, storage: KVStorage = KVStorage()
) -> Llama:
    """The model with shapes in place of weights."""

    def build() -> Llama:
        return Llama(config, dtype=jnp.dtype(dtype), max_model_len=max_model_len, storage=storage)

    return nnx.eval_shape(build)


class Programs:
    """The step functions, taking the weights as a flat tuple of leaves (cheap to pass on every call).

    `apply_updates(state, batch)`, `apply_adjustments(state, update)`, `apply_masks(state, update)`, `copy_blocks(cache, src, dst, num_tokens)`,
    `prefill[T](weights, cache, block_table, batch)`, `first_tokens(weights, state, hidden, row_ids, seq_lens, is_last)`,
    `decode[B](weights, cache, state, rows, num_steps)`, `cascade[B](weights, cache, state, rows, num_steps, groups)`;
    cache and state are donated. Cascade is an executable of its own, so that without groups there is neither a launch
    nor a branch for it: a branch in each layer would make a GPU wait for the host.
    """

    def __init__(self, model: Llama, shapes: ProgramShapes, store: ExecutableStore = ExecutableStore(None)):
        """`model` may be abstract: only its structure and shapes are used. `store` remembers executables."""
        graphdef, state = nnx.split(model)
        leaves, treedef = jax.tree.flatten(state)
        self.shapes = shapes
        self._store = store
        self.abstract_weights = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)

        def merge(weights: tuple[jax.Array, ...]) -> Llama:
            return nnx.merge(graphdef, jax.tree.unflatten(treedef, weights))

        options = {"implementation": shapes.implementation, "num_top": shapes.num_top}

        def prefill(weights, cache, block_table, batch):
            return prefill_step(merge(weights), cache, block_table, batch, **options)

        def first(weights, state, hidden, row_ids, seq_lens, is_last):
            return first_tokens(merge(weights), state, hidden, row_ids, seq_lens, is_last, num_top=shapes.num_top)

        def decode(weights, cache, state, rows, num_steps, groups=None):
            max_steps = shapes.limits.max_decode_steps
            return decode_steps(merge(weights), cache, state, rows, num_steps, groups, max_steps=max_steps, **options)

        copy_in_layer = jax.jit(
            functools.partial(block_copy, implementation=shapes.implementation)
        )  # traced once, not L times

        def copy_blocks(cache, src, dst, num_tokens):
            return KVCache(tuple(copy_in_layer(kv, src, dst, num_tokens) for kv in cache.layers))

        self._functions = {
            "update": (apply_updates, (0,)),
            "adjust": (apply_adjustments, (0,)),
            "mask": (apply_masks, (0,)),
            "copy": (copy_blocks, (0,)),
            "prefill": (prefill, (1,)),
            "first": (first, (1,)),
            "decode": (decode, (1, 2)),
            "cascade": (decode, (1, 2)),
        }
        # Un-jitted until `finish` replaces them: that is what enforce_eager runs.
        eager = {kind: _eager(function) for kind, (function, _) in self._functions.items()}
        self.apply_updates: Callable = eager["update"]
        self.apply_adjustments: Callable = eager["adjust"]
        self.apply_masks: Callable = eager["mask"]
        self.copy_blocks: Callable = eager["copy"]
        self.first_tokens: Callable = eager["first"]
        self.prefill: dict[int, Callable] = dict.fromkeys(shapes.prefill_buckets, eager["prefill"])
        self.decode: dict[int, Callable] = dict.fromkeys(shapes.decode_buckets, eager["decode"])
        self.cascade: dict[int, Callable] = dict.fromkeys(shapes.cascade_buckets, eager["cascade"])

    @functools.cached_property
    def abstract_cache(self) -> KVCache:
        return jax.eval_shape(self.shapes.empty_cache)

    @functools.cached_property
    def abstract_state(self) -> DecodeState:
        return jax.eval_shape(self.shapes.empty_state)

    def lower(
        self, kind: str, bucket: int | None = None, sharding: jax.sharding.Sharding | None = None
    ) -> jax.stages.Lowered:
        """The lowered step function `kind` ("update", "adjust", "mask", "copy", "prefill", "first", "decode", "cascade")
        for a bucket.

        `sharding` is that of all arguments, for devices other than the default one, which need not exist.
        """
        limits, cache, state = self.shapes.limits, self.abstract_cache, self.abstract_state
        if kind == "update":
            args = (state, self.pack_updates(()).pop())
        elif kind == "adjust":
            args = (state, pack_adjustments(limits.max_num_seqs, None).pop())
        elif kind == "mask":
            args = (state, self.pack_masks(()).pop())
        elif kind == "copy":
            args = (cache, *_pack_copies(()).pop())
        elif kind == "prefill":
            args = (self.abstract_weights, cache, state.block_table, self.pack_prefill((), bucket))
        elif kind == "first":
            rows = np.zeros((limits.max_prefill_seqs,), np.int32)
            hidden = jax.ShapeDtypeStruct((len(rows), self.shapes.model.hidden_size), self.shapes.dtype)
            args = (self.abstract_weights, state, hidden, rows, rows, rows.astype(np.bool_))
        else:
            args = (
                self.abstract_weights,
                cache,
                state,
                np.zeros((bucket,), np.int32),
                np.int32(limits.max_decode_steps),
            )
            if kind == "cascade":
                args += (self.pack_groups(()),)
        function, donated = self._functions[kind]
        if sharding is not None:
            args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
        return jax.jit(function, donate_argnums=donated).lower(*args)

    def start(self, progress: Progress, work: Sequence[Work] | None = None) -> None:
        """Begin to compile `work`, all step functions unless told, in the background; the largest comes first."""
        self._begin = time.monotonic()
        work = self._all_work() if work is None else work
        # Tracing holds the GIL, XLA's compiler does not: a few threads overlap the two.
        self._pool = concurrent.futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1))
        num_done = itertools.count(1)

        def compile_one(item: Work) -> tuple[jax.stages.Compiled, bool]:
            what = f"{item}|{self.shapes}"
            executable, found = self._store.load(what), True
            if executable is None:
                lowered = self.lower(*item)
                before = compile_watch.from_cache_here()
                executable = lowered.compile()
                found = compile_watch.from_cache_here() > before
                if not found:  # what JAX's own cache gave back cannot be serialised again: its functions get lost
                    self._store.save(what, executable)
            progress.update("compile", next(num_done), len(work))
            return executable, found

        self._building = {item: self._pool.submit(compile_one, item) for item in work}

    def stop(self) -> None:
        """Compile nothing more; does not wait for what is being compiled."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def temporaries(self) -> int:
        """Bytes of the biggest temporary of any step function, from the compiler's own memory analysis. Waits for those
        that have the biggest."""
        analyses = [self._building[item].result()[0].memory_analysis() for item in self.largest()]
        return max(analysis.temp_size_in_bytes for analysis in analyses)

    def largest(self) -> list[Work]:
        """The step functions with the biggest temporaries."""
        cascade = [("cascade", bucket) for bucket in self.shapes.cascade_buckets[-1:]]
        return [("prefill", self.shapes.prefill_buckets[-1]), ("decode", self.shapes.decode_buckets[-1]), *cascade]

    def finish(self) -> WarmUp:
        """Wait for everything that `start` began, and use it from now on."""
        try:
            built = {item: future.result() for item, future in self._building.items()}
        finally:  # an interrupt does not wait for what nobody wants any more
            self.stop()
        executables = {item: executable for item, (executable, _) in built.items()}
        self.apply_updates = executables["update", None]
        self.apply_adjustments = executables["adjust", None]
        self.apply_masks = executables["mask", None]
        self.copy_blocks = executables["copy", None]
        self.first_tokens = executables["first", None]
        self.prefill = {b: executables["prefill", b] for b in self.shapes.prefill_buckets}
        self.decode = {b: executables["decode", b] for b in self.shapes.decode_buckets}
        self.cascade = {b: executables["cascade", b] for b in self.shapes.cascade_buckets}
        return WarmUp(len(built), sum(cached for _, cached in built.values()), time.monotonic() - self._begin)

    def compile(self, progress: Progress) -> WarmUp:
        """`start` and `finish`."""
        self.start(progress)
        return self.finish()

    def _all_work(self) -> list[Work]:
        buckets = [("prefill", b) for b in self.shapes.prefill_buckets]
        buckets += [("decode", b) for b in self.shapes.decode_buckets]
        buckets += [("cascade", b) for b in self.shapes.cascade_buckets]
        rest = [item for item in sorted(buckets, key=lambda item: -item[1]) if item not in self.largest()]
        return [*self.largest(), *rest, *((kind, None) for kind in ("first", "update", "adjust", "mask", "copy"))]

    def run_prefill(
        self, weights: tuple[jax.Array, ...], cache: KVCache, state: DecodeState, chunks: tuple[PrefillChunk, ...]
    ) -> tuple[KVCache, DecodeState, StepOutput]:
        """Prefill in the smallest bucket that holds all chunks, then first tokens if any chunk ends its prompt."""
        bucket = bucket_for(self.shapes.prefill_buckets, sum(len(chunk.token_ids) for chunk in chunks))
        batch = self.pack_prefill(chunks, bucket)
        cache, hidden, prompt_logprobs = self.prefill[bucket](weights, cache, state.block_table, batch)
        sampled = None
        if batch.is_last.any():
            seq_lens = batch.context_lens + np.diff(batch.cu_q_lens)
            state, sampled = self.first_tokens(weights, state, hidden, batch.rows, seq_lens, batch.is_last)
        return cache, state, StepOutput.of_prefill(sampled, prompt_logprobs, len(batch.rows))

    def run_decode(
        self, weights: tuple[jax.Array, ...], cache: KVCache, state: DecodeState, plan: StepPlan
    ) -> tuple[KVCache, DecodeState, StepOutput]:
        """The plan's decode rows, in the smallest bucket that holds them."""
        shapes = self.shapes
        buckets = shapes.cascade_buckets if plan.prefix_groups else shapes.decode_buckets
        bucket = bucket_for(buckets, len(plan.decode))
        rows = np.full((bucket,), shapes.limits.max_num_seqs, np.int32)
        rows[: len(plan.decode)] = [entry.row for entry in plan.decode]
        args = (weights, cache, state, rows, np.int32(plan.num_steps))
        if plan.prefix_groups:
            return self.cascade[bucket](*args, self.pack_groups(plan.prefix_groups))
        return self.decode[bucket](*args)

    # ---- plans as arguments

    def pack_updates(self, updates):
        limits = self.shapes.limits
        return pack_updates(
            updates,
            dead_row=limits.max_num_seqs,
            max_entries=self.shapes.max_update_entries,
            max_admissions=limits.max_prefill_seqs,
            max_stop_ids=limits.max_stop_ids,
        )

    def pack_masks(self, masks: tuple[TokenMask, ...]):
        num_words = mask_bytes(self.shapes.model.vocab_size) // 4
        return pack_masks(masks, dead_row=self.shapes.limits.max_num_seqs, num_words=num_words)

    def pack_copies(self, copies: tuple[BlockCopy, ...]):
        return _pack_copies(copies)

    def pack_groups(self, groups: tuple[PrefixGroup, ...]) -> RowGroups:
        limits = self.shapes.limits
        return pack_groups(groups, max_groups=limits.max_prefix_groups, block_size=limits.block_size)

    def pack_prefill(self, chunks, bucket: int):
        limits = self.shapes.limits
        return pack_prefill(
            chunks,
            num_tokens=bucket,
            max_seqs=limits.max_prefill_seqs,
            dead_row=limits.max_num_seqs,
            block_size=limits.block_size,
        )


def _eager(function: Callable) -> Callable:
    """One operation after the other. Loops and branches too: left to itself, JAX compiles each of them at every call, since
    their bodies are new functions, and keeps what it compiled (the demo model: 12 s and 850 memory maps a token)."""

    @functools.wraps(function)
    def run(*args):
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(args)):
            return function(*args)  # somebody compiles it
        with jax.disable_jit():
            return function(*args)

    return run


def _pack_copies(copies: tuple[BlockCopy, ...]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(src, dst, num_tokens) arrays of MAX_COPIES each; padding copies nothing onto the null block."""
    batches = []
    for start in range(0, max(len(copies), 1), MAX_COPIES):
        packed = np.zeros((3, MAX_COPIES), np.int32)
        for i, copy in enumerate(copies[start : start + MAX_COPIES]):
            packed[:, i] = copy.src, copy.dst, copy.num_tokens
        batches.append(tuple(packed))
    return batches
