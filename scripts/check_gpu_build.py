#!/usr/bin/env python
"""The GPU kernels' machine code and the executor's step functions, compiled for GPUs on a machine without one.

    python scripts/check_gpu_build.py                                   # all kernels for all targets, and the steps for one
    python scripts/check_gpu_build.py --targets=h200 --kernels=decode --no-steps
    python scripts/check_gpu_build.py --kernels= --step_models=llama-3-8b

Nothing runs on a GPU: registers, spills, shared memory, loads and instructions are what the compiler says, held against
pallas_kernels/gpu_budgets.toml. Needs jax's CUDA plugin, ptxas and nvdisasm (pip install -e '.[gpu-build]').
"""

import os
import pathlib
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"  # the targets are described, not found; before jax looks for devices

from absl import flags
from gpulib import kernel_configs
from gpulib.budgets import load_budgets, violations
from gpulib.deviceless import missing
from gpulib.step_programs import BUCKETS, MODELS, build_step
from gpulib.targets import TARGETS
from rich.table import Table

from jaxkv import measurement
from jaxkv.core.errors import ConfigError

_TARGETS = flags.DEFINE_list("targets", list(TARGETS), "GPUs to compile the kernels for.")
_KERNELS = flags.DEFINE_list("kernels", ["all"], "Beginnings of kernel config names, or all; empty: none.")
_STEPS = flags.DEFINE_bool("steps", True, "Compile prefill_step and decode_steps too.")
_STEP_TARGET = flags.DEFINE_enum("step_target", "h200", TARGETS, "GPU to compile the step functions for.")
_STEP_MODELS = flags.DEFINE_list(
    "step_models", list(MODELS), "Models whose step functions are compiled; /2: half of two."
)
_STEP_FORMATS = flags.DEFINE_list("step_formats", ["bfloat16", "int8"], "KV formats of the step functions.")
_IMPLEMENTATION = flags.DEFINE_string(
    "implementation", "pallas_triton", "Attention implementation of the step functions."
)
_KEEP = flags.DEFINE_string("keep", None, "Keep PTX, HLO and thunks in this folder.")

# Figures of the table and their headings there; the JSON has all of them (see gpulib.inventory.FIGURES).
_SHOWN = {
    "registers": "regs",
    "spilled": "spill",
    "shared_memory": "smem",
    "cp_async_16": "cp16",
    "cp_async_narrow": "cp<16",
    "loads_16": "ld16",
    "mma": "mma",
    "wgmma": "wgmma",
    "byte_lds": "lds8",
    "int_to_float": "i2f",
    "tf32": "tf32",
    "loop_instructions": "loop",
}


def _config() -> dict:
    names = "targets kernels steps step_target step_models step_formats implementation keep quick".split()
    return {name: flags.FLAGS[name].value for name in names}


def _chosen(name: str, known) -> list[str]:
    values = flags.FLAGS[name].value
    if unknown := [value for value in values if value not in known]:
        raise ConfigError(f"{name} has {', '.join(unknown)}; there are: {', '.join(known)}")
    return values


def _kernels() -> list[str]:
    wanted = _KERNELS.value
    for start in wanted:
        if start != "all" and not any(name.startswith(start) for name in kernel_configs.CONFIGS):
            raise ConfigError(f"kernels has {start}; there are: {', '.join(kernel_configs.CONFIGS)}")
    return [name for name in kernel_configs.CONFIGS if "all" in wanted or name.startswith(tuple(wanted))]


def _measure(report: measurement.Report) -> None:
    targets, kernels = _chosen("targets", TARGETS), _kernels()
    models, formats = _chosen("step_models", MODELS), _chosen("step_formats", ("bfloat16", "int8"))
    if absent := missing():
        raise measurement.AbsentError(absent)
    if flags.FLAGS.quick:
        targets, kernels, models, formats = targets[-1:], kernels[:1], models[:1], formats[:1]
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(_KEEP.value or scratch)
        _check_kernels(report, kernels, targets, folder)
        if _STEPS.value:
            _check_steps(report, [(model, kv_format) for model in models for kv_format in formats], folder)


def _check_kernels(report: measurement.Report, kernels: list[str], targets: list[str], folder: pathlib.Path) -> None:
    budgets = load_budgets()
    table = Table()
    table.add_column("kernel", no_wrap=True)
    for heading in ("target", *_SHOWN.values(), "a KV byte"):
        table.add_column(heading, justify="right")
    for name in kernels:
        for target in targets:
            figures = kernel_configs.measure(name, target, folder / name.replace("/", "_") / target)
            budget = budgets.get(name)
            problems = violations(figures, budget, target) if budget else [f"no budget in gpu_budgets.toml: {figures}"]
            report.check(f"{name} on {target}", problems)
            report.add(
                name, [figures["registers"]], unit="registers", metric="registers", engine=target, figures=figures
            )
            a_byte = figures.get("loop_instructions_per_kv_byte")
            cells = [str(figures[figure]) for figure in _SHOWN] + ["" if a_byte is None else f"{a_byte:.4f}"]
            table.add_row(name, target, *cells, style="red" if problems else None)
    if kernels:
        report.console.print(table)


def _check_steps(report: measurement.Report, steps: list[tuple[str, str]], folder: pathlib.Path) -> None:
    target = _STEP_TARGET.value
    table = Table("step", "cache GB", "aliased GB", "temp MB", "launches", "a layer", "graphs", "outside graphs")
    for model, kv_format in steps:
        for kind in BUCKETS:
            name = f"{kind}/{model}/{kv_format}"
            dump = folder / name.replace("/", "_")
            step = build_step(MODELS[model], kv_format, kind, target, dump, _IMPLEMENTATION.value)
            report.check(f"{name} on {target}", step.problems)
            a_layer = sum(step.launches_per_layer.values())
            report.add(
                name,
                [step.temporary_bytes],
                unit="bytes",
                metric="temporaries",
                engine=target,
                cache_bytes=step.cache_bytes,
                aliased_bytes=step.aliased_bytes,
                launches=len(step.launches),
                launches_per_layer=step.launches_per_layer,
                graphs=step.graphs,
                outside_graphs=step.outside_graphs,
            )
            sizes = (step.cache_bytes / 1e9, step.aliased_bytes / 1e9, step.temporary_bytes / 1e6)
            counts = (str(len(step.launches)), f"{a_layer:.1f}", str(step.graphs), str(step.outside_graphs))
            table.add_row(name, *(f"{size:.1f}" for size in sizes), *counts, style="red" if step.problems else None)
    report.console.print(table)


if __name__ == "__main__":
    measurement.run("check_gpu_build", _config, _measure)
