"""Tables, results and curves of planned points."""

from collections.abc import Iterator

from rich.table import Table

from benchlib.capacity_points import Planner, Point
from jaxkv import measurement
from jaxkv.capacity import Capacity, mean_waste
from jaxkv.execution.memory import GiB

Pair = tuple[str, str]
"""A model and a device, by name."""

_HEADINGS = ("weights", "temporaries", "KV pool", "B a token", "tokens")
_NOTE = "Sizes in GiB. Last columns: requests of so many tokens that the cache holds; at most max_num_seqs run at once."


def tell_formats(
    report: measurement.Report, planner: Planner, pairs: list[Pair], formats: list[str], lengths: list[int]
) -> None:
    """Every model on every device in every format, the one that the flags ask for among them.

    Raises ConfigError when the engine would refuse all of them: then a setting is at fault, not a device or a format.
    """
    table = _table(title(planner), "model", "device", "format", *_HEADINGS, *_thousands(lengths))
    planned = []
    for pair in pairs:
        base = planner.capacity(Point(*pair))
        asked_for = base is not None and base.config.kv_cache_dtype not in formats
        points = [Point(*pair)] if asked_for or not formats else []
        for point in (*points, *(Point(*pair, "kv_cache_dtype", name) for name in formats)):
            if (capacity := _add(report, planner, point, lengths)) is not None:
                planned.append(capacity)
                table.add_row(*pair, capacity.config.kv_cache_dtype, *_cells(capacity, lengths))
        table.add_section()
    if not planned:
        raise next(iter(planner.refused.values()))
    report.console.print(table)
    report.console.print(_NOTE)
    _tell_refused(report, planner)
    if any(capacity.capped for capacity in planned):
        report.console.print("* as many blocks as the kernels for this format can address: memory stays free")


def tell_start_lines(report: measurement.Report, planner: Planner, pair: Pair) -> None:
    """What the engine writes when it starts with these flags."""
    if (capacity := planner.capacity(Point(*pair))) is not None:
        kv_format, attention = capacity.config.kv_cache_dtype, capacity.config.attention_implementation
        report.console.print(f"The engine's start lines, with kv_cache_dtype {kv_format} and attention by {attention}:")
        for line in capacity.memory.lines():
            report.console.print(f"  {line}", markup=False, highlight=False)


def tell_sweep(
    report: measurement.Report, planner: Planner, pair: Pair, name: str, values: list, lengths: list[int]
) -> None:
    """One setting's values; of block_size also what it wastes."""
    waste = [f"waste at {length}" for length in _thousands(lengths)] if name == "block_size" else []
    table = _table(f"{' on '.join(pair)} by {name}", name, *_HEADINGS, *_thousands(lengths), *waste)
    told = len(planner.refused)
    for point in _swept(planner, pair, name, values):
        if (capacity := _add(report, planner, point, lengths)) is not None:
            shares = [mean_waste(point.value) / length for length in lengths] if waste else []
            table.add_row(str(point.value), *_cells(capacity, lengths), *(f"{share:.1%}" for share in shares))
    _tell_refused(report, planner, told)
    if table.row_count:
        report.console.print(table)
        if waste:
            report.console.print("waste: (block_size - 1) / 2 tokens of a request's last block, against its length")


def draw(path: str, planner: Planner, pairs: list[Pair], sweeps: dict[str, list], lengths: list[int]) -> None:
    """A panel a setting: tokens in the cache of every model on every device; and what block_size wastes."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import StrMethodFormatter

    panels = [name for name, values in sweeps.items() if values]
    panels += ["waste"] if sweeps["block_size"] else []
    columns = 3
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5 * columns, 4 * rows), layout="constrained")
    for place, name in enumerate(panels, 1):
        axes = figure.add_subplot(rows, columns, place)
        if name == "waste":
            for length in lengths:
                shares = [100 * mean_waste(size) / length for size in sweeps["block_size"]]
                axes.plot(sweeps["block_size"], shares, "o-", markersize=3, label=f"{length:,} tokens a request")
            axes.set(xlabel="block_size", ylabel="waste (% of a request's tokens)", yscale="log")
        else:
            for pair in pairs:
                planned = [(p.value, planner.capacity(p)) for p in _swept(planner, pair, name, sweeps[name])]
                if curve := [(value, capacity.memory.num_tokens) for value, capacity in planned if capacity]:
                    style = "o:" if name == "kv_cache_dtype" else "o-"  # formats have no order
                    axes.plot(*zip(*curve), style, markersize=3, label=" on ".join(pair))
            axes.set(xlabel=name, ylabel="tokens in the cache", ylim=(0, None))
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        if name in ("max_num_seqs", "shards", "block_size", "waste"):
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.grid(alpha=0.3)
        if axes.lines and (name == "waste" or place == 1):
            axes.legend(fontsize="small")
    figure.suptitle(title(planner))
    figure.savefig(path, dpi=110)


def title(planner: Planner) -> str:
    shards = f", one of {planner.shards} devices" if planner.shards > 1 else ""
    bound = "" if planner.compiler else "; temporaries are at least, cache and requests at most so large"
    share = f"gpu_memory_utilization {planner.config.gpu_memory_utilization:g}"
    if all(device.is_cpu for device in planner.devices.values()):
        share = "the memory that is free now"
    return f"{share}{shards}{bound}"


def _swept(planner: Planner, pair: Pair, name: str, values: list) -> Iterator[Point]:
    """None where the setting means nothing: a CPU has no share to give."""
    if not (name == "gpu_memory_utilization" and planner.devices[pair[1]].is_cpu):
        for value in values:
            yield Point(*pair, name, value)


def _thousands(lengths: list[int]) -> list[str]:
    return [f"{length:,}" for length in lengths]


def _table(text: str, *headings: str) -> Table:
    table = Table(title=text)
    for heading in headings:
        words = heading in ("model", "device", "format")
        table.add_column(heading, justify="left" if words else "right", no_wrap=True)
    return table


def _cells(capacity: Capacity, lengths: list[int]) -> list[str]:
    memory, needs = capacity.memory, capacity.memory.needs
    numbers = [capacity.concurrency(length) for length in lengths]
    return [
        *(f"{size / GiB:.2f}" for size in (needs.weights, needs.temporaries, memory.kv_bytes)),
        f"{needs.kv_per_token:,}",
        f"{memory.num_tokens:,}{'*' if capacity.capped else ''}",
        *("-" if number is None else f"{number:,.1f}" for number in numbers),
    ]


def _tell_refused(report: measurement.Report, planner: Planner, first: int = 0) -> None:
    for point, error in list(planner.refused.items())[first:]:
        report.console.print(f"{point.name}: {error}", markup=False, style="yellow")


def _add(report: measurement.Report, planner: Planner, point: Point, lengths: list[int]) -> Capacity | None:
    """The point's result; None when the engine would refuse it."""
    if (capacity := planner.capacity(point)) is None:
        report.skip(point.name, str(planner.refused[point]), engine=point.device, model=point.model, swept=point.swept)
        return None
    config, memory = capacity.config, capacity.memory
    report.add(
        point.name,
        [memory.num_tokens],
        unit="tokens",
        metric="kv_cache_tokens",
        engine=point.device,
        model=point.model,
        swept=point.swept,
        available_bytes=memory.available,
        weight_bytes=memory.needs.weights,
        kv_bytes_per_token=memory.needs.kv_per_token,
        temporary_bytes=memory.needs.temporaries,
        temporaries="compiler" if memory.needs.compiled else "lower_bound",
        decode_state_bytes=memory.needs.decode_state,
        kv_bytes=memory.kv_bytes,
        num_blocks=memory.num_blocks,
        capped=capacity.capped,
        block_size=memory.block_size,
        waste_tokens=mean_waste(memory.block_size),
        max_model_len=memory.max_model_len,
        max_concurrency=memory.max_concurrency,
        concurrency={str(length): capacity.concurrency(length) for length in lengths},
        gpu_memory_utilization=config.gpu_memory_utilization,
        kv_cache_dtype=config.kv_cache_dtype,
        max_num_seqs=config.max_num_seqs,
        shards=planner.shards_of(point),
        attention_implementation=config.attention_implementation,
    )
    return capacity
