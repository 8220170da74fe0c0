#!/usr/bin/env python
"""A trace through the real scheduler and block manager in simulated time: latencies, hit rate, preemptions, use.

    python scripts/replay_trace.py --trace=mooncake_conversation.jsonl.gz            # an endless cache
    python scripts/replay_trace.py --trace=requests.jsonl --model=llama-3-8b --device=a100-80g --capacity_blocks=device
    python scripts/replay_trace.py --trace=azure.csv --speed=2 --max_num_seqs=64 --plot=replay.png
    python scripts/replay_trace.py --trace=mooncake_conversation.jsonl.gz --serial --capacity_blocks=10000 --policy=lfu

Traces: Mooncake, Qwen-Bailian (JSON lines with hash_ids), Azure (CSV of lengths), and the request log of scripts/serve.py.
Needs no weights and no GPU. A step takes what the roofline of --model on --device says, or what --cost_model, a file of
scripts/calibrate_cost_model.py, measured. Beside it stands the serial hit rate: the same engine, one request at a time,
no output, whole blocks only; it is what a cache of this size can give when nothing else takes its blocks.
"""

import dataclasses

import jax
from absl import flags, logging
from benchlib.replay_report import draw, tell_latencies, told
from benchlib.replay_setup import DEVICE_POOL, set_up
from rich.progress import Progress

from jaxkv import measurement
from jaxkv.core.config import EngineConfig
from jaxkv.core.devices import DEVICES
from jaxkv.core.errors import ConfigError
from jaxkv.flags import define_engine_flags, engine_config
from jaxkv.simulation.block_replay import OPT, replay_blocks
from jaxkv.simulation.replay import replay
from jaxkv.simulation.serial_replay import replay_serially
from jaxkv.simulation.synthetic_traces import SYNTHETIC_SHAPES, synthetic_trace
from jaxkv.simulation.trace_requests import known_sequences, trace_requests
from jaxkv.simulation.traces import Trace, read_trace

_TRACE = flags.DEFINE_string("trace", None, "File of requests, plain or gzipped; unset makes up a trace.")
_SYNTHETIC = flags.DEFINE_enum("synthetic", "conversations", SYNTHETIC_SHAPES, "Shape of the made-up trace.")
_TRACE_BLOCK_SIZE = flags.DEFINE_integer("trace_block_size", None, "Tokens of an id; unset: what fits all rows.", 1)
_REQUESTS = flags.DEFINE_integer("num_requests", None, "Use the first so many; unset: all, or 1000 made up.", 1)
_SPEED = flags.DEFINE_float("speed", 1.0, "Requests arrive so many times as fast.")
_DEVICE = flags.DEFINE_enum("device", "h200", tuple(DEVICES), "What the roofline is of.")
_COST_MODEL = flags.DEFINE_string("cost_model", None, "File of calibrate_cost_model.py instead of the roofline.")
_CAPACITY = flags.DEFINE_string(
    "capacity_blocks", None, f"Blocks in the pool, or {DEVICE_POOL}: what the engine would have there. Unset: endless."
)
_POLICY = flags.DEFINE_string(
    "policy", None, f"The same as eviction_policy; with serial also {OPT}, Belady's, which knows the future."
)
_LEAF_ONLY = flags.DEFINE_bool("leaf_only", False, "With policy fifo: a block stays while one that continues it does.")
_FULL_BLOCKS_ONLY = flags.DEFINE_bool(
    "full_blocks_only", True, "A prompt's last, partial block is nobody else's; otherwise it counts as a full one."
)
_SERIAL = flags.DEFINE_bool("serial", False, "Only the serial hit rate.")
_PLOT = flags.DEFINE_string("plot", None, "Write curves to this PNG; needs matplotlib (pip install -e '.[plot]').")
define_engine_flags(model="llama-3-8b")

_QUICK_REQUESTS = 50
_RATES = ("block_hit_rate", "token_hit_rate")  # six digits, as in reference tables


def _config() -> dict:
    own = "trace synthetic trace_block_size num_requests speed device cost_model capacity_blocks policy leaf_only"
    names = (*own.split(), "full_blocks_only", "serial", "plot", "quick")
    return {name: flags.FLAGS[name].value for name in names} | dataclasses.asdict(engine_config())


def _policy(config: EngineConfig) -> str:
    if _POLICY.value is not None and flags.FLAGS["eviction_policy"].present:
        raise ConfigError(
            f"policy is {_POLICY.value!r} and eviction_policy {config.eviction_policy!r}: they are one setting, give one"
        )
    policy = _POLICY.value or config.eviction_policy
    if policy == OPT:
        if not _SERIAL.value or _CAPACITY.value == DEVICE_POOL:
            raise ConfigError(
                f"policy is {OPT!r}, which knows the future, and no engine does: add --serial, with a number as capacity_blocks"
            )
        policy = config.eviction_policy  # of the engine that is set up, but not run
    if not _LEAF_ONLY.value or policy == "fifo_leaves":
        return policy
    if policy != "fifo":
        raise ConfigError(f"leaf_only is set, but policy is {policy!r}: only fifo has that variant")
    return "fifo_leaves"


def _capacity() -> int | str | None:
    if _CAPACITY.value in (None, DEVICE_POOL):
        return _CAPACITY.value
    if not _CAPACITY.value.isdecimal():
        raise ConfigError(f"capacity_blocks is {_CAPACITY.value!r}; it must be a number of blocks or {DEVICE_POOL}")
    return int(_CAPACITY.value)


def _open_trace() -> Trace:
    count = _QUICK_REQUESTS if flags.FLAGS.quick else _REQUESTS.value
    if _TRACE.value is None:
        return synthetic_trace(_SYNTHETIC.value, count or 1000)
    return read_trace(_TRACE.value, block_size=_TRACE_BLOCK_SIZE.value, limit=count)


def _measure(report: measurement.Report) -> None:
    jax.config.update("jax_platforms", "cpu")  # a GPU that is here is not asked, and nothing of it taken
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)
    if not _SPEED.value > 0:
        raise ConfigError(f"speed is {_SPEED.value}; it must be above 0")
    measurement.check_plot(_PLOT.value)
    config = engine_config()
    config = dataclasses.replace(config, eviction_policy=_policy(config))
    trace = _open_trace()
    setup = set_up(
        config,
        trace,
        device=_DEVICE.value,
        cost_model=_COST_MODEL.value,
        capacity_blocks=_capacity(),
        full_blocks_only=_FULL_BLOCKS_ONLY.value,
    )
    block_size, count = setup.limits.block_size, len(trace.requests)
    report.console.print(f"{count:,} requests, blocks of {block_size} tokens; {setup.cost}", highlight=False)
    if not _SERIAL.value:
        with Progress(console=report.console, disable=report.console.quiet) as bar:
            task = bar.add_task("replay", total=count)
            requests = trace_requests(trace, block_size, full_blocks_only=_FULL_BLOCKS_ONLY.value, speed=_SPEED.value)
            outcome = replay(
                requests,
                setup.limits,
                setup.cost_model,
                setup.scheduler,
                sequences=known_sequences(trace),
                on_ended=lambda ended: bar.update(task, completed=ended),
            )
        tell_latencies(report, trace, setup, outcome)
        if _PLOT.value is not None:
            draw(_PLOT.value, trace, outcome)
            report.files.append(_PLOT.value)
    elif _PLOT.value is not None:
        raise ConfigError("plot is set, but serial has no times to draw: leave one out")
    if trace.block_size is None:
        if _SERIAL.value:
            raise ConfigError(f"{trace.name} has no hash_ids, so nothing is known of shared prefixes: drop --serial")
        return
    with Progress(console=report.console, disable=report.console.quiet) as bar:
        task = bar.add_task("serial hit rate", total=count)
        if _POLICY.value == OPT:
            serial = replay_blocks(trace, OPT, setup.capacity_blocks, full_blocks_only=_FULL_BLOCKS_ONLY.value)
        else:
            serial = replay_serially(
                trace,
                setup.scheduler.eviction_policy,
                setup.capacity_blocks,
                block_size=block_size,
                full_blocks_only=_FULL_BLOCKS_ONLY.value,
                on_ended=lambda ended: bar.update(task, completed=ended),
            )
    row = dataclasses.asdict(serial) | {name: round(getattr(serial, name), 6) for name in _RATES}
    report.add(
        "serial hit rate", [serial.block_hit_rate], unit="hits/block", metric="block_hit_rate", engine="serial", **row
    )
    report.console.print(told(serial), highlight=False)


if __name__ == "__main__":
    measurement.run("replay_trace", _config, _measure, timed=False)
