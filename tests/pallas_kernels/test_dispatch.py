"""Which implementation runs: named, or the first that can."""

import pytest

from pallas_kernels import dispatch


def test_unset_takes_the_first_supported_and_says_why():
    assert dispatch.resolve(None, block_size=16) == ("xla", "runs on any device")


@pytest.mark.parametrize("name", dispatch.ALL)
def test_a_named_implementation_is_taken(name):
    assert dispatch.resolve(name, block_size=8)[0] == name


@pytest.mark.parametrize(
    "name, block_size, reason",
    [
        ("flash", 16, "'flash' can't run: unknown implementation 'flash'; known: xla, reference"),
        ("xla", 4, "block_size must be a power of two of at least 8, not 4"),
        (None, 24, "block_size must be a power of two of at least 8, not 24"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(name, block_size, reason):
    with pytest.raises(ValueError, match=reason):
        dispatch.resolve(name, block_size=block_size)
