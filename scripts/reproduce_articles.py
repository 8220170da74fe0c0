#!/usr/bin/env python
"""Two articles on KV caches and hit rates, claim by claim: what is measured here, beside their figures, and a verdict by rule.

    python scripts/reproduce_articles.py                         # engines of this machine, and simulated A100s with a 7B model
    python scripts/reproduce_articles.py --mode=simulation       # no weights, nothing compiled
    python scripts/reproduce_articles.py --only=B1,A9 --plot=pictures
    python scripts/reproduce_articles.py --quick                 # small and with random weights: to see that it works

Rows about hit rates, blocks and queues run on the real scheduler and block manager under a simulated A100; rows about time
and quality on engines of this machine, on a CPU with smaller sizes. A row has several claims where the article has; it
counts as refuted when one of them is. Verdicts are results: exit code 1 only if a measurement broke.
"""

import contextlib
import dataclasses
import pathlib
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
from absl import flags, logging
from articlelib.claims import CLAIMS
from articlelib.cost_models import of_roofline
from articlelib.lab import FULL, QUICK, SMALL, Lab
from articlelib.registry import PARTS, REAL, Part
from articlelib.verdict import Verdict, not_measured, of_row
from articlelib.worlds import RealWorld, SimulatedWorld
from benchlib.partial_report import save
from benchlib.random_model import write_random_model
from gpulib.step_programs import MODELS
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from jaxkv import measurement
from jaxkv.core.config import EngineConfig
from jaxkv.core.errors import ConfigError
from jaxkv.device import DEVICES

_MODEL = flags.DEFINE_string("model", "demo", "What the engines of this machine serve, as for serve.py.")
_MODE = flags.DEFINE_enum(
    "mode",
    None,
    ["cpu", "gpu", "simulation"],
    "Where the rows about time run; unset: gpu where there is one, else cpu.",
)
_ONLY = flags.DEFINE_list("only", [], "Rows to judge, as B1,A9; empty: all.")
_RUNS = flags.DEFINE_integer("runs", 3, "Counted runs of what is timed on an engine.", lower_bound=1)
_PLOT = flags.DEFINE_string("plot", None, "Draw curves into this folder; needs matplotlib (pip install -e '.[plot]').")

_LAYERS = 4
_7B = "llama-2-7b"


def _config() -> dict[str, Any]:
    return {name: flags.FLAGS[name].value for name in ("model", "mode", "only", "runs", "plot", "quick")}


def _rows() -> list[str]:
    wanted = [name.strip().upper() for name in _ONLY.value if name.strip()]
    if unknown := sorted(set(wanted) - CLAIMS.keys()):
        raise ConfigError(f"only has {', '.join(unknown)}; there are {', '.join(CLAIMS)}")
    return [row for row in CLAIMS if row in wanted] if wanted else list(CLAIMS)


def _measure(report: measurement.Report) -> None:
    rows = _rows()
    if _PLOT.value is not None:
        measurement.check_installed("matplotlib", extra="plot")
    logging.set_verbosity(logging.ERROR)
    mode = _mode()
    report.config["mode"] = mode
    with tempfile.TemporaryDirectory(prefix="jaxkv-articles-") as folder, _progress(report) as bar:
        lab = _lab(mode, pathlib.Path(folder))
        parts = [part for part in PARTS if set(part.rules) & set(rows)]
        task = bar.add_task("", total=len(parts), count=0)
        lab.tick = lambda: bar.advance_count()
        values = {}
        verdicts: dict[str, list[tuple[Verdict, str]]] = {row: [] for row in rows}
        for part in parts:
            bar.update(task, description=part.name)
            bar.task = task
            found = _run(report, lab, part, mode)
            for row in sorted(set(part.rules) & set(rows)):
                judged = list(_judge(report, part, row, found, lab))
                _record(report, row, judged)
                verdicts[row] += judged
            save(report)
            if not isinstance(found, str):
                values[part.name] = found
            bar.advance(task)
    _tell(report, verdicts)
    if _PLOT.value is not None:
        from articlelib.pictures import draw_all

        report.files += draw_all(pathlib.Path(_PLOT.value), values)


def _mode() -> str:
    if _MODE.value in ("cpu", "simulation"):
        jax.config.update("jax_platforms", "cpu")
        return _MODE.value
    has_gpu = jax.default_backend() == "gpu"
    if _MODE.value == "gpu" and not has_gpu:
        raise measurement.AbsentError("mode is gpu, and JAX sees none")
    return "gpu" if has_gpu else "cpu"


def _lab(mode: str, folder: pathlib.Path) -> Lab:
    quick = flags.FLAGS.quick
    simulated = {
        name: SimulatedWorld(_7B, MODELS[_7B], DEVICES[device], of_roofline)
        for name, device in (("basics", "a100-80g"), ("serving", "a100-40g"))
    }
    lab = Lab(
        **simulated, sizes=QUICK if quick else SMALL if mode == "cpu" else FULL, quick=quick, on_cpu=mode != "gpu"
    )
    if mode == "simulation":
        return lab
    on_cpu = mode == "cpu"
    model = _MODEL.value
    if quick and not flags.FLAGS["model"].present:
        model = str(write_random_model(folder / "tiny"))
    else:
        lab.model = model
    longest = 256 if quick else 704 if on_cpu else 4096
    config = EngineConfig(model=model, max_model_len=longest, attention_implementation=None)
    if on_cpu:
        small = {"max_num_seqs": lab.sizes.concurrent, "max_num_batched_tokens": 64 if quick else 256}
        config = dataclasses.replace(config, num_gpu_blocks_override=64 if quick else 512, **small)
    lab.engine = RealWorld(f"{pathlib.Path(model).name} on this machine", config, _start)
    lab.layers = _layers(lab, config, folder)
    few = {"max_num_seqs": 4, "max_num_batched_tokens": 128, "max_model_len": 1024} if on_cpu else {}
    lab.needles = RealWorld(lab.engine.name, dataclasses.replace(config, **few), _start)
    return lab


def _layers(lab: Lab, config: EngineConfig, folder: pathlib.Path) -> RealWorld:
    """Engines of a few random layers: a setting more costs seconds of compiling, not minutes."""
    quick, on_cpu = lab.quick, lab.on_cpu
    if quick:
        shape: dict[str, Any] = {}
    elif on_cpu:  # the demo model's
        shape = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
                 "head_dim": 64, "vocab_size": 8192}  # fmt: skip
    else:  # Llama-3-8B's
        shape = {"hidden_size": 4096, "intermediate_size": 14_336, "num_attention_heads": 32,
                 "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32_000}  # fmt: skip
    layers = 2 if quick else _LAYERS
    path = write_random_model(folder / "layers", num_hidden_layers=layers, **shape)
    rows = 2 * lab.sizes.concurrent if quick else 16 if on_cpu else 256
    config = dataclasses.replace(config, model=str(path), max_num_seqs=rows)
    if on_cpu:
        config = dataclasses.replace(config, num_gpu_blocks_override=256 if quick else 1024)
    return RealWorld(f"{layers} random layers on this machine", config, _start)


def _start(config: EngineConfig):
    from jaxkv.startup import start_engine

    return start_engine(config)


class _Bar(Progress):
    """Parts done, and how far the running one is: nobody knows before how many steps it takes."""

    task = None

    def advance_count(self) -> None:
        if self.task is not None:
            self.update(self.task, count=self.tasks[0].fields["count"] + 1)


def _progress(report: measurement.Report) -> contextlib.AbstractContextManager[_Bar]:
    columns = (
        TextColumn("{task.description:<28}"),
        BarColumn(),
        TextColumn("{task.completed:.0f} of {task.total:.0f} parts, {task.fields[count]} runs"),
        TimeElapsedColumn(),
    )
    return _Bar(*columns, console=report.console, disable=report.console.quiet or not report.console.is_terminal)


def _run(report: measurement.Report, lab: Lab, part: Part, mode: str) -> dict[str, Any] | str:
    """What was measured, or why nothing could be."""
    if part.where in REAL and mode == "simulation":
        return "needs an engine: choose --mode=cpu or gpu"
    if part.where == "model" and lab.model is None:
        return "random weights know nothing: leave --quick out, or name a model"
    begin = time.monotonic()
    try:
        values = part.measure(lab)
    except Exception as error:  # hours of other rows are not lost for one
        logging.exception("%s broke", part.name)
        report.check(f"{part.name} can be measured", [f"{type(error).__name__}: {error}"])
        return f"the measurement broke: {type(error).__name__}: {error}"
    seconds = time.monotonic() - begin
    report.add(
        part.name, [seconds], unit="s", metric="part", engine=_where(part, lab), rows=sorted(part.rules), values=values
    )
    report.console.print(f"{part.name}: {seconds:.1f} s", highlight=False, markup=False)
    return values


def _where(part: Part, lab: Lab) -> str:
    world = getattr(lab, part.where, None)
    return {"plan": "plan", "model": f"{lab.model}, float32"}.get(part.where) or world.name


def _judge(
    report: measurement.Report, part: Part, row: str, found: dict[str, Any] | str, lab: Lab
) -> Iterator[tuple[Verdict, str]]:
    """Verdicts, and where they were found."""
    if isinstance(found, str):
        yield not_measured(row, f"{CLAIMS[row]} ({part.name})", "-", found), part.where
        return
    try:
        verdicts = part.rules[row](found)
    except ArithmeticError as error:  # a rate of zero, say
        report.check(f"{row} can be judged", [f"{type(error).__name__}: {error}, of {found}"])
        verdicts = [not_measured(row, f"{CLAIMS[row]} ({part.name})", "-", f"the rule has no answer: {error}")]
    for verdict in verdicts:
        yield verdict, _where(part, lab)


def _record(report: measurement.Report, row: str, judged: list[tuple[Verdict, str]]) -> None:
    for verdict, where in judged:
        told = dataclasses.asdict(verdict)
        told.pop("numbers")
        name = f"{row}: {verdict.what} ({where})"
        if verdict.numbers:
            report.add(name, verdict.numbers[:1], unit="", metric="verdict", engine=where, **told)
        else:
            report.skip(name, verdict.why, engine=where, metric="verdict", **told)


def _tell(report: measurement.Report, verdicts: dict[str, list[tuple[Verdict, str]]]) -> None:
    table = Table(title="What two articles say, and what is measured here", show_lines=True)
    for heading in ("row", "claim", "claimed", "ours", "verdict", "why", "where"):
        table.add_column(heading)
    styles = {"refuted": "yellow", "not measurable here": "dim"}
    for row, found in verdicts.items():
        for verdict, where in found:
            cells = (row, verdict.what, verdict.claimed, verdict.ours, verdict.verdict, verdict.why, where)
            table.add_row(*cells, style=styles.get(verdict.verdict))
    report.console.print(table)
    summary = Table(title="Rows")
    for heading in ("row", "what it says", "verdict", "claims confirmed", "not measured"):
        summary.add_column(heading)
    for row, found in verdicts.items():
        of_claims = [verdict for verdict, _ in found]
        confirmed, unmeasured = (
            sum(verdict.verdict == word for verdict in of_claims) for word in ("confirmed", "not measurable here")
        )
        verdict = of_row(of_claims)
        summary.add_row(
            row, CLAIMS[row], verdict, f"{confirmed} of {len(found)}", str(unmeasured), style=styles.get(verdict)
        )
        extra = {"row": row, "verdict": verdict, "claims": len(found), "unmeasured": unmeasured}
        report.add(f"row {row}", [confirmed], unit="claims confirmed", metric="row", engine="all", **extra)
    report.console.print(summary)
    report.check("every row has a verdict", [row for row, found in verdicts.items() if not found])


if __name__ == "__main__":
    measurement.run("reproduce_articles", _config, _measure, timed=False)
