#!/usr/bin/env python
"""Tokens a second of jaxkv beside other engines on the same weights and machine, in one run.

    python scripts/bench_throughput.py                      # the acceptance setting, with its targets
    python scripts/bench_throughput.py --batch_sizes=8 --dtypes=float32 --runs=1
    python scripts/bench_throughput.py --rivals=transformers,transformers_continuous,vllm --vllm_python=PATH
    python scripts/bench_throughput.py --rivals=            # jaxkv alone

Greedy, end-of-sequence ignored. The engines take turns, run by run, so that a noisy machine hurts them alike. Each pair
is compared in each dtype, and each engine's best dtype with the other's best. Targets belong to the acceptance setting;
with another setting, or --quick, the ratios are told and not judged. Every flag of the engine is taken, but --dtypes
stands for --dtype.
"""

import dataclasses
import gc
import statistics
import time
from typing import Any

import numpy as np
from absl import flags
from benchlib.contenders import Contender, JaxkvContender, Timing, open_rival

from jaxkv import measurement
from jaxkv.core.errors import ConfigError
from jaxkv.flags import define_engine_flags, engine_config

_RIVAL_NAMES = ("transformers", "transformers_continuous", "vllm")

_DTYPES = flags.DEFINE_list("dtypes", ["float32", "bfloat16"], "Weights' dtypes to compare in.")
_BATCHES = flags.DEFINE_list("batch_sizes", ["1", "8", "16"], "Concurrent requests.")
_PROMPT = flags.DEFINE_integer("prompt_len", 128, "Prompt tokens a request.", lower_bound=1)
_OUTPUT = flags.DEFINE_integer("output_len", 128, "New tokens a request.", lower_bound=1)
_PREFILL = flags.DEFINE_integer("prefill_len", 512, "Prompt of the prefill measurement; 0: none.", lower_bound=0)
_RUNS = flags.DEFINE_integer("runs", 3, "Counted runs of each; one more warms up.", lower_bound=1)
_RIVALS = flags.DEFINE_list("rivals", ["transformers"], f"Engines to compare with: {', '.join(_RIVAL_NAMES)}.")
_VLLM_PYTHON = flags.DEFINE_string("vllm_python", "", "Interpreter that has vLLM, if this one has not.")
_VLLM_EAGER = flags.DEFINE_bool("vllm_eager", False, "Leave out vLLM's compilation, which takes minutes.")
# The prompts share nothing, so the prefix cache could only cost.
define_engine_flags(enable_prefix_caching=False)

# What float32 must reach against transformers' generate at the acceptance setting, by batch size.
_DECODE_TARGETS = {1: 1.3, 8: 1.6, 16: 1.6}
_PREFILL_TARGET = 1.0

# Threads of the one before may go on spinning for a while (torch's: 0.2 s, felt as 2 to 4 % of a prefill of 512).
_SETTLE_S = 0.5

Key = tuple[str, str]
"""A contender's name and dtype."""


@dataclasses.dataclass(frozen=True)
class Work:
    """One row of the comparison; `target` is for float32 against transformers' generate."""

    name: str
    batch: int
    prompt_len: int
    output_len: int
    is_prefill: bool
    target: float | None

    def rate(self, timing: Timing) -> float:
        return (1 if self.is_prefill else self.batch * self.output_len) / timing.seconds

    @property
    def unit(self) -> str:
        return "prompts/s" if self.is_prefill else "tokens/s"


def _config() -> dict[str, Any]:
    own = (_DTYPES, _BATCHES, _PROMPT, _OUTPUT, _PREFILL, _RUNS, _RIVALS, _VLLM_EAGER)
    settings = {flag.name: flag.value for flag in own} | {"quick": flags.FLAGS.quick}
    return dataclasses.asdict(engine_config()) | settings


def _work() -> list[Work]:
    try:
        batches = [int(batch) for batch in _BATCHES.value]
    except ValueError:
        batches = []
    if not batches or min(batches) < 1:
        raise ConfigError(f"batch_sizes is {','.join(_BATCHES.value)!r}; it must be whole numbers from 1, e.g. 1,8")
    quick = flags.FLAGS.quick
    judged = engine_config().model == "demo" and not quick
    decode_judged = judged and (_PROMPT.value, _OUTPUT.value) == (128, 128)
    output_len = min(_OUTPUT.value, 16) if quick else _OUTPUT.value
    work = [
        Work(
            f"decode batch {batch}",
            batch,
            _PROMPT.value,
            output_len,
            is_prefill=False,
            target=_DECODE_TARGETS.get(batch) if decode_judged else None,
        )
        for batch in batches
    ]
    if _PREFILL.value:
        target = _PREFILL_TARGET if judged and _PREFILL.value == 512 else None
        work.append(Work(f"prefill {_PREFILL.value}", 1, _PREFILL.value, 1, is_prefill=True, target=target))
    return work


def _measure(report: measurement.Report) -> None:
    if unknown := set(_RIVALS.value) - {*_RIVAL_NAMES, ""}:
        raise ConfigError(f"rivals has {', '.join(sorted(unknown))}; there are {', '.join(_RIVAL_NAMES)}")
    work = _work()
    contenders: dict[Key, Contender] = {}
    try:
        absent, vocab_size = _open_all(report, contenders, work)
        rng = np.random.default_rng(0)
        for one in work:
            timings = _take_turns(report, one, contenders, rng, vocab_size)
            _tell(report, one, timings, absent)
    finally:
        for contender in contenders.values():
            contender.close()


def _open_all(
    report: measurement.Report, contenders: dict[Key, Contender], work: list[Work]
) -> tuple[dict[Key, str], int]:
    """Fills `contenders`; returns who is absent with the reason, and the vocabulary's size."""
    config = engine_config()
    limits = {
        "max_num_seqs": config.max_num_seqs or max(one.batch for one in work),
        "max_model_len": config.max_model_len or max(one.prompt_len + one.output_len for one in work),
    }
    vllm = {"python": _VLLM_PYTHON.value, "eager": _VLLM_EAGER.value}
    absent: dict[Key, str] = {}
    for dtype in _DTYPES.value:
        report.console.print(f"loading jaxkv ({dtype}) ...")
        jaxkv = JaxkvContender(dataclasses.replace(config, dtype=dtype, **limits))
        contenders["jaxkv", dtype] = jaxkv
        for name in filter(None, _RIVALS.value):
            report.console.print(f"loading {name} ({dtype}) ...")
            try:
                rival = open_rival(name, config.model, dtype, vllm=vllm, **limits)
            except measurement.AbsentError as error:
                absent[name, dtype] = str(error)
            else:
                contenders[name, dtype] = rival
    return absent, jaxkv.vocab_size


def _take_turns(
    report: measurement.Report, work: Work, contenders: dict[Key, Contender], rng: np.random.Generator, vocab_size: int
) -> dict[Key, list[Timing]]:
    timings: dict[Key, list[Timing]] = {key: [] for key in contenders}
    for run in range((1 if flags.FLAGS.quick else _RUNS.value) + 1):
        prompts = rng.integers(3, vocab_size, (work.batch, work.prompt_len)).tolist()
        for (name, dtype), contender in contenders.items():
            gc.collect()  # one's garbage is not collected in another's turn
            time.sleep(_SETTLE_S)
            timing = contender.generate(prompts, work.output_len)
            if run > 0:  # the first warms up
                timings[name, dtype].append(timing)
            report.console.print(f"{work.name} {dtype} {name}: {timing.seconds:.2f} s", highlight=False)
    return timings


def _tell(report: measurement.Report, work: Work, timings: dict[Key, list[Timing]], absent: dict[Key, str]) -> None:
    """Results of one row, then its ratios: in each dtype, and best dtype against best dtype."""
    results: dict[Key, dict[str, Any]] = {}
    for (name, dtype), taken in timings.items():
        results[name, dtype] = report.add(
            f"{work.name} {dtype} {name}",
            [work.rate(timing) for timing in taken],
            unit=work.unit,
            metric="throughput",
            engine=name,
            dtype=dtype,
            batch=work.batch,
            cpu_seconds=statistics.median(timing.cpu_seconds for timing in taken),
        )
    for (name, dtype), reason in absent.items():
        report.skip(f"{work.name} {dtype} {name}", reason, engine=name, dtype=dtype, batch=work.batch)
    for (name, dtype), result in results.items():
        if name != "jaxkv":
            target = work.target if (name, dtype) == ("transformers", "float32") else None
            report.ratio(f"{work.name} {dtype}: jaxkv / {name}", results["jaxkv", dtype], result, target=target)
    best: dict[str, dict[str, Any]] = {}
    for (name, _), result in results.items():
        if name not in best or result["value"] > best[name]["value"]:
            best[name] = result
    if len(_DTYPES.value) > 1:
        for name, result in best.items():
            if name != "jaxkv":
                pair = f"jaxkv ({best['jaxkv']['dtype']}) / {name} ({result['dtype']})"
                report.ratio(f"{work.name} best dtypes: {pair}", best["jaxkv"], result, target=None)


if __name__ == "__main__":
    measurement.run("bench_throughput", _config, _measure)
