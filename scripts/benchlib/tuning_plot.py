"""Curves of a tuning."""

from benchlib.kv_format_costs import kl_of
from benchlib.tuning_evaluation import Found
from benchlib.tuning_tables import Tuned
from jaxkv.core.errors import ConfigError
from jaxkv.simulation.tuning import Trial


def draw(path: str, tuned: Tuned) -> None:
    """What each change brought, what was tried, and the share of requests within the limits by rate."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 5), layout="constrained")
    rounds, front, rates = figure.subplots(1, 3)
    _draw_rounds(rounds, tuned)
    _draw_front(front, tuned)
    _draw_rates(rates, tuned)
    figure.suptitle(f"{tuned.planner.trace.name}, {tuned.model} on {tuned.planner.device.name}")
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"plot is {path!r}, which cannot be written: {error.strerror}") from error


def _draw_rounds(axes, tuned: Tuned) -> None:
    names = [
        "default",
        *("\n".join(f"{name}\n{value}" for name, value in step.changes.items()) for step in tuned.steps),
    ]
    outcomes = [tuned.default.outcome, *(step.outcome for step in tuned.steps)]
    axes.bar(names, [outcome.score for outcome in outcomes], color="tab:blue", label="goodput")
    axes.tick_params(axis="x", labelrotation=45, labelsize=8)
    axes.set(ylabel="goodput (requests/s)", title="one change at a time")
    beside = axes.twinx()
    beside.plot(names, [outcome.details.reference.hit_rate for outcome in outcomes], "o-", color="tab:green")
    beside.set(ylabel="hit rate (green)", ylim=(0, 1))


def _draw_front(axes, tuned: Tuned) -> None:
    def places(trials: list[Trial]) -> tuple:
        return tuple(zip(*[(one.outcome.details.reference.ttft_p95, one.outcome.score) for one in trials], strict=True))

    axes.scatter(*places(tuned.front), s=90, facecolors="none", edgecolors="black", label="best in something")
    for name in dict.fromkeys(trial.setting["kv_cache_dtype"] for trial in tuned.trials):
        trials = [trial for trial in tuned.trials if trial.setting["kv_cache_dtype"] == name]
        axes.scatter(*places(trials), s=24, label=f"{name}, KL {kl_of(str(name)):.1e}")
    axes.set(
        xlabel="P95 of TTFT at the rate of the first (s)", ylabel="goodput (requests/s)", title="settings measured"
    )
    axes.legend()
    axes.grid(alpha=0.3)


def _draw_rates(axes, tuned: Tuned) -> None:
    for name, outcome in zip(("default", "recommended"), tuned.held_out, strict=True):
        result: Found = outcome.details
        points = [(served.speed * result.rate, served.attained) for served in result.replays]
        axes.plot(*zip(*points, strict=True), "o-", label=name)
    axes.axhline(tuned.goal.share, color="grey", linestyle="--")
    axes.set(xlabel="requests/s", ylabel="share within the limits", title="held-out half", ylim=(0, 1.02))
    axes.legend()
    axes.grid(alpha=0.3)
