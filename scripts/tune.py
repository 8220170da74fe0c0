#!/usr/bin/env python
"""Which settings serve a traffic best: searched in simulation, checked on traffic that the search did not see.

    python scripts/tune.py                                     # made-up conversations, Llama-2-7B on an A100-40G
    python scripts/tune.py --trace=requests.jsonl --model=./Llama-3.1-8B --device=a100-80g --ttft_limit=0.5
    python scripts/tune.py --trace=mooncake_conversation.jsonl.gz --model=llama-3-8b --device=h200 --plot=tuned.png
    python scripts/tune.py --kv_cache_dtypes= --block_sizes=16,32 --max_num_seqs=64    # what may change; the start

The score of a setting is its goodput: the highest rate of requests at which --goal_share of them still meet the limits
on TTFT and ITL, found by replaying the trace faster or slower; with --speed, requests a second that meet them at that
one speed. Each replay runs the engine's own scheduler and block manager in the pool that its own memory plan gives the
setting, on the roofline of --model on --device, or on --cost_model, a file of scripts/calibrate_cost_model.py.

The search takes the first half of the trace: coordinate descent from what the engine would take by itself and the
engine flags given here. The second half then serves the default and the recommended setting, each with an empty cache.
"""

import os

from absl import flags, logging

from jaxkv import measurement
from jaxkv.control.eviction_choice import EVICTION_POLICIES
from jaxkv.core.devices import DEVICES
from jaxkv.core.errors import ConfigError
from jaxkv.flags import define_engine_flags, engine_config
from jaxkv.simulation.synthetic_traces import SYNTHETIC_SHAPES

_TRACE = flags.DEFINE_string("trace", None, "File of requests, plain or gzipped; unset makes up a trace.")
_SYNTHETIC = flags.DEFINE_enum("synthetic", "conversations", SYNTHETIC_SHAPES, "Shape of the made-up trace.")
_TRACE_BLOCK_SIZE = flags.DEFINE_integer("trace_block_size", None, "Tokens of an id; unset: what fits all rows.", 1)
_REQUESTS = flags.DEFINE_integer("num_requests", 1000, "Use the first so many: half to search, half to check.", 4)
_SCALE = flags.DEFINE_integer(
    "scale",
    1,
    "Prompts, outputs and shared blocks are so many times shorter: a big model's traffic for a small one.",
    1,
)
_DEVICE = flags.DEFINE_string(
    "device", "a100-40g", f"One of {', '.join(DEVICES)}; detect: this machine's, with cost_model."
)
_COST_MODEL = flags.DEFINE_string("cost_model", None, "File of calibrate_cost_model.py instead of the roofline.")
_TTFT_LIMIT = flags.DEFINE_float("ttft_limit", 1.0, "Most seconds to a request's first token.")
_ITL_LIMIT = flags.DEFINE_float("itl_limit", 0.1, "Most seconds a token after it, on average over a request.")
_GOAL_SHARE = flags.DEFINE_float("goal_share", 0.95, "Share of the requests that is to meet both limits.")
_SPEED = flags.DEFINE_float(
    "speed", None, "Requests arrive so many times as fast; unset: the highest rate is searched."
)
_MIN_GAIN = flags.DEFINE_float(
    "min_gain", 0.02, "A change that raises the goodput by less than this share is not made."
)
_SEARCHED = "Searched; empty: as the flags say or the engine chooses."
_KV_CACHE_DTYPES = flags.DEFINE_list(
    "kv_cache_dtypes", ["int8"], f"Formats that may be recommended beside the default. {_SEARCHED}"
)
_UTILIZATIONS = flags.DEFINE_list(
    "gpu_memory_utilizations", ["0.85", "0.9", "0.93"], f"Above that, little is left for what no plan sees. {_SEARCHED}"
)
_ROWS = flags.DEFINE_list("numbers_of_seqs", ["16", "32", "64", "128", "256", "512"], f"max_num_seqs. {_SEARCHED}")
_BUDGETS = flags.DEFINE_list(
    "numbers_of_batched_tokens",
    ["512", "1024", "2048", "4096", "8192", "16384"],
    f"max_num_batched_tokens. {_SEARCHED}",
)
_BLOCK_SIZES = flags.DEFINE_list("block_sizes", ["16", "32", "64", "128"], _SEARCHED)
_POLICIES = flags.DEFINE_list("eviction_policies", list(EVICTION_POLICIES), _SEARCHED)
_DECODE_STEPS = flags.DEFINE_list("numbers_of_decode_steps", ["0", "1", "2", "4", "8"], f"decode_steps. {_SEARCHED}")
_PROCESSES = flags.DEFINE_integer("processes", os.cpu_count(), "Replays side by side.", 1)
_CHECK_REAL = flags.DEFINE_bool(
    "check_real", False, "Serve the second half for real too, on this machine (device detect), with both settings."
)
_REAL_REQUESTS = flags.DEFINE_integer("real_requests", 60, "With check_real: so many of the second half.", 2)
_PLOT = flags.DEFINE_string("plot", None, "Write curves to this PNG; needs matplotlib (pip install -e '.[plot]').")
define_engine_flags(model="llama-2-7b")

_QUICK_REQUESTS, _QUICK_VALUES = 160, 2


def _config() -> dict:
    own = "trace synthetic trace_block_size num_requests scale device cost_model ttft_limit itl_limit goal_share speed"
    searched = "min_gain kv_cache_dtypes gpu_memory_utilizations numbers_of_seqs numbers_of_batched_tokens block_sizes"
    names = (
        *own.split(),
        *searched.split(),
        "eviction_policies",
        "numbers_of_decode_steps",
        "processes",
        "check_real",
        "real_requests",
    )
    return {name: flags.FLAGS[name].value for name in (*names, "plot", "quick")} | vars(engine_config())


def _space() -> dict[str, list]:
    """Values to try of each setting."""
    kinds = (
        ("kv_cache_dtype", _KV_CACHE_DTYPES, str),
        ("gpu_memory_utilization", _UTILIZATIONS, float),
        ("max_num_seqs", _ROWS, int),
        ("max_num_batched_tokens", _BUDGETS, int),
        ("block_size", _BLOCK_SIZES, int),
        ("eviction_policy", _POLICIES, str),
        ("decode_steps", _DECODE_STEPS, int),
    )
    space = {}
    for name, flag, kind in kinds:
        try:
            values = [kind(value) for value in flag.value]
        except ValueError:
            what = "whole numbers" if kind is int else "numbers"
            raise ConfigError(
                f"{flag.name} is {','.join(flag.value)!r}; it must be {what}, separated by commas"
            ) from None
        if values:
            space[name] = values[:_QUICK_VALUES] if flags.FLAGS.quick else values
    return space


def _check_flags() -> None:
    for flag in (_TTFT_LIMIT, _ITL_LIMIT, _SPEED):
        if flag.value is not None and not flag.value > 0:
            raise ConfigError(f"{flag.name} is {flag.value}; it must be above 0")
    if not 0 < _GOAL_SHARE.value <= 1:
        raise ConfigError(f"goal_share is {_GOAL_SHARE.value}; it must be above 0 and at most 1")
    if not 0 <= _MIN_GAIN.value < 1:
        raise ConfigError(f"min_gain is {_MIN_GAIN.value}; it must be from 0 to less than 1")
    if _DEVICE.value not in (*DEVICES, "detect"):
        raise ConfigError(f"device is {_DEVICE.value!r}; it must be one of {', '.join((*DEVICES, 'detect'))}")
    if _CHECK_REAL.value and _DEVICE.value != "detect":
        raise ConfigError(f"check_real is set, but device is {_DEVICE.value!r}: only detect, this machine, can serve")
    measurement.check_plot(_PLOT.value)


def _measure(report: measurement.Report) -> None:
    _check_flags()
    space = _space()
    # Worker processes import this file: what brings jax must not come with it.
    from benchlib.tuning_run import Wanted, tune

    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # every plan tells which kernels it would take
    wanted = Wanted(
        trace=_TRACE.value,
        synthetic=_SYNTHETIC.value,
        trace_block_size=_TRACE_BLOCK_SIZE.value,
        num_requests=min(_QUICK_REQUESTS, _REQUESTS.value) if flags.FLAGS.quick else _REQUESTS.value,
        scale=_SCALE.value,
        device=_DEVICE.value,
        cost_model=_COST_MODEL.value,
        limits=(_TTFT_LIMIT.value, _ITL_LIMIT.value),
        goal_share=_GOAL_SHARE.value,
        speed=_SPEED.value,
        min_gain=_MIN_GAIN.value,
        max_sweeps=1 if flags.FLAGS.quick else 4,
        processes=_PROCESSES.value,
        check_real=_CHECK_REAL.value,
        real_requests=_REAL_REQUESTS.value,
        plot=_PLOT.value,
    )
    tune(report, wanted, engine_config(), space)


if __name__ == "__main__":
    measurement.run("tune", _config, _measure, timed=False)
