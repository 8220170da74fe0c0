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
from matplotlib.colors import Normalize  # noqa: E402

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
    """A line a request, by caller and then arrival: queue, prefill (the greener, the more was cached), decode; a cross
    at the end of those that were preempted."""
    callers = sorted({record.caller or "-" for record in records})
    ordered = sorted(records, key=lambda record: (record.caller or "-", record.arrival))
    start = min(record.arrival for record in ordered)
    figure, axes = pyplot.subplots(figsize=(13, 2 + min(0.13 * len(ordered), 14)), layout="constrained")
    colours, hit = pyplot.get_cmap("RdYlGn"), Normalize(0, 1)
    for place, record in enumerate(ordered):
        at = record.arrival - start
        rate = record.cached_tokens / record.prompt_tokens if record.prompt_tokens else 0.0
        spans = ((record.queue, "0.75"), (record.prefill, colours(hit(rate))), (record.decode, "tab:blue"))
        for seconds, colour in spans:
            if seconds is not None:
                axes.barh(place, seconds, left=at, height=0.8, color=colour)
                at += seconds
        if record.preemptions:
            axes.plot([at], [place], marker="x", color="black", markersize=5)
    firsts = [next(i for i, record in enumerate(ordered) if (record.caller or "-") == caller) for caller in callers]
    for first in firsts[1:]:
        axes.axhline(first - 0.5, color="0.4", linewidth=0.6)
    axes.set(
        yticks=firsts, yticklabels=callers, xlabel="seconds since the first arrival", ylim=(len(ordered) - 0.5, -0.5)
    )
    axes.set_title("requests by caller: queue, prefill, decode")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in ("0.75", "tab:blue")]
    handles.append(axes.plot([], [], marker="x", color="black", linestyle="")[0])
    axes.legend(handles, ["queue", "decode", "preempted"], loc="upper left", bbox_to_anchor=(0, -0.04), ncols=3)
    figure.colorbar(matplotlib.cm.ScalarMappable(hit, colours), ax=axes, label="prefill: share of the prompt cached")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
