"""The engine on a GPU, with random weights made there: tokens, memory, recompilation, throughput. A process of gpu_check.py.

    python -m benchlib.engine_check --implementation=pallas_triton

Two engines run one after the other on the same weights and prompts, the second on XLA's attention. Rounding differs, so
their tokens may part where two tokens are almost equally likely, and only there.
"""

import dataclasses
import functools
import gc
import os
import time
from typing import Any

import numpy as np
from absl import flags

from benchlib.partial_report import save
from benchlib.token_parity import Told, compare_tokens
from jaxkv import measurement
from jaxkv.control.engine import Engine
from jaxkv.core.config import EngineConfig
from jaxkv.core.model_config import ModelConfig, RopeConfig
from jaxkv.core.progress import SilentProgress
from jaxkv.core.request import Request, RequestOutput, SamplingParams

_IMPLEMENTATION = flags.DEFINE_string("implementation", "pallas_triton", "The attention that is checked.")
_KV_DTYPE = flags.DEFINE_string("kv_cache_dtype", "auto", "Stored KV format.")
_SMALL = flags.DEFINE_bool("small", False, "A tiny model and few tokens: for the interpreter.")

# Llama-3.2-1B.
_1B = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_layers": 16,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 64,
}
_TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
}
# Share of the GPU: less than all, so that a budget that is overrun shows as such and not as a full card.
_UTILIZATION = 0.5
# Tokens of nearly equal likelihood: natural log. Sixteen layers of bfloat16 move a log-probability by some hundredths.
_NEAR_TIE = {"bfloat16": 0.25, "float32": 2e-3}
# The budget is kept within this share.
_BUDGET = 0.98


@dataclasses.dataclass(frozen=True)
class Load:
    """Prompts, and what is measured."""

    prompt_lens: tuple[int, ...] = (1, 15, 63, 64, 65, 128, 300, 1000, 2100, 4000)
    output_len: int = 48
    rows: int = 64
    rate_prompt_len: int = 512
    rate_output_len: int = 128

    def small(self) -> "Load":
        return Load((1, 17, 40), 6, 2, 16, 8)


def _model_config(small: bool) -> ModelConfig:
    shape = _TINY if small else _1B
    return ModelConfig(
        architecture="LlamaForCausalLM",
        rms_norm_eps=1e-5,
        max_position_embeddings=8192,
        rope=RopeConfig(theta=500_000.0),
        window_sizes=(None,) * shape["num_layers"],
        tie_word_embeddings=True,
        **shape,
    )


def _engine_config(implementation: str, small: bool) -> EngineConfig:
    limits = {"max_model_len": 8192, "max_num_seqs": 64, "max_num_batched_tokens": 2048, "block_size": 64}
    if small:
        limits = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 16}
        limits |= {"num_gpu_blocks_override": 64}
    return EngineConfig(
        model="random",
        attention_implementation=implementation,
        kv_cache_dtype=_KV_DTYPE.value,
        gpu_memory_utilization=_UTILIZATION,
        compilation_cache_dir="",
        **limits,
    )


def _random_model(config: ModelConfig, max_model_len: int, dtype: str) -> Any:
    """Weights drawn on the device, one jitted call a shape. Queries and keys are large, so that attention picks few tokens
    and a wrong key shows; so are embeddings, which are the head too, so that logits spread."""
    import jax
    from flax import nnx

    from jaxkv.execution.programs import abstract_model

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def draw(key, shape, gain):
        return (gain * shape[-1] ** -0.5 * jax.random.normal(key, shape, "float32")).astype(dtype)

    def weight(path: tuple, key, shape: tuple[int, ...]):
        name = ".".join(map(str, path))
        if "norm" in name:
            return jax.numpy.ones(shape, dtype)
        return draw(key, shape, 2.0 if "q_proj" in name or "k_proj" in name or "embed" in name else 1.0)

    graph, state = nnx.split(abstract_model(config, dtype=dtype, max_model_len=max_model_len))
    flat = list(nnx.to_flat_state(state))
    keys = jax.random.split(jax.random.key(0), len(flat))
    made = [
        (path, v.replace(weight(path, key, v.get_value().shape))) for key, (path, v) in zip(keys, flat, strict=True)
    ]
    return nnx.merge(graph, nnx.from_flat_state(made))


def _build(implementation: str, small: bool):
    from jaxkv.startup import build_engine  # brings jax

    config, model_config = _engine_config(implementation, small), _model_config(small)

    def load(dtype: str) -> Any:
        return _random_model(model_config, config.max_model_len, dtype)

    return build_engine(config, model_config, load, origin="random", progress=SilentProgress())


def _step(engine: Engine) -> list[RequestOutput]:
    """One step; raises where the engine failed."""
    outputs = engine.step()
    if engine.failed is not None:
        raise RuntimeError(f"the engine failed: {engine.failed}")
    return outputs


def _greedy(built, load: Load) -> Told:
    """All prompts at once; each token with the likeliest two."""
    rng = np.random.default_rng(0)
    vocab_size = built.engine.scheduler.config.vocab_size
    sampling = SamplingParams(temperature=0.0, max_tokens=load.output_len, ignore_eos=True, logprobs=2)
    told: Told = {}
    for length in load.prompt_lens:
        built.engine.add(Request(str(length), tuple(rng.integers(0, vocab_size, length).tolist()), sampling))
    while built.engine.has_work():
        for output in _step(built.engine):
            told[output.request_id] = told.get(output.request_id, ()) + (output.logprobs or ())
    return told


def _tokens_a_second(built, load: Load, rows: int) -> float:
    """Of decode alone: from when all rows have their first token to the last one's end."""
    rng = np.random.default_rng(1)
    engine = built.engine
    vocab_size = engine.scheduler.config.vocab_size
    sampling = SamplingParams(temperature=0.0, max_tokens=load.rate_output_len, ignore_eos=True)
    waiting = set()
    for i in range(rows):
        prompt = tuple(rng.integers(0, vocab_size, load.rate_prompt_len).tolist())
        engine.add(Request(f"rate{rows}-{i}", prompt, sampling))
        waiting.add(f"rate{rows}-{i}")
    begin, counted = None, 0
    while engine.has_work():
        outputs = _step(engine)
        if begin is not None:
            counted += sum(len(output.token_ids) for output in outputs)
        waiting -= {output.request_id for output in outputs if output.token_ids}
        if begin is None and not waiting:
            begin = time.perf_counter()
    return counted / (time.perf_counter() - begin)


def _measure(report: measurement.Report) -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(_UTILIZATION))  # before the backend runs
    import jax

    small, implementation = _SMALL.value, _IMPLEMENTATION.value
    load = Load().small() if small else Load()
    device = jax.local_devices()[0]
    before = (device.memory_stats() or {}).get("bytes_in_use", 0)
    report.console.print(f"engine on {implementation}: compiling ...", highlight=False)
    built = _build(implementation, small)
    dtype, details = built.config.dtype, {"engine": implementation, "kv_cache_dtype": built.config.kv_cache_dtype}
    report.add("engine start", [built.warm_up.seconds], unit="s", metric="start", **details)
    from jaxkv.execution import compile_watch

    compiled_before = compile_watch.compiled_here()
    ours = _greedy(built, load)
    for rows in (1, load.rows):
        rate = _tokens_a_second(built, load, rows)
        report.add(f"decode, {rows} rows", [rate], unit="tokens/s", metric="throughput", rows=rows, **details)
        save(report)
    compiled = compile_watch.compiled_here() - compiled_before
    report.add("compiled after the start", [compiled], unit="executables", metric="recompiles", **details)
    runs = [
        report.add(f"runs {what}", [n], unit="runs", metric="runs", **details)
        for what, n in (("without a compilation", int(compiled == 0)), ("watched", 1))
    ]
    report.ratio("steady state compiles nothing", *runs, target=1.0)
    if stats := device.memory_stats():
        budget = report.add("memory budget", [built.memory.available / 1e9], unit="GB", metric="memory", **details)
        peak = report.add(
            "memory peak", [(stats["peak_bytes_in_use"] - before) / 1e9], unit="GB", metric="memory", **details
        )
        report.ratio("memory: budget / peak", budget, peak, target=_BUDGET)
        report.ratio("memory: peak / budget", peak, budget, target=_BUDGET)
        save(report)
    del built
    gc.collect()  # its weights and cache make room for the other's
    report.console.print("engine on xla: compiling ...", highlight=False)
    other = _build("xla", small)
    theirs = _greedy(other, load)
    rate = _tokens_a_second(other, load, load.rows)
    report.add(f"decode, {load.rows} rows", [rate], unit="tokens/s", metric="throughput", rows=load.rows, engine="xla")
    right, equal, wrong = compare_tokens(ours, theirs, _NEAR_TIE[dtype])
    for text in wrong:
        report.console.print(text, highlight=False)
    total = sum(map(len, ours.values()))
    report.add("tokens until the texts part", [equal], unit=f"of {total}", metric="tokens", **details)
    passed = report.add("requests with XLA's tokens", [right], unit="requests", metric="right", **details)
    asked = report.add("requests", [len(ours)], unit="requests", metric="requests", **details)
    report.ratio("requests with XLA's tokens, or parted at a near tie", passed, asked, target=1.0)


if __name__ == "__main__":
    config = lambda: {"implementation": _IMPLEMENTATION.value, "small": _SMALL.value}  # noqa: E731
    measurement.run("engine_check", config, _measure)
