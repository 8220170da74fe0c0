"""The machine code of prefill_attention, compiled for GPUs that are not there, within pallas_kernels/gpu_budgets.toml."""

import pytest
from gpulib.budgets import load_budgets, violations
from gpulib.kernel_configs import CONFIGS, measure
from gpulib.targets import TARGETS

NAMES = [name for name in CONFIGS if name.startswith("prefill_attention/")]


@pytest.mark.gpu_build
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NAMES)
def test_prefill_is_within_its_budget(name, target, tmp_path):
    figures = measure(name, target, tmp_path)
    assert violations(figures, load_budgets()[name], target) == []
