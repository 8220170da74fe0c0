"""The least-squares fit of step costs."""

import numpy as np
import pytest
from benchlib.cost_fit import fit_linear
from benchlib.step_costs import decode_columns, prefill_columns


def test_recovers_what_made_the_times():
    points = [decode_columns(rows, context) for rows in (1, 4, 16) for context in (128, 1024, 4096)]
    seconds = [0.02 + 0.003 * p["rows"] + 5e-7 * p["kv_tokens"] for p in points]
    fit = fit_linear({name: [p[name] for p in points] for name in ("rows", "kv_tokens")}, seconds)
    assert fit.coefficients == pytest.approx({"constant": 0.02, "rows": 0.003, "kv_tokens": 5e-7}, rel=1e-9)
    assert fit.r2 == pytest.approx(1) and fit.max_relative_error < 1e-9
    assert fit.predict(rows=8, kv_tokens=10_000) == pytest.approx(0.02 + 0.024 + 0.005)


def test_tells_how_far_off_it_is():
    fit = fit_linear({"rows": [0, 1, 2, 3]}, [1.0, 2.0, 2.0, 3.0])
    # By hand: slope 0.6 and intercept 1.1, residuals -0.1, 0.3, -0.3, 0.1; squares 0.2 of 2.
    assert fit.coefficients == pytest.approx({"constant": 1.1, "rows": 0.6})
    assert (fit.r2, fit.max_relative_error) == pytest.approx((0.9, 0.15))


def test_is_the_same_as_polyfit():
    rng = np.random.default_rng(0)
    x, y = rng.uniform(1, 1e6, 50), rng.uniform(1, 2, 50)
    slope, constant = np.polyfit(x, y, 1)
    assert fit_linear({"x": x}, y).coefficients == pytest.approx({"constant": constant, "x": slope})


def test_points_that_determine_nothing_are_refused():
    with pytest.raises(ValueError, match="3 points do not determine the 3 coefficients of rows, kv_tokens"):
        fit_linear({"rows": [1, 2, 3], "kv_tokens": [10, 20, 30]}, [1.0, 2.0, 3.0])


def test_columns_count_what_attention_reads():
    assert decode_columns(4, 99) == {"rows": 4, "kv_tokens": 400}
    # Token i of three, after ten in cache, attends to 10 + i: 11 + 12 + 13.
    assert prefill_columns(3, 10) == {"tokens": 3, "pairs": 36}
