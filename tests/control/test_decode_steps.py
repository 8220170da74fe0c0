"""The policy for C."""

from hypothesis import given
from hypothesis import strategies as st

from jaxkv.control.decode_steps import adaptive_decode_steps, ceil_power_of_two, floor_power_of_two

IDLE = {"prefilling": False, "waiting": False}


def test_powers_of_two():
    assert [floor_power_of_two(n) for n in (1, 2, 3, 4, 9)] == [1, 2, 2, 4, 8]
    assert [ceil_power_of_two(n) for n in (1, 2, 3, 4, 9)] == [1, 2, 4, 4, 16]


def test_idle_engine_runs_as_many_steps_as_it_may():
    assert adaptive_decode_steps(16, least_remaining=3, most_remaining=100, **IDLE) == 16
    assert adaptive_decode_steps(12, least_remaining=3, most_remaining=100, **IDLE) == 8


def test_no_more_steps_than_any_row_can_use():
    assert adaptive_decode_steps(16, least_remaining=1, most_remaining=1, **IDLE) == 1
    assert adaptive_decode_steps(16, least_remaining=1, most_remaining=5, **IDLE) == 8


def test_prefill_makes_calls_short():
    assert adaptive_decode_steps(16, least_remaining=9, most_remaining=9, prefilling=True, waiting=True) == 1


def test_with_a_queue_no_call_outlasts_the_first_row_to_end():
    for left, steps in ((1, 1), (3, 2), (8, 8), (500, 16)):
        got = adaptive_decode_steps(16, least_remaining=left, most_remaining=500, prefilling=False, waiting=True)
        assert got == steps


@given(st.integers(1, 64), st.integers(1, 99), st.integers(0, 99), st.booleans(), st.booleans())
def test_always_a_power_of_two_within_the_limit(largest, least, more, prefilling, waiting):
    steps = adaptive_decode_steps(
        largest, least_remaining=least, most_remaining=least + more, prefilling=prefilling, waiting=waiting
    )
    assert 1 <= steps <= largest and steps & (steps - 1) == 0
    assert steps < 2 * (least + more)
