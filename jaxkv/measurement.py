"""What every measuring program prints: one JSON object as the last line of stdout, tables and progress on stderr.

Flags `--json_only`, `--json_out` and `--quick` are the same for all of them. Exit code 0: done; 1: a check failed;
2: user error; 3: a needed tool or device is absent.
"""

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags, logging
from rich.console import Console
from rich.table import Table

from jaxkv.core.errors import ConfigError, UserError
from jaxkv.flags import GROUPS, help_text, normalized

SCHEMA = "jaxkv.result/1"
EXIT_DONE, EXIT_CHECK_FAILED, EXIT_USER_ERROR, EXIT_ABSENT = 0, 1, 2, 3
_VERSIONS = ("jaxkv", "jax", "jaxlib", "flax", "transformers", "torch", "numpy", "vllm")

flags.DEFINE_bool("json_only", False, "Print nothing but the JSON line.")
flags.DEFINE_string("json_out", None, "Write the JSON document to this file too.")
flags.DEFINE_bool("quick", False, "Fewer and smaller runs: to see that it works, not to quote.")


class AbsentError(Exception):
    """A tool or device that the measurement needs is not there."""


@dataclasses.dataclass
class Report:
    """Collects results and ratios while a program runs.

    `timed`: results hang on the machine's load. Programs that only compute have tables of their own instead.
    """

    program: str
    config: dict[str, Any]
    timed: bool = True
    results: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    ratios: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    checks: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    files: list[str] = dataclasses.field(default_factory=list)
    console: Console = dataclasses.field(default_factory=lambda: _console())
    started: float = dataclasses.field(default_factory=time.monotonic)
    load_at_start: float = dataclasses.field(default_factory=lambda: os.getloadavg()[0])

    def add(
        self, name: str, samples: Sequence[float], *, unit: str, metric: str, engine: str, **extra: Any
    ) -> dict[str, Any]:
        """One result: the median of `samples` with their spread; `extra` are dtype, batch and what else names it."""
        result = {
            "name": name,
            "engine": engine,
            **extra,
            "metric": metric,
            "unit": unit,
            "value": statistics.median(samples),
            "min": min(samples),
            "max": max(samples),
            "runs": len(samples),
        }
        self.results.append(result)
        return result

    def skip(self, name: str, reason: str, *, engine: str, **extra: Any) -> None:
        """A result that could not be measured, and why."""
        self.results.append({"name": name, "engine": engine, **extra, "value": None, "skipped": reason})

    def ratio(self, name: str, numerator: dict[str, Any], denominator: dict[str, Any], *, target: float | None) -> None:
        """numerator / denominator; ok when it reaches `target` (None: told, not judged)."""
        value = numerator["value"] / denominator["value"]
        self.ratios.append(
            {
                "name": name,
                "numerator": numerator["name"],
                "denominator": denominator["name"],
                "value": value,
                "target": target,
                "ok": target is None or value >= target,
            }
        )

    def check(self, name: str, problems: Sequence[str]) -> None:
        """Something that holds or doesn't: it holds when there are no problems."""
        self.checks.append({"name": name, "ok": not problems, "problems": list(problems)})

    @property
    def ok(self) -> bool:
        return all(judged["ok"] for judged in (*self.ratios, *self.checks))

    def document(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "program": self.program,
            "ok": self.ok,
            "argv": sys.argv[1:],
            "versions": _versions(),
            "device": device_facts() | {"load_at_start": self.load_at_start},
            "config": self.config,
            "results": self.results,
            "ratios": self.ratios,
            "checks": self.checks,
            "files": self.files,
            "seconds": round(time.monotonic() - self.started, 3),
        }

    def print_table(self) -> None:
        if self.timed:
            self._print_results()
        for check in self.checks:
            for problem in check["problems"]:
                self.console.print(f"FAILED {check['name']}: {problem}", style="red", markup=False)
        if not self.ratios:
            return
        table = Table(title="ratios")
        for column in ("ratio", "value", "target", "ok"):
            table.add_column(column)
        for r in self.ratios:
            target = "-" if r["target"] is None else f"{r['target']:.2f}"
            table.add_row(r["name"], f"{r['value']:.2f}", target, "yes" if r["ok"] else "NO")
        self.console.print(table)

    def _print_results(self) -> None:
        table = Table(title=self.program)
        for column in ("result", "engine", "median", "min", "max", "runs", "unit"):
            table.add_column(column, justify="right" if column in ("median", "min", "max", "runs") else "left")
        for r in self.results:
            if r["value"] is None:
                table.add_row(r["name"], r["engine"], f"skipped: {r['skipped']}", "", "", "", "")
            else:
                numbers = (f"{r[key]:,.4g}" for key in ("value", "min", "max"))
                table.add_row(r["name"], r["engine"], *numbers, str(r["runs"]), r["unit"])
        self.console.print(table)
        load, cores = f"{self.load_at_start:.1f} before, {os.getloadavg()[0]:.1f} after", os.cpu_count()
        self.console.print(f"load average on {cores} cores: {load}; with other load, quote the ratios alone")


def check_installed(module: str, *, extra: str) -> None:
    """Before anything is measured: whether an optional library is there. Raises AbsentError."""
    if importlib.util.find_spec(module) is None:
        raise AbsentError(f"{module} is not installed (pip install -e '.[{extra}]')")


def check_plot(path: str | None, *, flag: str = "plot") -> None:
    """Before anything is measured: whether a plot that was asked for can be drawn. Raises ConfigError or AbsentError."""
    if path is None:
        return
    if not path.endswith(".png"):
        raise ConfigError(f"{flag} is {path!r}; its name must end in .png")
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"{flag} is {path!r}, in a folder that does not exist")
    check_installed("matplotlib", extra="plot")


def run(
    program: str, config: Callable[[], dict[str, Any]], measure: Callable[[Report], None], *, timed: bool = True
) -> None:
    """Entry point of a measuring program: parses flags, measures, prints, exits.

    Args:
      config: the settings in force, read from the flags once they are parsed; may raise UserError.
      measure: fills the report; may raise UserError (exit 2) or AbsentError (exit 3).
      timed: see Report.
    """

    def main(argv: Sequence[str]) -> int:
        if len(argv) > 1:
            sys.stderr.write(f"{program}: unexpected argument {argv[1]!r}\n")
            return EXIT_USER_ERROR
        if flags.FLAGS.json_only:
            logging.set_verbosity(logging.WARNING)
        json_out = flags.FLAGS.json_out
        try:
            if json_out and not Path(json_out).absolute().parent.is_dir():
                raise ConfigError(f"json_out is {json_out!r}, in a folder that does not exist")
            report = Report(program, config(), timed)
            report.console.quiet = flags.FLAGS.json_only
            measure(report)
        except UserError as error:
            sys.stderr.write(f"{program}: {error}\n")
            return EXIT_USER_ERROR
        except AbsentError as error:
            sys.stderr.write(f"{program}: {error}\n")
            return EXIT_ABSENT
        report.print_table()
        text = json.dumps(report.document())
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
        if json_out:
            try:
                Path(json_out).write_text(text + "\n", encoding="utf-8")
            except OSError as error:
                sys.stderr.write(f"{program}: json_out is {json_out!r}, which cannot be written: {error.strerror}\n")
                return EXIT_USER_ERROR
        return EXIT_DONE if report.ok else EXIT_CHECK_FAILED

    def parse(argv: list[str]) -> list[str]:
        if any(argument in ("-h", "--help", "--helpfull") for argument in argv[1:]):
            sys.stdout.write(_help() + "\n")
            sys.exit(EXIT_DONE)
        try:
            return flags.FLAGS([argv[0], *normalized(argv[1:])])
        except (flags.Error, UserError) as error:
            sys.stderr.write(f"{program}: {error}\n")
            sys.exit(EXIT_USER_ERROR)

    app.run(main, flags_parser=parse)


def _help() -> str:
    """The program's own text and flags, those of every measuring program, and the engine's where it takes them."""
    own = [flag.name for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0])]
    groups: dict[str, Sequence[str]] = {"measurement": own, "output": ("json_only", "json_out", "quick")}
    if "max_num_seqs" in flags.FLAGS:
        groups |= GROUPS
    return help_text(sys.modules["__main__"].__doc__ or "", groups)


def _console() -> Console:
    """On stderr; wide enough for the tables where it is a file."""
    return Console(stderr=True, width=None if sys.stderr.isatty() else 120)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def device_facts() -> dict[str, Any]:
    """The machine: processor and load, and the accelerator where jax is loaded."""
    device: dict[str, Any] = {"machine": platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    jax = sys.modules.get("jax")  # programs that simulate never import it
    if jax is not None:
        devices = jax.devices()
        device |= {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)}
    return device
