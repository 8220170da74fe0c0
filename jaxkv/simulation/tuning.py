"""Look for the settings with the best score, where a score costs simulations: coordinate descent with races.

From the default, one setting after another is tried at its other values while the rest stay, and the best of them is
kept if it gains enough; sweeps over all settings go on until one changes nothing. That is coordinate descent (S. J.
Wright, "Coordinate descent algorithms", Mathematical Programming 151, 2015). The values of a setting race against the
present one: a cheap look at each drops those that cannot win (O. Maron, A. Moore, "Hoeffding races", NIPS 1993), and
the better half of the others is measured (successive halving: K. Jamieson, A. Talwalkar, AISTATS 2016).

Looks only drop candidates; what is accepted has gained as measured. So the result is never worse than the default, and
as far as the looks are right no single change improves it; the best of all combinations it need not be. Nothing is
random.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

Value = str | int | float
Setting = Mapping[str, Value]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a setting.

    Attributes:
      score: to be maximised; at least 0, as gains are shares of it. details: whatever else is to be told.
    """

    score: float
    details: Any = None


class Objective(Protocol):
    """What settings are judged by; lists of settings, so that they may be evaluated side by side. None in a result: the
    setting is not possible."""

    def look(self, settings: Sequence[Setting], to_beat: float) -> Sequence[float | None]:
        """Cheap: above 1 for a setting whose score is likely above `to_beat`, and the higher, the better it seems."""
        ...

    def measure(self, settings: Sequence[Setting]) -> Sequence[Outcome | None]: ...


@dataclasses.dataclass(frozen=True)
class Trial:
    """A measured setting."""

    setting: Setting
    outcome: Outcome


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
    """Measures each setting once.

    Attributes:
      all: the settings that were measured and are possible, in order.
    """

    def __init__(self, objective: Objective):
        self.objective = objective
        self._known: dict[tuple, Outcome | None] = {}
        self.all: list[Trial] = []

    def outcomes(self, settings: Sequence[Setting]) -> list[Outcome | None]:
        new = {_key(setting): setting for setting in settings}
        new = {key: setting for key, setting in new.items() if key not in self._known}
        if new:
            outcomes = self.objective.measure(list(new.values()))
            self._known |= zip(new, outcomes, strict=True)
            self.all += [
                Trial(setting, outcome)
                for setting, outcome in zip(new.values(), outcomes, strict=True)
                if outcome is not None
            ]
        return [self._known[_key(setting)] for setting in settings]

    def outcome(self, setting: Setting) -> Outcome:
        """Raises ValueError for what is not possible."""
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
        promising = _promising(trials.objective, others, score * (1 + min_gain))
        measured = zip(trials.outcomes(promising), promising, strict=True)
        possible = [(outcome.score, setting) for outcome, setting in measured if outcome is not None]
        best, setting = max(possible, key=lambda pair: pair[0], default=(0.0, current))
        if best > score * (1 + min_gain):
            current, score, num_unchanged = dict(setting), best, 0
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


def _promising(objective: Objective, settings: list[Setting], to_beat: float) -> list[Setting]:
    """The better half of those that seem to beat a score, best first."""
    if not settings:
        return []
    looks = objective.look(settings, to_beat)
    ranked = [(look, setting) for look, setting in zip(looks, settings, strict=True) if look is not None and look > 1]
    ranked.sort(key=lambda pair: -pair[0])
    return [setting for _, setting in ranked[: math.ceil(len(ranked) / 2)]]


def _key(setting: Setting) -> tuple:
    return tuple(sorted(setting.items()))
