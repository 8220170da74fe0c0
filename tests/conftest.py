"""Every skip is accounted for: a whole run with another number of them than expected fails."""

import importlib.util

# The test modules that compare with transformers' torch models (`make oracle`), skipped whole where torch is absent.
TORCH_MODULES = 4
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
    if not whole or exitstatus != 0 or config.option.markexpr != "not slow":
        return
    expected = 0 if importlib.util.find_spec("torch") else TORCH_MODULES
    if len(_skipped) != expected:
        session.exitstatus = 1
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        reporter.write_line(f"Expected {expected} skips, got {len(_skipped)}: {', '.join(_skipped)}", red=True)
