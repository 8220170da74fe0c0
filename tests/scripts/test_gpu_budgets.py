"""Budgets of the GPU kernels: how a file is read, what breaks one. Compiles nothing."""

import pytest
from gpulib import kernel_configs
from gpulib.budgets import load_budgets, violations

FIGURES = {"registers": 100, "spilled": 0, "mma": 8, "wgmma": 0}


def write(tmp_path, text):
    path = tmp_path / "budgets.toml"
    path.write_text(text)
    return path


def test_the_shipped_budgets_are_those_of_the_shipped_kernels():
    assert load_budgets().keys() == (kernel_configs.CONFIGS | kernel_configs.MOSAIC_CONFIGS).keys()


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ({}, []),
        ({"registers": 100, "uses": ["mma"]}, []),
        ({"registers": 99}, ["registers is 100, over 99"]),
        ({"registers": 99, "h200": {"registers": 128}}, []),
        ({"registers": 128, "h200": {"registers": 64}}, ["registers is 100, over 64"]),
        ({"registers": 128, "a100": {"registers": 64}}, []),
        ({"uses": ["mma", "wgmma"]}, ["wgmma is 0"]),
    ],
)
def test_violations(budget, expected):
    assert violations(FIGURES, budget | {"reason": "x"}, "h200") == expected


def test_spills_are_never_within_a_budget():
    assert violations(FIGURES | {"spilled": 8}, {"reason": "x"}, "a100") == ["spilled is 8, over 0"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('["a"]\nregisters = 3', "a has no reason"),
        ('["a"]\nregister = 3\nreason = "x"', "a names register; there are: registers, "),
        ('["a"]\nuses = ["mmma"]\nreason = "x"', "a names mmma"),
        ('["a"]\nreason = "x"\n["a".h200]\nspill = 0', "a names spill"),
    ],
)
def test_budgets_that_say_nothing_are_refused(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        load_budgets(write(tmp_path, text))
