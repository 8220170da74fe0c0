"""Every skip is accounted for: a whole run with another number of them than expected fails."""

import importlib.util
import pathlib

# The test modules that compare with transformers' torch models (`make oracle`), skipped whole where torch is absent.
TORCH_MODULES = 6
# Tests that read request traces beside the checkout (small made-up traces cover the logic where they are absent).
TRACES, TRACE_TESTS = pathlib.Path(__file__).parents[2] / "shared" / "traces", 3
_skipped: list[str] = []


def pytest_collectreport(report):
    if report.skipped:
        _skipped.append(report.nodeid)


def pytest_runtest_logreport(report):
    if report.skipped:
        _skipped.append(report.nodeid)


def pytest_sessionfinish(session, exitstatus):
    config = session.config
    whole = config.args == config.getini("testpaths") and not config.option.keyword
    marks = "not slow and not gpu_build and not prometheus and not clients"  # those of `make test`
    if not whole or exitstatus != 0 or config.option.markexpr != marks:
        return
    expected = 0 if importlib.util.find_spec("torch") else TORCH_MODULES
    expected += 0 if TRACES.is_dir() else TRACE_TESTS
    if len(_skipped) != expected:
        session.exitstatus = 1
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        reporter.write_line(f"Expected {expected} skips, got {len(_skipped)}: {', '.join(_skipped)}", red=True)
