#!/usr/bin/env python
"""What each KV format costs in quality, against float32 keys and values: perplexity, KL divergence, top-1 agreement.

    python scripts/eval_kv_quality.py                                    # the demo model on Python's own documentation
    python scripts/eval_kv_quality.py --text=book.txt --num_windows=20 --plot=quality.png
    python scripts/eval_kv_quality.py --prompts=prompts.txt "--kv_cache_dtypes=int8;int8,int4"

The text is given (teacher forcing) in windows, each a sequence of its own, and goes through the project's own cache:
written into blocks as the format stores it, attended to through blocks, on the XLA path. Weights are float32.
"""

import contextlib
import importlib.util
import pathlib
import platform

from absl import flags, logging
from rich.table import Table

from jaxkv import measurement
from jaxkv.console import ConsoleProgress
from jaxkv.core.config import is_kv_cache_dtype, told_kv_cache_dtypes
from jaxkv.core.errors import ConfigError
from jaxkv.core.progress import SilentProgress
from jaxkv.execution.kv_cache import kv_bytes_per_token
from jaxkv.kv_quality import KVVariant, TokenFigures, summarize, token_figures, with_key_outliers, with_rotation
from jaxkv.loading.resolve import resolve_model
from jaxkv.loading.weights import load_config, load_weights
from jaxkv.settings import model_limit
from jaxkv.tokenization.tokenizer import Tokenizer, load_tokenizer
from pallas_kernels.kv_format import formats_of

_MODEL = flags.DEFINE_string("model", "demo", "demo, a Hugging Face repo id, or a file or folder, as for the engine.")
_TEXT = flags.DEFINE_string("text", None, "A text file; unset, and without prompts: Python's language reference.")
_PROMPTS = flags.DEFINE_string("prompts", None, "A file with a text a line, each a sequence of its own.")
_WINDOW = flags.DEFINE_integer("window", 1024, "Tokens a sequence; longer texts are cut into as many as they fill.", 2)
_NUM_WINDOWS = flags.DEFINE_integer("num_windows", None, "Use the first so many; unset: 8 of a text, all prompts.", 1)
_FORMATS = flags.DEFINE_multi_string(
    "kv_cache_dtypes",
    ["bfloat16", "int8", "fp8_e4m3", "fp8_e5m2", "int8,int4", "int4"],
    "Compared with float32: repeat the flag, or separate by ';'. A comma separates formats of keys and of values.",
)
_ROTATIONS = flags.DEFINE_list("kv_rotations", ["none", "hadamard"], "For each format with quantised keys.")
_OUTLIERS = flags.DEFINE_float(
    "key_outliers",
    None,
    "A stress test: scale two channel pairs of all keys up by this, of queries down.",
    1.0,
)
_PLOT = flags.DEFINE_string(
    "plot", None, "Write KL against bytes to this PNG; needs matplotlib (pip install -e '.[plot]')."
)

BASE = "float32"
# Mean KL that formats should stay below on the demo model, set on technical prose. Another text has another KL, so the
# goals stand beside what is found and judge nothing.
GOALS = {
    ("int8", "none"): 9e-4,
    ("int8", "hadamard"): 2.5e-4,
    ("int8,int4", "none"): 7e-3,
    ("int8,int4", "hadamard"): 7e-3,
    ("int4", "none"): 3.5e-2,
    ("int4", "hadamard"): 3.5e-2,
}


def _config() -> dict:
    names = "model text prompts window num_windows kv_cache_dtypes kv_rotations key_outliers plot quick".split()
    return {name: flags.FLAGS[name].value for name in names}


def _formats() -> list[str]:
    given = [name.strip() for value in _FORMATS.value for name in value.split(";")]
    for name in given:
        if not is_kv_cache_dtype(name) or name == "auto":
            told = told_kv_cache_dtypes().replace("auto, ", "")
            raise ConfigError(f"kv_cache_dtypes has {name!r}; there are {told}")
    if flags.FLAGS.quick and not flags.FLAGS["kv_cache_dtypes"].present:
        return ["int8", "int4"]
    return list(dict.fromkeys(given))


def _check_flags() -> None:
    if not _ROTATIONS.value or set(_ROTATIONS.value) - {"none", "hadamard"}:
        raise ConfigError(f"kv_rotations is {','.join(_ROTATIONS.value)!r}; there are none and hadamard")
    if _TEXT.value is not None and _PROMPTS.value is not None:
        raise ConfigError("text and prompts are both given; choose one")
    if _PLOT.value is None:
        return
    if not _PLOT.value.endswith(".png"):
        raise ConfigError(f"plot is {_PLOT.value!r}; its name must end in .png")
    if not pathlib.Path(_PLOT.value).absolute().parent.is_dir():
        raise ConfigError(f"plot is {_PLOT.value!r}, in a folder that does not exist")
    if importlib.util.find_spec("matplotlib") is None:
        raise measurement.AbsentError("matplotlib is not installed (pip install -e '.[plot]')")


def _read(flag: str) -> str:
    path = flags.FLAGS[flag].value
    try:
        return pathlib.Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} is {path!r}, which cannot be read as UTF-8 text: {error}") from error


def _texts() -> tuple[str, list[str]]:
    """What it is, and the texts."""
    if _PROMPTS.value is not None:
        return f"prompts of {pathlib.Path(_PROMPTS.value).name}", [
            line for line in _read("prompts").splitlines() if line.strip()
        ]
    if _TEXT.value is not None:
        return pathlib.Path(_TEXT.value).name, [_read("text")]
    try:
        from pydoc_data.topics import topics  # prose and code of some 100,000 tokens, with every full installation
    except ImportError as error:
        raise measurement.AbsentError(f"Python's documentation is not installed ({error}): give --text") from error
    version = ".".join(platform.python_version_tuple()[:2])
    return f"Python {version}'s language reference (pydoc_data.topics)", ["\n\n".join(topics.values())]


def _windows(texts: list[str], tokenizer: Tokenizer, size: int, limit: int | None) -> list[list[int]]:
    """Sequences of at most `size` tokens, each with what the tokenizer puts in front of a prompt. Of a text longer than
    that the end, which fills no window, is left out: its tokens would see less than those of the others."""
    front = tokenizer.encode("")
    room = max(size - len(front), 1)
    windows: list[list[int]] = []
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        cut = [ids[start : start + room] for start in range(0, max(len(ids) // room, 1) * room, room)]
        windows += [front + part for part in cut if len(front + part) > 1]
        if limit and len(windows) >= limit:
            break
    return windows[:limit]


def _measure(report: measurement.Report) -> None:
    _check_flags()
    formats = _formats()
    text, texts = _texts()
    quiet = report.console.quiet
    logging.set_verbosity(logging.WARNING)
    with contextlib.nullcontext(SilentProgress()) if quiet else ConsoleProgress() as progress:
        source = resolve_model(_MODEL.value, progress=progress)
        config = load_config(source)
        size = 256 if flags.FLAGS.quick and not flags.FLAGS["window"].present else _WINDOW.value
        if size > model_limit(config):
            raise ConfigError(f"window is {size}, and {source.name} takes {model_limit(config)} tokens at most")
        limit = 1 if flags.FLAGS.quick else _NUM_WINDOWS.value or (8 if _PROMPTS.value is None else None)
        windows = _windows(texts, load_tokenizer(source), size, limit)
        if not windows:
            raise ConfigError(f"{text} holds no text of two tokens or more")
        model = load_weights(source, config, dtype="float32", progress=progress)
        if _OUTLIERS.value is not None:
            model = with_key_outliers(model, _OUTLIERS.value)
        # A variant may bring a model of its own: transformed weights, other settings.
        base = KVVariant(BASE, model, BASE)
        models = {name: model if name == "none" else with_rotation(model) for name in _ROTATIONS.value}
        rotations, variants = [], []
        for name in formats:
            for rotation in _ROTATIONS.value if formats_of(name)[0].is_quantized else ["none"]:
                rotations.append(rotation)
                label = name if rotation == "none" else f"{name} {rotation}"
                variants.append(KVVariant(label, models.get(rotation, model), name))
        found: dict[str, list[TokenFigures]] = {variant.name: [] for variant in variants}
        stage, total = "Windows times formats", len(windows) * len(variants)
        for i, window in enumerate(windows):
            all_figures = token_figures(base, variants, window, chunk=min(size, 256), room=size)
            for j, figures in enumerate(all_figures):
                found[variants[j].name].append(figures)
                progress.update(stage, i * len(variants) + j + 1, total)
    num_tokens = sum(map(len, windows))
    goals = GOALS if _MODEL.value == "demo" and _OUTLIERS.value is None else {}
    for variant, rotation in zip(variants, rotations, strict=True):
        quality = summarize(found[variant.name])
        report.add(
            variant.name,
            [quality.kl_mean],
            unit="nats/token",
            metric="kl_mean",
            engine="jaxkv",
            kv_cache_dtype=variant.kv_cache_dtype,
            kl_p99=quality.kl_p99,
            kl_by_window=[float(figures.kl.mean()) for figures in found[variant.name]],
            kv_rotation=rotation,
            kl_goal=goals.get((variant.kv_cache_dtype, rotation)),
            top1_agreement=quality.top1_agreement,
            perplexity=quality.perplexity,
            base_perplexity=quality.base_perplexity,
            perplexity_change=quality.perplexity_change,
            kv_bytes_per_token=kv_bytes_per_token(variant.model.config, variant.kv_cache_dtype),
            text=text,
            num_tokens=num_tokens,
            num_windows=len(windows),
        )
    title = f"{source.name} on {text}: {num_tokens:,} tokens in {len(windows)} windows of up to {size}"
    if _OUTLIERS.value is not None:
        title += f", keys with outliers x{_OUTLIERS.value:g}"
    report.console.print(title, markup=False, highlight=False)
    base_perplexity, base_bytes = report.results[0]["base_perplexity"], kv_bytes_per_token(config, BASE)
    report.console.print(f"with {BASE} keys and values: perplexity {base_perplexity:.3f}, {base_bytes:,} bytes a token")
    _tell(report)
    if _PLOT.value is not None:
        _draw(title, report.results)
        report.files.append(_PLOT.value)


def _tell(report: measurement.Report) -> None:
    table = Table()
    for column in ("K/V", "bytes a token", "perplexity", "change", "KL mean", "KL P99", "same top-1", "KL goal"):
        table.add_column(column, justify="left" if column == "K/V" else "right")
    for result in report.results:
        table.add_row(
            result["name"],
            f"{result['kv_bytes_per_token']:,}",
            f"{result['perplexity']:.3f}",
            f"{result['perplexity_change']:+.3%}",
            f"{result['value']:.1e}",
            f"{result['kl_p99']:.1e}",
            f"{result['top1_agreement']:.2%}",
            f"{result['kl_goal']:.1e}" if result["kl_goal"] else "-",
        )
    report.console.print(table)


def _draw(title: str, results: list[dict]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for result in results:
        size, mean = result["kv_bytes_per_token"], result["value"]
        (point,) = axes.plot(size, mean, "o")
        axes.plot([size, size], [mean, result["kl_p99"]], "-", color=point.get_color(), alpha=0.4)
        axes.annotate(result["name"], (size, mean), xytext=(6, -3), textcoords="offset points")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="KV bytes a token",
        ylabel=f"KL from {BASE} K/V (nats): mean, line to P99",
        title=title,
    )
    axes.title.set_size(9)
    axes.margins(x=0.15)  # room for the names
    ticks = sorted({result["kv_bytes_per_token"] for result in results})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    figure.savefig(_PLOT.value, dpi=120)


if __name__ == "__main__":
    measurement.run("eval_kv_quality", _config, _measure, timed=False)
