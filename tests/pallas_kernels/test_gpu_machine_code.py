"""The GPU kernels, compiled for GPUs that are not here, stay within their budgets (pallas_kernels/gpu_budgets.toml)."""

import pytest
from gpulib import deviceless, kernel_configs
from gpulib.budgets import load_budgets, violations
from gpulib.targets import TARGETS

pytestmark = pytest.mark.gpu_build


def test_the_tools_are_there():
    """Without them everything below fails too; this says why."""
    assert deviceless.missing() is None


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", kernel_configs.CONFIGS)
def test_within_budget(name, target, tmp_path):
    figures = kernel_configs.measure(name, target, tmp_path / "dump")
    assert not violations(figures, load_budgets()[name], target), figures
