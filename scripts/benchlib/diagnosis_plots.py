"""Pictures of a diagnosis and of a run: lost tokens and gains; each request's time from arrival to end."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

from benchlib.diagnosis_tables import caller_rows
from jaxkv.core.request_record import RequestRecord
from jaxkv.insight.causes import Cause
from jaxkv.insight.diagnosis import Diagnosis

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402  (the backend is chosen first)

_MOST_CALLERS = 12
_COLOURS = dict(zip(Cause, pyplot.get_cmap("tab10").colors))


def plot_diagnosis(diagnosis: Diagnosis, path: Path) -> None:
    """Left, tokens by caller and cause; right, hit rates without and with each remedy."""
    rows = caller_rows(diagnosis)[:_MOST_CALLERS][::-1]
    gains = [f for f in diagnosis.findings if f.gain is not None][::-1]
    height = 1.5 + 0.45 * max(len(rows), len(gains), 3)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(14, height), layout="constrained")
    names = [str(row["caller"] or "-") for row in rows]
    ends = [0] * len(rows)
    parts = [("found", "0.85", [row["cached"] for row in rows])]
    parts += [(c.value.replace("_", " "), _COLOURS[c], [row["causes"][c.value] for row in rows]) for c in Cause]
    for name, colour, lengths in parts:
        if any(lengths):
            left.barh(range(len(rows)), lengths, left=ends, color=colour, label=name)
            ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    left.set(title="prompt tokens by caller", xlabel="tokens", yticks=range(len(rows)), yticklabels=names)
    figure.legend(loc="outside lower left", ncols=6, frameon=False)
    for place, finding in enumerate(gains):
        before, after = 100 * finding.gain.before, 100 * finding.gain.after
        right.plot([before, after], [place, place], color="0.7", zorder=1)
        right.scatter([before], [place], color="0.5", zorder=2)
        right.scatter([after], [place], color="tab:green", zorder=2)
        right.annotate(f"{after:.0f} %", (after, place), xytext=(6, -4), textcoords="offset points")
    labels = [f"{f.cause.replace('_', ' ')}: {f.callers[0][0] or 'all'}" for f in gains]
    right.set(
        title="hit rate of all, as it is and with each remedy alone (replayed)", xlabel="% of prompt tokens found"
    )
    right.set(xlim=(0, 105), yticks=range(len(gains)), yticklabels=labels)
    right.set_ylim(-0.6, max(len(gains), 1) - 0.4)
    right.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def plot_timeline(records: Sequence[RequestRecord], path: Path) -> None:
    """A line a request, by caller and then arrival: queue, prefill and decode; before it a square, the brighter the more of
    the prompt was cached; behind it a cross if it was preempted."""
    ordered = sorted(records, key=lambda record: (record.caller or "-", record.arrival))
    callers = list(dict.fromkeys(record.caller or "-" for record in ordered))
    start = min(record.arrival for record in ordered)
    figure, axes = pyplot.subplots(figsize=(13, 2 + min(0.13 * len(ordered), 14)), layout="constrained")
    spans = {"queue": "0.8", "prefill": "tab:orange", "decode": "tab:blue"}
    ends = [record.arrival - start for record in ordered]
    axes.set_axisbelow(True)
    axes.grid(axis="x", alpha=0.3)
    for name, colour in spans.items():
        lengths = [getattr(record, name) or 0.0 for record in ordered]
        axes.barh(range(len(ordered)), lengths, left=ends, height=0.85, color=colour, label=name)
        ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    preempted = [place for place, record in enumerate(ordered) if record.preemptions]
    axes.scatter([ends[place] for place in preempted], preempted, marker="x", color="black", s=25, label="preempted")
    arrivals = [record.arrival - start for record in ordered]
    rates = [record.cached_tokens / record.prompt_tokens if record.prompt_tokens else 0.0 for record in ordered]
    squares = axes.scatter(arrivals, range(len(ordered)), c=rates, cmap="viridis", vmin=0, vmax=1, marker="s", s=18)
    firsts = [next(i for i, record in enumerate(ordered) if (record.caller or "-") == caller) for caller in callers]
    for first in firsts[1:]:
        axes.axhline(first - 0.5, color="0.4", linewidth=0.6)
    axes.set(
        yticks=firsts, yticklabels=callers, ylim=(len(ordered) - 0.5, -0.5), xlabel="seconds since the first arrival"
    )
    axes.set_title("requests by caller, in order of arrival")
    figure.legend(loc="outside lower left", ncols=4, frameon=False)
    figure.colorbar(squares, ax=axes, label="share of the prompt cached (square)", shrink=min(1, 40 / len(ordered)))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
