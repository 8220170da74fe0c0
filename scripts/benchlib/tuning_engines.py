"""From a setting that is tried to the simulated engine that it makes: by the engine's own plan of its memory."""

import dataclasses

from benchlib.find_device import HERE, find_device
from benchlib.replay_setup import set_up
from benchlib.tuning_replays import SimulatedEngine
from jaxkv.capacity import Capacity, plan_capacity
from jaxkv.core.config import EngineConfig
from jaxkv.core.errors import ConfigError
from jaxkv.core.model_config import ModelConfig
from jaxkv.settings import model_limit
from jaxkv.simulation.trace_requests import check_block_size
from jaxkv.simulation.traces import Trace
from jaxkv.simulation.tuning import Setting, Value

TUNED = (
    "kv_cache_dtype",
    "gpu_memory_utilization",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "eviction_policy",
    "decode_steps",
)
"""Fields of EngineConfig, in the order in which they are tried: first what decides how much the cache holds."""


class EnginePlanner:
    """Plans the engine of each setting, once.

    Attributes:
      config: what the flags ask for; a setting replaces some of it.
      trace: without the requests that no engine of this model takes.
      num_too_long: requests that were left out.
      refused: what the engine would refuse, and how.
    """

    def __init__(self, config: EngineConfig, model: ModelConfig, device: str, trace: Trace, cost_model: str | None):
        """`cost_model`: file of a measured one. Raises ConfigError."""
        self.config, self.shape = config, model
        self.device, self._available = find_device(device)
        if device == HERE and cost_model is None:
            raise ConfigError(
                "device is detect, and its peaks are not known: measure it with calibrate_cost_model.py and give the "
                "file as cost_model"
            )
        self._cost = {"cost_model": cost_model} if cost_model is not None else {"device": device}
        limit = config.max_model_len or model_limit(self.shape)
        fitting = tuple(
            request for request in trace.requests if request.input_length + max(1, request.output_length) <= limit
        )
        self.num_too_long = len(trace.requests) - len(fitting)
        if len(fitting) < 4:
            raise ConfigError(
                f"{len(fitting)} of {len(trace.requests)} requests of {trace.name} fit the {limit:,} tokens that "
                f"{config.model} takes, and tuning needs 4: take a longer trace or another model"
            )
        self.trace = dataclasses.replace(trace, requests=fitting)
        self.refused: dict[tuple, str] = {}
        self._engines: dict[tuple, SimulatedEngine | None] = {}

    def default(self) -> dict[str, Value]:
        """What the engine takes where the flags leave it open. Raises ConfigError where it would not start."""
        config = self.capacity({}).config
        check_block_size(self.trace, config.block_size)
        setting = {name: getattr(config, name) for name in TUNED}
        if self.engine(setting) is None:
            raise ConfigError(self.refused[_key(setting)])
        return setting

    def capacity(self, setting: Setting) -> Capacity:
        """Raises ConfigError."""
        config = dataclasses.replace(self.config, **setting)
        return plan_capacity(config, self.shape, self.device, available=self._available)

    def engine(self, setting: Setting) -> SimulatedEngine | None:
        """None: see `refused`."""
        key = _key(setting)
        if key not in self._engines:
            try:
                self._engines[key] = self._plan(setting)
            except ConfigError as error:
                self._engines[key], self.refused[key] = None, str(error)
        return self._engines[key]

    def reason(self, setting: Setting) -> str:
        """Why it was refused."""
        return self.refused[_key(setting)]

    def _plan(self, setting: Setting) -> SimulatedEngine:
        capacity = self.capacity(setting)
        config = dataclasses.replace(capacity.config, max_model_len=capacity.memory.max_model_len)
        if not self.device.is_cpu and config.attention_implementation == "xla":
            raise ConfigError(
                f"no GPU kernel takes kv_cache_dtype {config.kv_cache_dtype} with blocks of {config.block_size} tokens "
                "here, and what XLA makes of it is slower than the cost model says"
            )
        setup = set_up(config, self.trace, **self._cost, capacity_blocks=capacity.memory.num_blocks)
        return SimulatedEngine(setup.limits, setup.scheduler, setup.cost_model)


def serve_command(config: EngineConfig, setting: Setting, default: Setting) -> str:
    """The command line that serves with a setting: what is not as an engine has it by itself."""
    flags = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(EngineConfig)
        if field.name != "model" and getattr(config, field.name) != field.default
    }
    flags |= {name: value for name, value in setting.items() if value != default[name]}
    words = [f"--model={config.model}"]
    for name, value in flags.items():
        words.append(f"--{'' if value else 'no'}{name}" if isinstance(value, bool) else f"--{name}={value}")
    return " ".join(["python scripts/serve.py", *words])


def _key(setting: Setting) -> tuple:
    return tuple(sorted(setting.items()))
