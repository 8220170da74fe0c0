"""Every skip is accounted for: a whole run with another number of them than expected fails.

And no process of tests keeps all that it has compiled.
"""

import gc
import importlib.metadata
import importlib.util
import os
import pathlib
import sys
import tempfile

import hypothesis
import pytest

# A busy machine is no fault of an example.
hypothesis.settings.register_profile("jaxkv", deadline=None)
hypothesis.settings.load_profile("jaxkv")
# The test modules that compare with transformers' torch models (`make oracle`), skipped whole where torch is absent.
TORCH_MODULES = 6
# Tests that read request traces beside the checkout (small made-up traces cover the logic where they are absent).
TRACES, TRACE_TESTS = pathlib.Path(__file__).parents[2] / "shared" / "traces", 3
# Tests of kernels for which JAX must be this new; test_mosaic_support.py has what an older one does instead.
MOSAIC_JAX = (0, 11, 2)
if tuple(map(int, importlib.metadata.version("jax").split(".")[:3])) < MOSAIC_JAX:
    collect_ignore_glob = ["pallas_kernels/test_*_mosaic.py"]
_skipped: list[str] = []
# Names the folder through which a run's processes share what they compile (see support/tiny_programs.py).
_EXECUTABLES = "JAXKV_TEST_EXECUTABLES"
# XLA:CPU maps some 100 regions for each step function, Linux allows a process 65,530 (vm.max_map_count), and XLA dies of a
# segmentation fault at the next one. Left alone, all tests in one process come to more than that.
_MANY_MAPPED_REGIONS, _MOST_MAPPED_REGIONS = 15_000, 40_000


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        folder = tempfile.TemporaryDirectory(prefix="jaxkv-executables-")
        os.environ[_EXECUTABLES] = folder.name  # workers inherit it
        config.add_cleanup(folder.cleanup)


def pytest_collectreport(report):
    if report.skipped:
        _skipped.append(report.nodeid)


def pytest_runtest_logreport(report):
    if report.skipped:
        _skipped.append(report.nodeid)


def pytest_sessionfinish(session, exitstatus):
    config = session.config
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist sees a part of the tests
        return
    whole = config.args == config.getini("testpaths") and not config.option.keyword
    marks = "not slow and not gpu_build and not prometheus and not clients and not browser"  # those of `make test`
    if not whole or exitstatus != 0 or config.option.markexpr != marks:
        return
    expected = 0 if importlib.util.find_spec("torch") else TORCH_MODULES
    expected += 0 if TRACES.is_dir() else TRACE_TESTS
    if len(_skipped) != expected:
        session.exitstatus = 1
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        reporter.write_line(f"Expected {expected} skips, got {len(_skipped)}: {', '.join(_skipped)}", red=True)


@pytest.fixture(autouse=True, scope="module")
def _forget_executables():
    """Drop what jit has compiled for a module, when there is much of it."""
    yield
    if "jax" in sys.modules and _num_mapped_regions() > _MANY_MAPPED_REGIONS:
        sys.modules["jax"].clear_caches()
        gc.collect()
        assert _num_mapped_regions() < _MOST_MAPPED_REGIONS, "something keeps executables: XLA will crash"


def _num_mapped_regions() -> int:
    maps = pathlib.Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.is_file() else 0
