"""Where an experiment runs: a real engine on this machine, or a simulated one on a GPU that is not here. Same scheduler,
same block manager, same users; in the simulated one a cost model tells how long a step takes.
"""

import dataclasses
import gc
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from articlelib.driver import Served, Session, serve
from jaxkv.capacity import plan_capacity
from jaxkv.control.engine import Engine
from jaxkv.control.executor import ExecutorLimits
from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.clock import SimulatedClock
from jaxkv.core.config import EngineConfig
from jaxkv.core.metrics import EngineStats
from jaxkv.core.model_config import ModelConfig
from jaxkv.device import Device
from jaxkv.simulation.cost_model import CostModel
from jaxkv.simulation.sim_executor import SimExecutor

if TYPE_CHECKING:
    from jaxkv.startup import StartedEngine  # brings weights and executables


@dataclasses.dataclass(frozen=True)
class Setting:
    """What an experiment changes; named as in EngineConfig. The defaults are those of the articles' engine: blocks of 16
    tokens, one decode step a call.

    Attributes:
      num_blocks: usable ones; None: all that gpu_memory_utilization leaves.
      max_num_seqs: None: as many as the world has rows.
    """

    gpu_memory_utilization: float = 0.9
    num_blocks: int | None = None
    max_num_seqs: int | None = None
    block_size: int = 16
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    share_partial_blocks: bool = True
    decode_steps: int = 1
    enforce_eager: bool = False
    kv_window: int | None = None

    def scheduler_fields(self) -> dict:
        names = ("enable_prefix_caching", "share_partial_blocks", "decode_steps")
        return {name: getattr(self, name) for name in names}


class World(Protocol):
    """Attributes:
    name: what it is, for the tables. vocab_size: token ids are below it. max_model_len: tokens a request, at most.
    """

    name: str
    is_simulated: bool
    vocab_size: int
    max_model_len: int

    def serve(self, sessions: Sequence[Session], setting: Setting, *, closes: bool = False) -> Served:
        """With an engine of its own and an empty cache; `closes` as in `driver.serve`."""
        ...

    def num_blocks(self, setting: Setting) -> int:
        """Usable blocks of an engine with this setting."""
        ...


CostModelOf = Callable[[ModelConfig, Device, str, str], CostModel]
"""From model, device, dtype of the weights and kv_cache_dtype."""


@dataclasses.dataclass(frozen=True)
class SimulatedWorld:
    """A model on a device of the table, as the capacity planner plans it."""

    model_name: str
    model: ModelConfig
    device: Device
    cost_model_of: CostModelOf
    dtype: str = "float16"
    max_num_batched_tokens: int = 2048
    max_model_len: int = 4096
    is_simulated: bool = True

    @property
    def name(self) -> str:
        return f"{self.model_name} on {self.device.name}, simulated"

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    def num_blocks(self, setting: Setting) -> int:
        if setting.num_blocks is not None:
            return setting.num_blocks
        config = EngineConfig(
            dtype=self.dtype,
            gpu_memory_utilization=setting.gpu_memory_utilization,
            kv_cache_dtype=setting.kv_cache_dtype,
            block_size=setting.block_size,
            max_num_seqs=setting.max_num_seqs,
            max_model_len=self.max_model_len,
            # The GPU kernels start at blocks of 16; what a block holds does not depend on who reads it.
            attention_implementation="xla" if setting.block_size < 16 else None,
        )
        return plan_capacity(config, self.model, self.device).memory.num_blocks

    def engine(self, setting: Setting) -> tuple[Engine, SimulatedClock]:
        rows = setting.max_num_seqs or 256
        limits = ExecutorLimits(
            num_blocks=self.num_blocks(setting) + 1,
            block_size=setting.block_size,
            max_num_seqs=rows,
            max_num_batched_tokens=max(self.max_num_batched_tokens, rows),
            max_prefill_seqs=min(rows, 16),
            max_model_len=self.max_model_len,
            max_decode_steps=8,
        )
        clock = SimulatedClock()
        cost_model = self.cost_model_of(self.model, self.device, self.dtype, setting.kv_cache_dtype)
        config = SchedulerConfig(
            vocab_size=self.vocab_size,
            window_sizes=self.model.windows_within(setting.kv_window),
            num_sinks=0 if setting.kv_window is None else EngineConfig.kv_sinks,
            **setting.scheduler_fields(),
        )
        executor = SimExecutor(limits, cost_model, clock, vocab_size=self.vocab_size)
        return Engine(executor, config, clock=clock, stats=EngineStats(window=None)), clock

    def serve(self, sessions: Sequence[Session], setting: Setting, *, closes: bool = False) -> Served:
        engine, clock = self.engine(setting)
        return serve(engine, sessions, clock.advance_to, closes=closes)


class _Limited:
    """An executor of which a part is used: fewer blocks, fewer rows. Nothing is compiled for it."""

    def __init__(self, executor, **limits: int):
        self.limits = dataclasses.replace(executor.limits, **limits)
        self.submit = executor.submit


class RealWorld:
    """Engines of one model on this machine; those that differ in what is compiled are started when first asked for.

    Attributes:
      config: of all of them; a setting may take fewer rows and blocks than it says.
    """

    is_simulated = False

    def __init__(self, name: str, config: EngineConfig, start: "Callable[[EngineConfig], StartedEngine]"):
        self.name = name
        self.config = config
        self._start = start
        self._started: dict[tuple, StartedEngine] = {}

    def started(self, setting: Setting = Setting()) -> "StartedEngine":
        """The engine whose executables serve this setting."""
        key = (setting.block_size, setting.kv_cache_dtype, setting.enforce_eager, setting.kv_window)
        if key not in self._started:
            names = ("block_size", "kv_cache_dtype", "enforce_eager", "kv_window")
            changed = dict(zip(names, key, strict=True))
            if self.config.num_gpu_blocks_override is not None:  # as many tokens, in other blocks
                tokens = self.config.num_gpu_blocks_override * Setting.block_size
                changed["num_gpu_blocks_override"] = tokens // setting.block_size
            self._started[key] = self._start(dataclasses.replace(self.config, **changed))
        return self._started[key]

    @property
    def vocab_size(self) -> int:
        return self.started().model_config.vocab_size

    @property
    def max_model_len(self) -> int:
        return self.started().config.max_model_len

    def num_blocks(self, setting: Setting) -> int:
        pool = self.started(setting).memory.num_blocks
        return pool if setting.num_blocks is None else min(pool, setting.num_blocks)

    def serve(self, sessions: Sequence[Session], setting: Setting, *, closes: bool = False) -> Served:
        base = self.started(setting).engine
        limits = {"num_blocks": self.num_blocks(setting) + 1}
        if setting.max_num_seqs is not None:
            limits["max_num_seqs"] = setting.max_num_seqs
        executor = _Limited(base.executor, **limits)
        fields = setting.scheduler_fields()
        if setting.enforce_eager:
            fields["decode_steps"] = 1
        config = dataclasses.replace(base.scheduler.config, **fields)
        gc.collect()  # one run's garbage is not collected in another's time
        engine = Engine(executor, config, clock=base.clock, stats=EngineStats(window=None))
        return serve(engine, sessions, lambda when: time.sleep(max(0.0, when - base.clock.now())), closes=closes)

    def close(self) -> None:
        self._started.clear()
        gc.collect()
