"""Engines that take the same prompts in turns: jaxkv, and who is compared with it.

Each gets lists of token ids and must produce `output_len` tokens for each, greedily, whatever it samples.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from jaxkv import LLM, SamplingParams
from jaxkv.core.config import EngineConfig
from jaxkv.measurement import AbsentError

Prompts = list[list[int]]


class Timing(NamedTuple):
    """Of one batch, from the call until all tokens are there.

    Attributes:
      cpu_seconds: of all threads. On a busy machine it tells what `seconds` hides: who computed more, who waited more.
    """

    seconds: float
    cpu_seconds: float


class Contender(Protocol):
    def generate(self, prompts: Prompts, output_len: int) -> Timing:
        """Continue all prompts at once by exactly `output_len` tokens."""
        ...

    def close(self) -> None:
        """Give back memory and processes."""
        ...


def timed(function: Callable[[], Any]) -> tuple[Any, Timing]:
    """What the function returns, and its times in this process."""
    begin, cpu_begin = time.perf_counter(), time.process_time()
    result = function()
    return result, Timing(time.perf_counter() - begin, time.process_time() - cpu_begin)


class JaxkvContender:
    """jaxkv through its public LLM, text output included."""

    def __init__(self, config: EngineConfig):
        self._llm = LLM(**dataclasses.asdict(config))

    @property
    def vocab_size(self) -> int:
        return self._llm.started.model_config.vocab_size

    def generate(self, prompts: Prompts, output_len: int) -> Timing:
        sampling = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        outputs, timing = timed(lambda: self._llm.generate(prompts, sampling))
        check_lengths([len(output.token_ids) for output in outputs], len(prompts), output_len)
        return timing

    def close(self) -> None:
        self._llm.close()


def check_lengths(lengths: list[int], num_prompts: int, output_len: int) -> None:
    """Who produced another number of tokens was not doing the same work."""
    if lengths != [output_len] * num_prompts:
        raise RuntimeError(f"expected {num_prompts} outputs of {output_len} tokens, got lengths {lengths}")


def open_rival(
    name: str, model: str, dtype: str, *, max_num_seqs: int, max_model_len: int, vllm: dict[str, Any]
) -> Contender:
    """A rival by name: transformers, transformers_continuous or vllm.

    Args:
      vllm: `python` and `eager` of VllmContender.

    Raises:
      AbsentError: it is not installed, with the reason.
    """
    limits = {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len}
    try:
        if name == "vllm":  # needs torch too: its checkpoint is written with transformers' configuration
            from benchlib.vllm_contender import VllmContender

            return VllmContender(model, dtype, **vllm, **limits)
        from benchlib.torch_contenders import ContinuousBatching, Generate
    except ImportError as error:
        raise AbsentError(f"{error.name} is not installed (pip install -e '.[oracle]')") from None
    return Generate(model, dtype) if name == "transformers" else ContinuousBatching(model, dtype, **limits)
