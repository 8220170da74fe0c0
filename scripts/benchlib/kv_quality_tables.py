"""Tables and plot of eval_kv_quality's results."""

from rich.console import Console
from rich.table import Table

BASE = "float32"


def print_tables(console: Console, results: list[dict]) -> None:
    kinds = dict.fromkeys(result["text_kind"] for result in results if result["metric"] == "kl_mean")
    for kind in kinds:
        _print_kl(console, kind, [r for r in results if r["metric"] == "kl_mean" and r["text_kind"] == kind])
    generated = [result for result in results if result["metric"] == "agreement_length"]
    if generated:
        _print_generated(console, generated)


def _table(title: str | None, *columns: str) -> Table:
    table = Table(title=title)
    for column in ("K/V", *columns):
        table.add_column(column, justify="left" if column == "K/V" else "right")
    return table


def _print_kl(console: Console, kind: str, results: list[dict]) -> None:
    title = None if kind == "text" else f"{kind}: {results[0]['num_tokens']:,} tokens of answers"
    columns = ["bytes a token", "perplexity", "change", "KL mean", "KL P99", "same top-1"]
    has_goals = any(result["kl_goal"] for result in results)
    table = _table(title, *columns, *["KL goal"] * has_goals)
    for result in results:
        goal = [f"{result['kl_goal']:.1e}" if result["kl_goal"] else "-"] * has_goals
        table.add_row(
            result["name"],
            f"{result['kv_bytes_per_token']:,}",
            f"{result['perplexity']:.3f}",
            f"{result['perplexity_change']:+.3%}",
            f"{result['value']:.1e}",
            f"{result['kl_p99']:.1e}",
            f"{result['top1_agreement']:.2%}",
            *goal,
        )
    console.print(table)


def _print_generated(console: Console, results: list[dict]) -> None:
    first = results[0]
    title = f"greedy: {first['num_prompts']} texts of {first['max_tokens']} tokens, {first['num_summaries']} summaries"
    table = _table(
        title, "same as float32 for", "all the same", "ROUGE-L to float32", "summaries: ROUGE-L to references", "lost"
    )
    for result in results:
        lost = result.get("rouge_l_loss")
        error = result.get("rouge_l_loss_error")
        table.add_row(
            result["name"],
            f"{result['agreement_mean']:.0f} tokens",
            f"{result['identical']} of {result['num_prompts']}",
            f"{result['rouge_l_to_float32']:.3f}",
            "-" if lost is None else f"{result['rouge_l_to_references']:.4f}",
            "-" if lost is None else f"{lost:+.4f}" + (f" ± {error:.4f}" if error is not None else ""),
        )
    console.print(table)


def draw(path: str, title: str, results: list[dict]) -> None:
    """KL against bytes, to a PNG."""
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
    figure.savefig(path, dpi=120)
