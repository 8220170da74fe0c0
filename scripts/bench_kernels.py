#!/usr/bin/env python
"""How fast the kernels are beside what the device can do: time, GB/s, share of the copy bandwidth, TFLOP/s.

    python scripts/bench_kernels.py                     # on a GPU: the points that have targets
    python scripts/bench_kernels.py --points=full       # the whole grid
    python scripts/bench_kernels.py --rehearse          # tiny shapes on any device, to see that the program works

First comes the roofline card: bytes, FLOPs and the floor that follows from a measured copy and matrix product; then the
kernels and their rivals in turns. Without a GPU nothing is measured: the card and the times that the cost formula predicts
for an H200 are printed, and marked as predictions.
"""

import dataclasses
import statistics
import time
from typing import Any

from absl import flags
from benchlib import roofline
from benchlib.kernel_tables import card, measured_table
from benchlib.partial_report import save
from benchlib.roofline import H200, CascadePoint, DecodePoint, Point, PrefillPoint, Rates

from jaxkv import measurement
from jaxkv.core.errors import ConfigError

SECTIONS = ["decode", "prefill", "cascade", "kv_write"]
_SECTIONS = flags.DEFINE_list("sections", SECTIONS, f"What to measure: {', '.join(SECTIONS)}.")
_POINTS = flags.DEFINE_enum("points", "acceptance", ("acceptance", "full"), "Those with targets, or the whole grid.")
_IMPLEMENTATION = flags.DEFINE_string("implementation", None, "Ours: pallas_triton unless told; xla when rehearsing.")
_RIVALS = flags.DEFINE_list(
    "rivals", None, "jax_pallas, cudnn_paged, cudnn_dense, torch_sdpa, torch_flex (slow to compile)."
)
_BLOCK_SIZE = flags.DEFINE_integer("block_size", 64, "Tokens a KV block.", lower_bound=16)
_ROUNDS = flags.DEFINE_integer("rounds", 7, "Counted runs of each.", lower_bound=1)
_DEADLINE = flags.DEFINE_float("deadline_s", 0.0, "Begin no further point after so many seconds; 0: no limit.")
_REHEARSE = flags.DEFINE_bool("rehearse", False, "Measure tiny shapes on whatever device there is; nothing is judged.")

# What a kernel must reach on an H200.
_OF_COPY = {(8, 32768): 0.88, (64, 8192): 0.88}
_INT8_SPEEDUP = 1.6
_ONE_ROW_SECONDS = 50e-6
_PREFILL_FLOPS = 300e12
_CASCADE_SPEEDUP = 2.0

_TINY = roofline.Heads("tiny", 4, 2, 64)
_REHEARSAL: dict[str, tuple[Point, ...]] = {
    "decode": tuple(DecodePoint(_TINY, 2, 128, kv_format) for kv_format in roofline.KV_FORMATS),
    "prefill": tuple(PrefillPoint(_TINY, 32, 64, kv_format) for kv_format in roofline.KV_FORMATS),
    "cascade": tuple(CascadePoint(_TINY, 4, 64, 64, kv_format) for kv_format in roofline.KV_FORMATS),
    "kv_write": tuple(roofline.WritePoint(_TINY, 16, kv_format) for kv_format in roofline.KV_FORMATS),
}


def _config() -> dict[str, Any]:
    if unknown := set(_SECTIONS.value) - set(SECTIONS):
        raise ConfigError(f"sections has {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    names = (
        "sections",
        "points",
        "implementation",
        "rivals",
        "block_size",
        "rounds",
        "deadline_s",
        "rehearse",
        "quick",
    )
    return {name: flags.FLAGS[name].value for name in names}


def _points() -> dict[str, tuple[Point, ...]]:
    sets = _REHEARSAL if _REHEARSE.value else roofline.FULL if _POINTS.value == "full" else roofline.ACCEPTANCE
    return {section: sets[section] for section in _SECTIONS.value}


def _measure(report: measurement.Report) -> None:
    import jax

    device = jax.devices()[0]
    if device.platform == "gpu" or _REHEARSE.value:
        _measure_here(report, device)
        return
    if _IMPLEMENTATION.value:
        raise measurement.AbsentError(
            f"{_IMPLEMENTATION.value} cannot be timed: there is no GPU (--rehearse runs it small)"
        )
    _predict(report)


def _predict(report: measurement.Report) -> None:
    points = _points()
    report.console.print(card(points, H200, "an H200, by what such cards were measured at"))
    for section, chosen in points.items():
        for point in chosen:
            details = {"engine": "formula", "predicted": True, **_counted(point, H200)}
            report.add(f"{section} {point}", [1e6 * point.predict(H200)], unit="us", metric="predicted_time", **details)
    report.console.print(
        "Nothing was measured: there is no GPU here. The times are the formula's, and no target is judged."
    )


def _measure_here(report: measurement.Report, device) -> None:
    from benchlib import kernel_rivals
    from benchlib.kernel_points import AGREES, How, first_line, measure, too_large
    from benchlib.kernel_timing import COLD_BYTES, LOOP_SECONDS, measure_ceilings

    if unknown := set(_RIVALS.value or ()) - set(kernel_rivals.ALL):
        raise ConfigError(f"rivals has {', '.join(sorted(unknown))}; there are {', '.join(kernel_rivals.ALL)}")
    on_gpu, small = device.platform == "gpu", _REHEARSE.value
    ceilings = measure_ceilings(2**20 if small else 2**32, 128 if small else 8192)
    copy = report.add("copy", [ceilings.copy / 1e9], unit="GB/s", metric="bandwidth", engine="ceiling")
    report.add("read", [ceilings.read / 1e9], unit="GB/s", metric="bandwidth", engine="ceiling")
    report.add("matmul", [ceilings.matmul / 1e12], unit="TFLOP/s", metric="rate", engine="ceiling")
    rates = dataclasses.replace(H200, copy=ceilings.copy, matmul=ceilings.matmul)
    points = _points()
    report.console.print(card(points, rates, f"{device.device_kind}, measured"))
    how = How(
        implementation=_IMPLEMENTATION.value or ("pallas_triton" if on_gpu else "xla"),
        rivals=tuple(kernel_rivals.DEFAULT if _RIVALS.value is None else _RIVALS.value),
        rounds=2 if flags.FLAGS.quick or small else _ROUNDS.value,
        block_size=_BLOCK_SIZE.value,
        rates=rates,
        memory=(device.memory_stats() or {}).get("bytes_limit", 4 * 2**30),
        loop_seconds=LOOP_SECONDS if on_gpu else 1e-6,
        cold_bytes=COLD_BYTES if on_gpu else 1,
    )
    judged = "H200" in device.device_kind and not small and not flags.FLAGS.quick
    begin, right, wanted, times = time.monotonic(), 0, 0, {}
    for section, chosen in points.items():
        rows = []
        for point in chosen:
            name = f"{section} {point}"
            if reason := too_large(point, how):
                report.skip(name, reason, engine=how.implementation)
                continue
            if 0 < _DEADLINE.value < time.monotonic() - begin:
                report.skip(name, f"not begun within {_DEADLINE.value:.0f} s", engine=how.implementation)
                continue
            report.console.print(f"{name} ...", highlight=False)
            wanted += 1
            try:
                measured = measure(point, how)
            except Exception as error:  # one kernel that fails must not hide the others' numbers
                report.skip(name, first_line(error), engine=how.implementation)
                continue
            for engine, seconds in measured.seconds.items():
                times[point, engine] = _add_times(report, name, point, engine, seconds, rates)
            for engine, reason in measured.absent.items():
                report.skip(name, reason, engine=engine)
            right += measured.error is not None and measured.error <= AGREES
            report.add(f"{name} error", [measured.error], unit="relative", metric="error", engine=how.implementation)
            rows.append((point, measured))
            for engine in measured.seconds:
                if engine != how.implementation:
                    report.ratio(
                        f"{name}: {engine} time / ours",
                        times[point, engine],
                        times[point, how.implementation],
                        target=_CASCADE_SPEEDUP if judged and _is_cascade_target(point, engine) else None,
                    )
            save(report)
        report.console.print(measured_table(section, rows, rates))
    _judge(report, times, copy, how.implementation, judged)
    if wanted:
        agreeing = report.add(
            "points that agree with XLA", [right], unit="points", metric="right", engine=how.implementation
        )
        begun = report.add("points begun", [wanted], unit="points", metric="begun", engine=how.implementation)
        report.ratio("points that agree with XLA", agreeing, begun, target=1.0)
    if not on_gpu:
        report.console.print("A rehearsal on a CPU: the times mean nothing, and no target is judged.")


def _add_times(
    report: measurement.Report, name: str, point: Point, engine: str, seconds: list[float], rates: Rates
) -> dict[str, Any]:
    counted = _counted(point, rates)
    work, middle = point.work, statistics.median(seconds)
    details = {"engine": engine, "kv_format": point.kv_format, **counted, "tflops": work.flops / middle / 1e12}
    details |= {"gb_per_s": work.num_bytes / middle / 1e9, "of_copy": work.num_bytes / middle / rates.copy}
    return report.add(name, [1e6 * s for s in seconds], unit="us", metric="time", **details)


def _counted(point: Point, rates: Rates) -> dict[str, float]:
    work = point.work
    return {
        "bytes": work.num_bytes,
        "flops": work.flops,
        "floor_us": 1e6 * work.floor(rates),
        "predicted_us": 1e6 * point.predict(rates),
    }


def _is_cascade_target(point: Point, engine: str) -> bool:
    return isinstance(point, CascadePoint) and engine == "flat" and point.kv_format == "bfloat16"


def _judge(report: measurement.Report, times: dict, copy: dict[str, Any], ours: str, judged: bool) -> None:
    """The targets, as ratios that are at least 1, or at least the share."""
    for (point, engine), result in list(times.items()):
        if engine != ours:
            continue
        if isinstance(point, DecodePoint) and point.kv_format == "bfloat16":
            reached = report.add(
                f"decode {point} bandwidth", [result["gb_per_s"]], unit="GB/s", metric="bandwidth", engine=ours
            )
            target = _OF_COPY.get((point.batch, point.context)) if point.heads is roofline.LLAMA_3_8B else None
            report.ratio(f"decode {point}: bandwidth / copy", reached, copy, target=target if judged else None)
            if quantized := times.get((dataclasses.replace(point, kv_format="int8"), ours)):
                target = _INT8_SPEEDUP if target else None
                report.ratio(f"decode {point}: time / int8 time", result, quantized, target=target if judged else None)
            if point == DecodePoint(roofline.LLAMA_3_8B, 1, 32768, "bfloat16"):
                _within(report, f"decode {point}", 1e6 * _ONE_ROW_SECONDS, result, judged)
        if isinstance(point, PrefillPoint) and point == roofline.PREFILL[0]:
            _within(report, f"prefill {point}", 1e6 * point.work.flops / _PREFILL_FLOPS, result, judged)


def _within(report: measurement.Report, name: str, microseconds: float, result: dict[str, Any], judged: bool) -> None:
    allowed = report.add(f"{name} allowed", [microseconds], unit="us", metric="time", engine="target")
    report.ratio(f"{name}: allowed / time", allowed, result, target=1.0 if judged else None)


if __name__ == "__main__":
    measurement.run("bench_kernels", _config, _measure)
