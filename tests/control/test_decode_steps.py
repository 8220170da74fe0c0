"""The policy for C."""

from hypothesis import given
from hypothesis import strategies as st

from jaxkv.control.decode_steps import StepTimer, adaptive_decode_steps, ceil_power_of_two, floor_power_of_two
from jaxkv.core.plan import StepTiming

UNKNOWN = {"num_rows": 9, "step_seconds": 0.0}
IDLE = {"waiting": False} | UNKNOWN


def test_powers_of_two():
    assert [floor_power_of_two(n) for n in (1, 2, 3, 4, 9)] == [1, 2, 2, 4, 8]
    assert [ceil_power_of_two(n) for n in (1, 2, 3, 4, 9)] == [1, 2, 4, 4, 16]


def test_idle_engine_runs_as_many_steps_as_it_may():
    assert adaptive_decode_steps(16, least_remaining=3, most_remaining=100, **IDLE) == 16
    assert adaptive_decode_steps(12, least_remaining=3, most_remaining=100, **IDLE) == 8


def test_no_more_steps_than_any_row_can_use():
    assert adaptive_decode_steps(16, least_remaining=1, most_remaining=1, **IDLE) == 1
    assert adaptive_decode_steps(16, least_remaining=1, most_remaining=5, **IDLE) == 8


def test_with_a_queue_no_call_outlasts_the_first_row_to_end():
    for left, steps in ((1, 1), (3, 2), (8, 8), (500, 16)):
        got = adaptive_decode_steps(
            16, least_remaining=left, most_remaining=500, waiting=True, **UNKNOWN
        )
        assert got == steps


@given(
    st.integers(1, 64),
    st.integers(1, 99),
    st.integers(0, 99),
    st.booleans(),
    st.integers(1, 9),
    st.floats(0, 2),
)
def test_always_a_power_of_two_within_the_limit(largest, least, more, waiting, num_rows, step_seconds):
    steps = adaptive_decode_steps(
        largest,
        least_remaining=least,
        most_remaining=least + more,
        waiting=waiting,
        num_rows=num_rows,
        step_seconds=step_seconds,
    )
    assert 1 <= steps <= largest and steps & (steps - 1) == 0
    assert steps < 2 * (least + more)


def test_slow_steps_make_shared_calls_short_but_not_those_of_one_client():
    for step_seconds, steps in ((0.001, 8), (0.025, 8), (0.03, 4), (0.09, 2), (0.15, 1), (3.0, 1)):
        free = {"least_remaining": 50, "most_remaining": 50, "waiting": False}
        assert adaptive_decode_steps(8, **free, num_rows=2, step_seconds=step_seconds) == steps
        assert adaptive_decode_steps(8, **free, num_rows=1, step_seconds=step_seconds) == 8


def test_a_step_is_timed_from_the_end_of_the_call_before():
    timer = StepTimer()
    timer.record(0, StepTiming(0.0, 5.0))
    assert timer.seconds == 0
    timer.record(4, StepTiming(1.0, 5.4))  # submitted early, began at 5.0
    assert abs(timer.seconds - 0.1) < 1e-9
    timer.record(2, StepTiming(6.0, 6.4))
    assert abs(timer.seconds - (0.75 * 0.1 + 0.25 * 0.2)) < 1e-9
    timer.record(0, StepTiming(6.1, 9.0))
    timer.record(1, StepTiming(6.2, 9.0))
    assert abs(timer.seconds - 0.75 * 0.125) < 1e-9
