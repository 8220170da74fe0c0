"""Waiting for another thread."""

import time

import pytest


@pytest.fixture
def until():
    def wait(condition, timeout=10.0):
        end = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < end, f"not within {timeout} s"
            time.sleep(0.005)

    return wait
