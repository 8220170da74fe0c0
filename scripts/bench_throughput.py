#!/usr/bin/env python
"""Tokens a second of jaxkv beside other engines on the same weights, dtype and machine, in one run.

    python scripts/bench_throughput.py                      # demo model, prompt 128, output 128, batches 1 and 8
    python scripts/bench_throughput.py --batch_sizes=1,8,16 --dtypes=float32,bfloat16
    python scripts/bench_throughput.py --rivals=            # jaxkv alone

Greedy, end-of-sequence ignored. The engines take turns, run by run, so that a noisy machine hurts them alike.
"""

import gc
import time
from collections.abc import Callable

import numpy as np
from absl import flags

from jaxkv import measurement
from jaxkv.core.errors import ConfigError

_MODEL = flags.DEFINE_string("model", "demo", "As for serve.py.")
_DTYPES = flags.DEFINE_list("dtypes", ["float32"], "Weights' dtypes to compare in.")
_BATCHES = flags.DEFINE_list("batch_sizes", ["1", "8"], "Concurrent requests.")
_PROMPT = flags.DEFINE_integer("prompt_len", 128, "Prompt tokens a request.", lower_bound=1)
_OUTPUT = flags.DEFINE_integer("output_len", 128, "New tokens a request.", lower_bound=1)
_PREFILL = flags.DEFINE_integer("prefill_len", 512, "Prompt of the prefill measurement; 0 leaves it out.", lower_bound=0)
_RUNS = flags.DEFINE_integer("runs", 3, "Counted runs of each; one more warms up.", lower_bound=1)
_RIVALS = flags.DEFINE_list("rivals", ["transformers"], "Engines to compare with: transformers (its generate).")

# Seconds that one batch of prompts takes to produce output_len tokens each.
Engine = Callable[[list[list[int]], int], float]


def _config() -> dict:
    names = ("model", "dtypes", "batch_sizes", "prompt_len", "output_len", "prefill_len", "runs", "rivals", "quick")
    return {name: flags.FLAGS[name].value for name in names}


def _jaxkv(dtype: str, batch: int) -> tuple[Engine, int]:
    """An engine on jaxkv, and the vocabulary's size."""
    from jaxkv import LLM, SamplingParams

    longest = max(_PROMPT.value + _OUTPUT.value, _PREFILL.value + 1)
    llm = LLM(
        model=_MODEL.value, dtype=dtype, max_num_seqs=batch, max_model_len=longest, enable_prefix_caching=False
    )

    def generate(prompts: list[list[int]], output_len: int) -> float:
        sampling = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        begin = time.perf_counter()
        outputs = llm.generate(prompts, sampling)
        seconds = time.perf_counter() - begin
        assert all(len(output.token_ids) == output_len for output in outputs)
        return seconds

    return generate, llm.started.model_config.vocab_size


def _transformers(dtype: str) -> Engine:
    try:
        import torch
    except ImportError:
        raise ImportError("torch is not installed (pip install -e '.[oracle]')") from None
    import transformers

    from jaxkv.loading.resolve import resolve_model
    from jaxkv.loading.weights import open_tensors

    source = resolve_model(_MODEL.value)
    folder, gguf_file = (source.path.parent, source.path.name) if source.kind == "gguf" else (source.path, None)
    config = transformers.AutoConfig.from_pretrained(folder, gguf_file=gguf_file)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    tensors = open_tensors(source)
    weights = {name: torch.from_numpy(tensors.read(name, np.dtype("float32"))) for name in tensors.names()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    model.eval()

    def generate(prompts: list[list[int]], output_len: int) -> float:
        ids = torch.tensor(prompts)
        begin = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=output_len,
                min_new_tokens=output_len,
                do_sample=False,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - begin
        assert out.shape[1] == ids.shape[1] + output_len
        return seconds

    return generate


def _measure(report: measurement.Report) -> None:
    try:
        batches = [int(batch) for batch in _BATCHES.value]
    except ValueError:
        raise ConfigError(f"batch_sizes is {','.join(_BATCHES.value)!r}; it must be whole numbers, e.g. 1,8") from None
    if unknown := set(_RIVALS.value) - {"transformers", ""}:
        raise ConfigError(f"rivals has {', '.join(sorted(unknown))}; there is: transformers")
    for dtype in _DTYPES.value:
        _measure_dtype(report, dtype, batches)


def _measure_dtype(report: measurement.Report, dtype: str, batches: list[int]) -> None:
    rng = np.random.default_rng(0)
    engines: dict[str, Engine] = {}
    report.console.print(f"loading jaxkv ({dtype}) ...")
    engines["jaxkv"], vocab_size = _jaxkv(dtype, max(batches))
    missing = {}
    if "transformers" in _RIVALS.value:
        report.console.print(f"loading transformers ({dtype}) ...")
        try:
            engines["transformers"] = _transformers(dtype)
        except ImportError as error:
            missing["transformers"] = str(error)

    runs = 1 if flags.FLAGS.quick else _RUNS.value
    output_len = min(_OUTPUT.value, 16) if flags.FLAGS.quick else _OUTPUT.value
    work = [(f"decode batch {batch}", batch, _PROMPT.value, output_len) for batch in batches]
    if _PREFILL.value:
        work.append((f"prefill {_PREFILL.value}", 1, _PREFILL.value, 1))
    for name, batch, prompt_len, new_tokens in work:
        seconds: dict[str, list[float]] = {engine: [] for engine in engines}
        for run in range(runs + 1):
            prompts = rng.integers(3, vocab_size, (batch, prompt_len)).tolist()
            for engine, generate in engines.items():
                taken = generate(prompts, new_tokens)
                if run > 0:  # the first warms up
                    seconds[engine].append(taken)
                report.console.print(f"{name} {dtype} {engine}: {taken:.2f} s", highlight=False)
        results = {}
        for engine, taken in seconds.items():
            is_prefill = name.startswith("prefill")
            rates = [1 / t for t in taken] if is_prefill else [batch * new_tokens / t for t in taken]
            unit = "prompts/s" if is_prefill else "tokens/s"
            results[engine] = report.add(
                f"{name} {dtype} {engine}", rates, unit=unit, metric="throughput", engine=engine, dtype=dtype, batch=batch
            )
        for engine, reason in missing.items():
            report.skip(f"{name} {dtype} {engine}", reason, engine=engine, dtype=dtype, batch=batch)
        for engine in engines:
            if engine != "jaxkv":
                report.ratio(f"{name} {dtype}: jaxkv / {engine}", results["jaxkv"], results[engine], target=None)
    engines.clear()
    gc.collect()


if __name__ == "__main__":
    measurement.run("bench_throughput", _config, _measure)
