"""The real executor on tiny models: compiled once for a test run, then used under many limits."""

import dataclasses
import functools
import os

import jax
from flax import nnx

from jaxkv.control.engine import Engine
from jaxkv.control.executor import ExecutorLimits, StepHandle
from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.clock import MonotonicClock
from jaxkv.core.model_config import ModelConfig
from jaxkv.core.plan import StepPlan
from jaxkv.core.progress import SilentProgress
from jaxkv.core.request import Request, RequestOutput
from jaxkv.execution.executable_store import ExecutableStore
from jaxkv.execution.jax_executor import JaxExecutor
from jaxkv.execution.programs import Programs, ProgramShapes, abstract_model
from jaxkv.models.llama import KVStorage
from tests.support.tiny_models import model_of, parse, random_tensors, tiny_config

LIMITS = ExecutorLimits(
    num_blocks=97,
    block_size=16,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_prefill_seqs=4,
    max_model_len=256,
    max_decode_steps=8,
)
NUM_TOP = 5


def tiny_llama() -> ModelConfig:
    return parse(tiny_config())


def make_programs(
    config: ModelConfig,
    *,
    dtype: str = "float32",
    kv_dtype: str | None = None,
    implementation: str = "xla",
    prefill_buckets: tuple[int, ...] = (),
    decode_buckets: tuple[int, ...] = (LIMITS.max_num_seqs,),
    storage: KVStorage = KVStorage(),
    store: ExecutableStore = ExecutableStore(None),
    **changed,
) -> Programs:
    """Not compiled yet. Unless told, one bucket each, to compile little, and KV as wide as `dtype`; `changed` are limits. With
    `max_prefix_groups` all decode buckets but that of one row take groups."""
    limits = dataclasses.replace(LIMITS, **changed)
    shapes = ProgramShapes(
        model=config,
        dtype=dtype,
        kv_dtype=kv_dtype or dtype,
        limits=limits,
        prefill_buckets=prefill_buckets or (limits.max_num_batched_tokens,),
        decode_buckets=decode_buckets,
        num_top=NUM_TOP,
        implementation=implementation,
        cascade_buckets=tuple(bucket for bucket in decode_buckets if bucket > 1 and limits.max_prefix_groups),
        storage=storage,
        cache_as_bits=not implementation.startswith("pallas_"),
    )
    model = abstract_model(config, dtype=dtype, max_model_len=limits.max_model_len, storage=storage)
    return Programs(model, shapes, store)


@functools.lru_cache(maxsize=12)  # each maps 1,000 regions of a process's memory (see tests/conftest.py)
def compiled_programs(config: ModelConfig, block_size: int = LIMITS.block_size, **settings) -> Programs:
    """`settings` are make_programs' own."""
    buckets = (1, LIMITS.max_num_seqs) if block_size == LIMITS.block_size else (LIMITS.max_num_seqs,)
    store = ExecutableStore(os.environ["JAXKV_TEST_EXECUTABLES"])  # what another process of the run has compiled
    programs = make_programs(config, block_size=block_size, decode_buckets=buckets, store=store, **settings)
    programs.compile(SilentProgress())
    return programs


@functools.lru_cache
def weights(config: ModelConfig, dtype: str = "float32") -> tuple[jax.Array, ...]:
    leaves = jax.tree.leaves(nnx.state(model_of(config, random_tensors(config))))
    return tuple(leaf.astype(dtype) for leaf in leaves)


class LimitedExecutor:
    """The executor as if built with tighter limits, so that many limits share one set of executables."""

    def __init__(self, executor: JaxExecutor, limits: ExecutorLimits):
        self.limits = limits
        self._executor = executor

    def submit(self, plan: StepPlan) -> StepHandle:
        return self._executor.submit(plan)


def make_engine(
    config: ModelConfig,
    *,
    block_size: int = LIMITS.block_size,
    chunk: int = LIMITS.max_num_batched_tokens,
    num_blocks: int = LIMITS.num_blocks,
    max_in_flight: int = 2,
    scheduler: SchedulerConfig = SchedulerConfig(),
    **settings,
) -> Engine:
    """`settings` are make_programs' own: what is compiled."""
    clock = MonotonicClock()
    programs = compiled_programs(config, block_size, **settings)
    executor = JaxExecutor(programs, weights(config, programs.shapes.dtype), clock)
    limits = dataclasses.replace(executor.limits, max_num_batched_tokens=chunk, num_blocks=num_blocks)
    storage = programs.shapes.storage
    scheduler = dataclasses.replace(
        scheduler, window_sizes=config.windows_within(storage.window), num_sinks=storage.num_sinks
    )
    return Engine(LimitedExecutor(executor, limits), scheduler, clock=clock, max_in_flight=max_in_flight)


def run_requests(
    engine: Engine, requests: list[Request], *, stagger: int = 0, preempt_every: int = 0
) -> dict[str, list[RequestOutput]]:
    """All news of each request. One request is added every `stagger` steps; all at once for 0.

    Every `preempt_every` steps one running request, in turn, loses its row and blocks; never the oldest, so that all
    end. Checks the scheduler's invariants after every step.
    """
    news: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
    waiting = list(requests)
    steps = 0
    while waiting or engine.has_work():
        while waiting and (stagger == 0 or steps % stagger == 0 or not engine.has_work()):
            engine.add(waiting.pop(0))
            if stagger:
                break
        running = engine.scheduler.running
        if preempt_every and len(running) > 1 and steps % preempt_every == 0:
            engine.scheduler.preempt(running[1 + steps // preempt_every % (len(running) - 1)].request_id)
        for output in engine.step():
            news[output.request_id].append(output)
        engine.scheduler.check()
        steps += 1
        assert steps < 20_000, "the engine makes no progress"
    assert engine.failed is None, engine.failed
    return news


def tokens_of(news: list[RequestOutput]) -> tuple[int, ...]:
    return tuple(token for output in news for token in output.token_ids)
