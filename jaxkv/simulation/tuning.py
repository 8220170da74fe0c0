"""Look for the settings with the best score, where a score costs a simulation: coordinate descent and successive halving.

From the default, one setting after another is tried at its other values while the rest stay, and the best of them is
kept if it gains enough; sweeps over all settings go on until one changes nothing. That is coordinate descent (S. Wright,
"Coordinate descent algorithms", Mathematical Programming 151, 2015). The values of a setting are thinned out by
successive halving (K. Jamieson, A. Talwalkar, "Non-stochastic best arm identification and hyperparameter optimization",
AISTATS 2016): all of them at a low fidelity, the better half at twice that, and so on.

Low fidelities only drop candidates; what is accepted has gained at full fidelity. So the result is never worse than the
default, and as a rule no single change improves it; the best of all combinations it need not be. Nothing is random.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

Value = str | int | float
Setting = Mapping[str, Value]
T = TypeVar("T")

FULL = 1.0
_LEAST_FIDELITY = 0.25
# A cheap evaluation that is this much worse than that of the present setting drops a candidate whatever its rank.
_HOPELESS = 0.9


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a setting.

    Attributes:
      score: to be maximised; at least 0, as gains are shares of it. details: whatever else is to be told.
    """

    score: float
    details: Any = None


Evaluate = Callable[[Sequence[Setting], float], Sequence[Outcome | None]]
"""Outcomes of settings at a fidelity above 0 and at most 1; None for one that cannot be. They may run side by side."""


@dataclasses.dataclass(frozen=True)
class Trial:
    setting: Setting
    fidelity: float
    outcome: Outcome | None


@dataclasses.dataclass(frozen=True)
class Contribution:
    """A step on the way from the default.

    Attributes:
      changes: one setting; several where no one of them is possible without the others.
      setting / outcome: with this step and those before it. gain: of the score, over the step before.
    """

    changes: Setting
    setting: Setting
    outcome: Outcome
    gain: float


class Trials:
    """Evaluates each setting at each fidelity once.

    Attributes:
      all: what was evaluated, in order.
    """

    def __init__(self, evaluate: Evaluate):
        self._evaluate = evaluate
        self._known: dict[tuple, Outcome | None] = {}
        self.all: list[Trial] = []

    def outcomes(self, settings: Sequence[Setting], fidelity: float = FULL) -> list[Outcome | None]:
        new = {_key(setting, fidelity): setting for setting in settings}
        new = {key: setting for key, setting in new.items() if key not in self._known}
        if new:
            outcomes = self._evaluate(list(new.values()), fidelity)
            self._known |= zip(new, outcomes, strict=True)
            self.all += [
                Trial(setting, fidelity, outcome) for setting, outcome in zip(new.values(), outcomes, strict=True)
            ]
        return [self._known[_key(setting, fidelity)] for setting in settings]

    def outcome(self, setting: Setting) -> Outcome:
        """At full fidelity. Raises ValueError for what cannot be."""
        (outcome,) = self.outcomes([setting])
        if outcome is None:
            raise ValueError(f"Expected a setting that is possible, got {dict(setting)}")
        return outcome


def coordinate_descent(
    trials: Trials,
    space: Mapping[str, Sequence[Value]],
    default: Setting,
    *,
    min_gain: float = 0.02,
    max_sweeps: int = 4,
) -> Setting:
    """The best setting that is found.

    Args:
      space: values of each setting that may change, in the order in which they are tried.
      default: where to start; it may have values that are not in the space, and settings that never change.
      min_gain: a change must raise the score by so much of it.

    Raises ValueError where the default is not possible.
    """
    current, score = dict(default), trials.outcome(default).score
    num_unchanged = 0  # settings since the last change
    for name, values in [*space.items()] * max_sweeps:
        if num_unchanged == len(space):
            break
        num_unchanged += 1
        others = [current | {name: value} for value in dict.fromkeys(values) if value != current[name]]
        for candidate in _halve(trials, current, others):
            (outcome,) = trials.outcomes([candidate])
            if outcome is not None and outcome.score > score * (1 + min_gain):
                current, score, num_unchanged = dict(candidate), outcome.score, 0
    return current


def contributions(
    trials: Trials, default: Setting, best: Setting, *, min_gain: float = 0.02
) -> tuple[Setting, list[Contribution]]:
    """What each change from the default to `best` brings, made one at a time, each time the one that gains most.

    Changes are left out once the rest would gain less than min_gain together; so the first result, the recommended
    setting, may be simpler than `best`, and the gains add up to its score less the default's.
    """
    current: dict[str, Value] = dict(default)
    before, final = trials.outcome(default), trials.outcome(best)
    left = [name for name in default if best[name] != default[name]]
    steps: list[Contribution] = []
    while left and final.score > before.score * (1 + min_gain):
        options = [{name: best[name]} for name in left]
        outcomes = trials.outcomes([current | changes for changes in options])
        possible = [pair for pair in zip(options, outcomes, strict=True) if pair[1] is not None]
        rest = {name: best[name] for name in left}, final
        changes, outcome = max(possible, key=lambda pair: pair[1].score, default=rest)
        current |= changes
        left = [name for name in left if name not in changes]
        steps.append(Contribution(changes, dict(current), outcome, outcome.score - before.score))
        before = outcome
    return current, steps


def pareto_front(points: Iterable[T], costs: Callable[[T], tuple[float, ...]]) -> list[T]:
    """Points of which no other is at most as costly in everything and less in something; of equal ones the first.

    Cheapest by the first cost first.
    """
    front: list[tuple[tuple[float, ...], T]] = []
    for cost, point in sorted(((costs(point), point) for point in points), key=lambda pair: pair[0]):
        # Sorted, so that nothing later dominates what stands.
        if not any(all(a <= b for a, b in zip(other, cost, strict=True)) for other, _ in front):
            front.append((cost, point))
    return [point for _, point in front]


def _halve(trials: Trials, current: Setting, candidates: list[Setting]) -> list[Setting]:
    """Those that are left for full fidelity, best first: one, or few where there were very many."""
    rounds = math.ceil(math.log2(len(candidates))) if candidates else 0
    fidelity = max(_LEAST_FIDELITY, 0.5**rounds)
    while fidelity < FULL and candidates:
        mine, *outcomes = trials.outcomes([current, *candidates], fidelity)
        ranked = [
            (outcome.score, candidate)
            for outcome, candidate in zip(outcomes, candidates, strict=True)
            if outcome is not None and (mine is None or outcome.score >= _HOPELESS * mine.score)
        ]
        ranked.sort(key=lambda pair: -pair[0])
        candidates = [candidate for _, candidate in ranked[: math.ceil(len(candidates) / 2)]]
        fidelity *= 2
    return candidates


def _key(setting: Setting, fidelity: float) -> tuple:
    return fidelity, *sorted(setting.items())
