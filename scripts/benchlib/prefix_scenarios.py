"""Loads whose requests share a prefix."""

import dataclasses
from collections.abc import Iterable

from jaxkv.core.config import EngineConfig
from jaxkv.core.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Scenario:
    """Requests that arrive together. `target` is what cold must save over off in `judged_metric`."""

    name: str
    num_requests: int
    shared_len: int
    own_len: int
    output_len: int
    judged_metric: str
    target: float

    def quick(self) -> "Scenario":
        return dataclasses.replace(self, num_requests=4, shared_len=self.shared_len // 4, output_len=8)

    @property
    def total_len(self) -> int:
        return self.shared_len + self.own_len + self.output_len


ALL = {
    "chats": Scenario("chats", 12, 500, 32, 32, judged_metric="ttft_mean", target=2.5),
    "documents": Scenario("documents", 16, 1024, 32, 32, judged_metric="total", target=4.0),
}


def check_room(config: EngineConfig, num_tokens: int, scenarios: Iterable[Scenario]) -> None:
    """All requests of a scenario must run at once, or the queue would be measured instead.

    Args:
      config: the running engine's, without a None. num_tokens: what its KV pool holds.

    Raises:
      ConfigError: naming the setting to raise.
    """
    for scenario in scenarios:
        # Admission leaves a block free for every running row; a started block counts whole.
        needed = scenario.num_requests * (scenario.total_len + 2 * config.block_size)
        if num_tokens < needed:
            raise ConfigError(
                f"the KV pool holds {num_tokens:,} tokens, scenario {scenario.name} needs {needed:,}: "
                "raise kv_cache_memory_bytes or num_gpu_blocks_override"
            )
        for name, least in (("max_num_seqs", scenario.num_requests), ("max_model_len", scenario.total_len)):
            if getattr(config, name) < least:
                raise ConfigError(f"{name} is {getattr(config, name)}, scenario {scenario.name} needs {least}")
