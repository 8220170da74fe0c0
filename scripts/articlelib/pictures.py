"""Curves of what was measured, one picture for each measurement that has some."""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

Values = dict[str, Any]


def draw_all(folder: pathlib.Path, values: dict[str, Values]) -> list[str]:
    """Draws what there is a picture for; returns the files' names. `values`: by the measurement's name."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, of_part in values.items():
        draw = next((draw for start, draw in _PICTURES.items() if name.startswith(start)), None)
        if draw is not None:
            path = folder / (name.replace(",", "").replace(" ", "_") + ".png")
            _draw(path, name, draw, of_part)
            files.append(str(path))
    return files


def _draw(path: pathlib.Path, title: str, draw: Callable, values: Values) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    draw(axes, values)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def _without_cache(axes, values: Values) -> None:
    for name in ("uncached", "cached"):
        axes.plot(values["lengths"], values[name], "o-", label=f"whole generation, {name}")
    axes.plot(
        values["lengths"], [values["ttft_uncached"]] * len(values["lengths"]), "k:", label="first token, uncached"
    )
    axes.set(xscale="log", yscale="log", xlabel="generated tokens", ylabel="seconds")
    axes.legend()


def _block_sizes_hits(axes, values: Values) -> None:
    for name, rates in values["hit_rates"].items():
        axes.plot(values["block_sizes"], rates, "o-", label=f"shared {name.replace('_', ' ')}")
    axes.set(xscale="log", xlabel="block_size", ylabel="hit rate", xticks=values["block_sizes"])
    axes.set_xticklabels(values["block_sizes"])
    axes.minorticks_off()
    axes.legend()


def _block_sizes_speed(axes, values: Values) -> None:
    axes.plot(values["block_sizes"], values["tokens_per_second"], "o-", label="tokens/s")
    axes.set(xlabel="block_size", ylabel="tokens/s", ylim=(0, None))
    waste = axes.twinx()
    waste.plot(values["block_sizes"], values["waste_share"], "s--", color="tab:red", label="empty share")
    waste.set(ylabel="empty share of the blocks", ylim=(0, None))
    lines = [*axes.get_lines(), *waste.get_lines()]
    axes.legend(lines, [line.get_label() for line in lines])


def _goodput(axes, values: Values) -> None:
    axes.plot(values["hit_rates"], values["goodput"], "o-")
    axes.set(xlabel="hit rate", ylabel="requests/s within both limits", ylim=(0, None))


def _bars(axes, names: Sequence[str], parts: dict[str, Sequence[float]], ylabel: str) -> None:
    bottom = [0.0] * len(names)
    for label, heights in parts.items():
        axes.bar(names, heights, bottom=bottom, label=label)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    axes.set(ylabel=ylabel)
    axes.legend()


def _queueing(axes, values: Values) -> None:
    names = list(values["runs"])
    parts = {part: [values["runs"][name][part] for name in names] for part in ("queue", "prefill", "decode")}
    _bars(axes, names, parts, "mean seconds of a request")
    axes.set(xlabel="max_num_seqs")


def _two_changes(axes, values: Values) -> None:
    for shift, (label, one) in zip((-0.2, 0.2), values.items(), strict=True):
        names = list(one["runs"])
        rates = [one["runs"][name]["hit_rate"] for name in names]
        axes.bar([i + shift for i in range(len(names))], rates, 0.4, label=f"{label}, {one['load']:.1f} requests/s")
    axes.set_xticks(range(len(names)), names)
    axes.set(xlabel="gpu_memory_utilization, max_num_seqs", ylabel="hit rate")
    axes.margins(y=0.25)  # room for the legend
    axes.legend()


def _rounds(axes, values: Values) -> None:
    names = list(values["rounds"])
    axes.plot(names, [values["rounds"][name]["requests_per_second"] for name in names], "o-", label="requests/s")
    axes.set(ylabel="requests/s under overload", ylim=(0, None))
    ttft = axes.twinx()
    ttft.plot(names, [values["rounds"][name]["ttft"] for name in names], "s--", color="tab:red", label="TTFT")
    ttft.set(ylabel="TTFT in seconds", ylim=(0, None))
    lines = [*axes.get_lines(), *ttft.get_lines()]
    axes.legend(lines, [line.get_label() for line in lines])


def _three_steps(axes, values: Values) -> None:
    rates = values["requests_per_second"]
    axes.bar(list(rates), list(rates.values()))
    axes.set(ylabel="requests/s under overload")


def _memory(axes, values: Values) -> None:
    for name, curve in values["curves"].items():
        lengths = sorted(curve, key=int)
        axes.plot([int(n) for n in lengths], [curve[n] / 2**30 for n in lengths], "o-", label=name)
    axes.set(xlabel="tokens", ylabel="KV held, GiB", ylim=(0, None))
    axes.legend()


def _hidden_tail(axes, values: Values) -> None:
    rows = {"all": values["all"]} | values["caller"] | values["prompt length"] | values["interval"]
    places = range(len(rows))
    axes.bar([i - 0.2 for i in places], [one["hit_rate"] for one in rows.values()], 0.4, label="hit rate")
    axes.set(ylabel="hit rate", ylim=(0, 1))
    axes.set_xticks(list(places), list(rows), rotation=30, ha="right")
    slow = axes.twinx()
    slow.bar(
        [i + 0.2 for i in places], [one["ttft_p50"] for one in rows.values()], 0.4, color="tab:red", label="TTFT P50"
    )
    slow.set(ylabel="TTFT P50 in seconds")
    bars = [*axes.containers, *slow.containers]
    axes.legend(bars, [bar.get_label() for bar in bars])


_PICTURES: dict[str, Callable] = {
    "without a cache": _without_cache,
    "hit rate by block size": _block_sizes_hits,
    "throughput by block size": _block_sizes_speed,
    "goodput by hit rate": _goodput,
    "queueing": _queueing,
    "two changes": _two_changes,
    "rounds": _rounds,
    "three steps": _three_steps,
    "memory by length": _memory,
    "hidden tail": _hidden_tail,
}
"""By the beginning of the measurement's name."""
