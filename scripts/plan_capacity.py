#!/usr/bin/env python
"""What fits, before anything runs: weights, KV bytes, tokens in the cache and requests at once, for GPUs not here.

    python scripts/plan_capacity.py                                            # two known shapes on three GPUs
    python scripts/plan_capacity.py --model=config.json --device=a100-40g --plot=capacity.png
    python scripts/plan_capacity.py --model=llama-3-8b --device=h200 --shards=2 --lengths=4096,8192
    python scripts/plan_capacity.py --model=demo --device=detect --temporaries=compiler

Needs a config.json and nothing else: no weights, no GPU, no network. It is the engine's own plan: the lines of one
model on one device are those that the engine writes at start with the same flags. Until a compiler has told the
biggest temporary the plan has a lower bound of it, and the cache is at most so large.
"""

import dataclasses

import jax
from absl import flags, logging
from articlelib.judge_capacity import verdicts
from benchlib.capacity_points import Planner
from benchlib.capacity_tables import draw, tell_formats, tell_start_lines, tell_sweep
from benchlib.find_device import this_machine
from benchlib.model_shapes import SHAPES, find_shape
from gpulib.deviceless import missing
from gpulib.step_programs import biggest_temporary
from rich.table import Table

from jaxkv import measurement
from jaxkv.capacity import Temporaries
from jaxkv.core.config import EngineConfig
from jaxkv.core.errors import ConfigError
from jaxkv.core.model_config import ModelConfig
from jaxkv.core.progress import SilentProgress
from jaxkv.device import DEVICES, Device
from jaxkv.execution.programs import Programs
from jaxkv.flags import define_engine_flags, engine_config
from pallas_kernels.kv_format import FORMATS

_DEVICE = flags.DEFINE_list(
    "device", ["a100-80g", "a100-40g", "h200"], f"Some of {', '.join(DEVICES)}; detect: this machine's, a CPU too."
)
_SHARDS = flags.DEFINE_integer("shards", 1, "Devices that share the model; the plan is that of one of them.", 1)
_LENGTHS = flags.DEFINE_list("lengths", ["512", "2048", "8192"], "Tokens a request: how many run at once is told.")
_TEMPORARIES = flags.DEFINE_enum(
    "temporaries",
    "lower_bound",
    ("lower_bound", "compiler"),
    "Where the biggest temporary comes from. The compiler takes minutes for each setting of a large model, and needs "
    "jax's CUDA plugin for a GPU that is not here.",
)
_SWEPT = "Swept with one model on one device, and in the plot; empty: not."
_UTILIZATIONS = flags.DEFINE_list("gpu_memory_utilizations", ["0.8", "0.85", "0.9", "0.95", "0.98"], _SWEPT)
_BLOCK_SIZES = flags.DEFINE_list("block_sizes", ["16", "32", "64", "128"], _SWEPT)
_ROWS = flags.DEFINE_list("numbers_of_seqs", ["16", "64", "256", "1024"], f"Values of max_num_seqs. {_SWEPT}")
_SHARD_COUNTS = flags.DEFINE_list("shard_counts", ["1", "2", "4", "8"], f"Values of shards. {_SWEPT}")
_KV_CACHE_DTYPES = flags.DEFINE_list("kv_cache_dtypes", list(FORMATS), "Compared; empty: only what the flags ask for.")
_ARTICLES = flags.DEFINE_bool("articles", None, "Two articles' figures beside ours; unset: where no model is named.")
_PLOT = flags.DEFINE_string("plot", None, "Write curves to this PNG; needs matplotlib (pip install -e '.[plot]').")
define_engine_flags(model=None)

# How gpulib describes them to the compiler.
_TARGETS = {"h200": "h200", "h100": "h100", "a100-80g": "a100", "a100-40g": "a100"}


def _config() -> dict:
    own = "device shards lengths temporaries gpu_memory_utilizations block_sizes numbers_of_seqs shard_counts"
    names = (*own.split(), "kv_cache_dtypes", "articles", "plot", "quick")
    return {name: flags.FLAGS[name].value for name in names} | dataclasses.asdict(engine_config())


def _numbers(name: str, kind: type, least: float) -> list:
    values = flags.FLAGS[name].value
    try:
        numbers = [kind(value) for value in values]
    except ValueError:
        numbers = [least - 1]
    if not all(number >= least for number in numbers):
        what = "whole numbers" if kind is int else "numbers"
        raise ConfigError(f"{name} is {','.join(values)!r}; it must be {what} from {least}, separated by commas")
    return list(dict.fromkeys(numbers))


def _sweeps() -> dict[str, list]:
    """Values of each setting."""
    quick = 1 if flags.FLAGS.quick else None
    sweeps = {
        "gpu_memory_utilization": _numbers("gpu_memory_utilizations", float, 0),
        "block_size": _numbers("block_sizes", int, 1),
        "max_num_seqs": _numbers("numbers_of_seqs", int, 1),
        "shards": _numbers("shard_counts", int, 1),
        "kv_cache_dtype": list(dict.fromkeys(_KV_CACHE_DTYPES.value)),
    }
    return {name: values[:quick] for name, values in sweeps.items()}


def _check_flags() -> None:
    devices = (*DEVICES, "detect")
    if not _DEVICE.value or not set(_DEVICE.value) <= set(devices):
        raise ConfigError(f"device is {','.join(_DEVICE.value)!r}; it must be some of {', '.join(devices)}")
    if unknown := [name for name in _KV_CACHE_DTYPES.value if name not in FORMATS]:
        raise ConfigError(f"kv_cache_dtypes has {', '.join(unknown)}; there are: {', '.join(FORMATS)}")
    measurement.check_plot(_PLOT.value)
    if _TEMPORARIES.value == "compiler":
        if unknown := [name for name in _DEVICE.value if name not in (*_TARGETS, "detect")]:
            known = ", ".join((*_TARGETS, "detect"))
            raise ConfigError(f"temporaries is compiler, and none is set up for device {unknown[0]}, only for {known}")
        if _DEVICE.value != ["detect"] and (absent := missing()):
            raise measurement.AbsentError(f"temporaries is compiler: {absent}")


def _models(config: EngineConfig) -> dict[str, ModelConfig]:
    """By name: see `find_shape`."""
    if config.model is None:
        return dict(SHAPES)
    name, shape = find_shape(config)
    return {name: shape}


def _devices() -> tuple[dict[str, Device], dict[str, int]]:
    """Devices by name, and the bytes that are free of those that are CPUs."""
    devices = {name: DEVICES[name] for name in _DEVICE.value if name != "detect"}
    if "detect" not in _DEVICE.value:
        jax.config.update("jax_platforms", "cpu")  # a GPU that is here is not asked, and nothing of it taken
        return devices, {}
    found, free = this_machine()
    devices[found.name] = found
    return devices, {} if free is None else {found.name: free}


def _asks_compiler(compiled: dict, device: Device) -> Temporaries:
    """Each set of step functions is compiled once, whatever the number of blocks.

    That matters little: where the pool leaves XLA no memory by its reckoning it computes some things twice to save
    some, 664 MiB instead of 728 for Llama-2-7B on an A100-80G with the pool of utilization 0.9 or a small one.
    """
    target = _TARGETS.get(device.name)

    def ask(programs: Programs) -> int:
        shapes = programs.shapes
        key = dataclasses.replace(shapes, limits=dataclasses.replace(shapes.limits, num_blocks=0)), target
        if key not in compiled:
            if target is not None:
                compiled[key] = biggest_temporary(programs, target)
            else:
                programs.start(SilentProgress(), programs.largest())
                compiled[key] = programs.temporaries()
                programs.stop()
        return compiled[key]

    return ask


def _measure(report: measurement.Report) -> None:
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # every plan tells which kernels it would take
    config = engine_config()
    lengths, sweeps = _numbers("lengths", int, 1), _sweeps()
    _check_flags()
    models = _models(config)
    devices, available = _devices()
    compiled: dict = {}
    compiler = (lambda device: _asks_compiler(compiled, device)) if _TEMPORARIES.value == "compiler" else None
    planner = Planner(config, models, devices, _SHARDS.value, available, compiler)
    pairs = [(model, device) for model in models for device in devices]
    tell_formats(report, planner, pairs, sweeps["kv_cache_dtype"], lengths)
    if len(pairs) == 1:
        (pair,) = pairs
        tell_start_lines(report, planner, pair)
        for name, values in sweeps.items():
            if name != "kv_cache_dtype":
                tell_sweep(report, planner, pair, name, values, lengths)
    if _ARTICLES.value or (_ARTICLES.value is None and config.model is None):
        _tell_articles(report)
    if _PLOT.value is not None:
        try:
            draw(_PLOT.value, planner, pairs, sweeps, lengths)
        except OSError as error:
            raise ConfigError(f"plot is {_PLOT.value!r}, which cannot be written: {error.strerror}") from error
        report.files.append(_PLOT.value)


def _tell_articles(report: measurement.Report) -> None:
    table = Table(title="What two articles say of capacity", show_lines=True)
    for heading in ("claim", "what", "claimed", "ours", "verdict", "why"):
        table.add_column(heading)
    for verdict in verdicts(SHAPES["llama-2-7b"], SHAPES["llama-3-8b"]):
        row = dataclasses.asdict(verdict)
        numbers = row.pop("numbers")
        table.add_row(*row.values(), style="yellow" if verdict.verdict == "refuted" else None)
        report.add(f"{verdict.claim}: {verdict.what}", numbers[:1], unit="", metric="article", engine="plan", **row)
    report.console.print(table)


if __name__ == "__main__":
    measurement.run("plan_capacity", _config, _measure, timed=False)
