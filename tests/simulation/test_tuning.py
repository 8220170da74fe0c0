"""The search for settings on objectives whose best is known, and what holds of it on any objective."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.simulation.tuning import Outcome, Trials, contributions, coordinate_descent, pareto_front

SPACE = {"a": (0, 1, 2, 3), "b": (0, 1, 2), "c": (0, 1, 2, 3, 4)}
DEFAULT = {"a": 0, "b": 0, "c": 0, "fixed": "x"}


class Made:
    """An objective by a function of the setting; None refuses. A look is right unless `look` says otherwise."""

    def __init__(self, score, look=None):
        self._score, self._look = score, look or score
        self.looked, self.measured = [], []

    def look(self, wanted, to_beat):
        self.looked += map(dict, wanted)
        looks = map(self._look, wanted)
        return [None if look is None else look / to_beat if to_beat else math.inf for look in looks]

    def measure(self, wanted):
        self.measured += map(dict, wanted)
        return [None if score is None else Outcome(score) for score in map(self._score, wanted)]


def separable(setting):
    """Each setting adds its own: the best is a 2, b 1, c 3, whatever the others are."""
    return 100 - 10 * (setting["a"] - 2) ** 2 - 7 * (setting["b"] - 1) ** 2 - 3 * (setting["c"] - 3) ** 2


def descend(made, space=SPACE, **options):
    return coordinate_descent(Trials(made), space, DEFAULT, **options)


def test_finds_the_best_where_settings_add_up():
    made = Made(separable)
    assert descend(made, min_gain=0.001) == {"a": 2, "b": 1, "c": 3, "fixed": "x"}
    # The default; of a two of three that seem better; b; of c two of four.
    assert made.measured == [
        DEFAULT,
        DEFAULT | {"a": 2},
        DEFAULT | {"a": 1},
        DEFAULT | {"a": 2, "b": 1},
        DEFAULT | {"a": 2, "b": 1, "c": 3},
        DEFAULT | {"a": 2, "b": 1, "c": 2},
    ]
    assert len(made.looked) == 2 * (3 + 2 + 4)  # a second sweep changes nothing


def test_a_setting_that_needs_another_first_is_found_in_the_second_sweep():
    def score(setting):
        return 10 + setting["b"] * (5 if setting["c"] == 4 else 0) + setting["c"]

    best = descend(Made(score))
    assert (best["b"], best["c"]) == (2, 4)
    one = descend(Made(score), max_sweeps=1)
    assert (one["b"], one["c"]) == (0, 4)


def test_gains_below_the_least_are_not_taken():
    assert descend(Made(lambda setting: 100 + 1.9 * (setting["a"] == 3))) == DEFAULT
    assert descend(Made(lambda setting: 100 + 2.1 * (setting["a"] == 3))) == DEFAULT | {"a": 3}


def test_looks_drop_settings_but_never_decide():
    """a 3 looks best and is worse than the default."""
    made = Made(lambda setting: 10 - 5 * (setting["a"] == 3), look=lambda setting: 20 * (setting["a"] == 3))
    assert descend(made, {"a": SPACE["a"]}) == DEFAULT
    assert made.measured == [DEFAULT, DEFAULT | {"a": 3}]


def test_what_is_refused_is_passed_over():
    def score(setting):
        return None if setting["a"] in (2, 3) else 10 + setting["a"]

    assert descend(Made(score), {"a": SPACE["a"]})["a"] == 1
    # Refused only when measured:
    assert descend(Made(score, look=lambda setting: 20 + setting["a"]), {"a": SPACE["a"]}) == DEFAULT
    with pytest.raises(ValueError, match="possible"):
        coordinate_descent(Trials(Made(score)), SPACE, DEFAULT | {"a": 2})


def test_contributions_go_by_gain_and_leave_out_what_brings_nothing():
    def score(setting):
        return 100 + 50 * (setting["a"] == 1) + 80 * (setting["c"] == 2) + 0.5 * (setting["b"] == 1)

    best = DEFAULT | {"a": 1, "b": 1, "c": 2}
    recommended, steps = contributions(Trials(Made(score)), DEFAULT, best)
    assert recommended == DEFAULT | {"a": 1, "c": 2}
    assert [(dict(step.changes), step.gain, step.outcome.score) for step in steps] == [
        ({"c": 2}, 80.0, 180.0),
        ({"a": 1}, 50.0, 230.0),
    ]
    assert steps[0].setting == DEFAULT | {"c": 2}


def test_changes_that_are_possible_only_together_are_one_step():
    def score(setting):
        return None if (setting["a"] == 1) != (setting["b"] == 1) else 10 + setting["a"]

    recommended, (step,) = contributions(Trials(Made(score)), DEFAULT, DEFAULT | {"a": 1, "b": 1})
    assert step.changes == {"a": 1, "b": 1} and step.gain == 1 and recommended == step.setting


@settings(deadline=None)
@given(st.data())
def test_never_worse_than_the_default_and_the_gains_add_up(data):
    """Of any scores, refusals and looks that lie."""
    scores = st.none() | st.floats(0, 1000)
    tables = {}

    def drawn(kind):
        def score(setting):
            key = (kind, *(setting[name] for name in SPACE))
            if key not in tables:
                tables[key] = data.draw(st.floats(0, 1000) if key == ("measured", 0, 0, 0) else scores)
            return tables[key]

        return score

    trials = Trials(Made(drawn("measured"), look=drawn("look")))
    best = coordinate_descent(trials, SPACE, DEFAULT)
    recommended, steps = contributions(trials, DEFAULT, best)
    start, end = trials.outcome(DEFAULT).score, trials.outcome(recommended).score
    assert trials.outcome(best).score >= start and end >= start
    assert end * 1.02 >= trials.outcome(best).score
    assert sum(step.gain for step in steps) == pytest.approx(end - start, abs=1e-6)
    changed = {name: value for step in steps for name, value in step.changes.items()}
    assert DEFAULT | changed == recommended
    assert all(recommended[name] in (best[name], DEFAULT[name]) for name in SPACE)
    assert len(trials.all) == len({tuple(trial.setting.values()) for trial in trials.all})


@given(st.lists(st.tuples(*[st.integers(0, 4)] * 3), max_size=40))
def test_pareto_front_is_what_nothing_dominates(points):
    def dominates(a, b):
        return a != b and all(x <= y for x, y in zip(a, b, strict=True))

    expected = {point for point in points if not any(dominates(other, point) for other in points)}
    front = pareto_front(points, lambda point: point)
    assert set(front) == expected and len(front) == len(expected)
    assert front == sorted(front)
