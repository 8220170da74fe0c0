"""What diagnose_prefix shows: totals, callers, findings, and one request in depth."""

from collections import Counter, defaultdict
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxkv.insight.causes import Cause
from jaxkv.insight.diagnosis import Diagnosis
from jaxkv.insight.packing import unpacked
from jaxkv.insight.token_texts import TokenBytes, as_text

_MOST_CALLERS = 12
_MOST_FINDINGS = 20
_SIDE_TOKENS = 12  # shown of each side around a parting


def print_totals(console: Console, diagnosis: Diagnosis) -> None:
    """Hit rates and lost tokens by caller, and of all."""
    causes = [cause for cause, tokens in diagnosis.causes.items() if tokens]
    table = Table(title="share of prompt tokens: found, or computed because of")
    table.add_column("caller")
    for name in ("requests", "tokens", "found", *(cause.value.replace("_", " ") for cause in causes)):
        table.add_column(name, justify="right")
    for row in (*caller_rows(diagnosis)[:_MOST_CALLERS], _row(diagnosis, "all", range(len(diagnosis.requests)))):
        shares = [row["hit_rate"], *(row["causes"][cause.value] / row["tokens"] for cause in causes)]
        table.add_row(str(row["caller"] or "-"), f"{row['requests']:,}", f"{row['tokens']:,}", *map(_share, shares))
    console.print(table, markup=False)
    pool = diagnosis.pool
    size = "of any number of blocks" if pool.capacity_blocks is None else f"of {pool.capacity_blocks:,} blocks"
    note = " (the most that the log's evictions allow: set capacity_blocks)" if diagnosis.is_estimated else ""
    source = "replayed, one request at a time, through" if diagnosis.is_replayed else "as the server counted; gains for"
    console.print(f"Found: {source} a pool {size}{note} of {diagnosis.log.block_size} tokens.", highlight=False)


def caller_rows(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """One a caller, those with most tokens computed first."""
    numbers: defaultdict[str | None, list[int]] = defaultdict(list)
    for number, request in enumerate(diagnosis.log.requests):
        numbers[request.caller].append(number)
    rows = [_row(diagnosis, caller, own) for caller, own in numbers.items()]
    return sorted(rows, key=lambda row: row["cached"] - row["tokens"])


def _row(diagnosis: Diagnosis, caller: str | None, numbers: Any) -> dict[str, Any]:
    tokens = sum(diagnosis.log.requests[n].num_tokens for n in numbers)
    cached = sum(diagnosis.requests[n].served.cached for n in numbers)
    causes: Counter[str] = Counter({cause.value: 0 for cause in Cause})
    for n in numbers:
        causes.update({cause.value: lost for cause, lost in diagnosis.requests[n].causes.items()})
    return {
        "caller": caller,
        "requests": len(numbers),
        "tokens": tokens,
        "cached": cached,
        "hit_rate": cached / tokens if tokens else 0.0,
        "causes": dict(causes),
    }


def _share(value: float) -> str:
    return f"{100 * value:.1f} %" if value else "-"


def print_findings(console: Console, diagnosis: Diagnosis) -> None:
    if not diagnosis.findings:
        console.print("No fault was found.")
    for number, finding in enumerate(diagnosis.findings[:_MOST_FINDINGS], 1):
        console.print(f"{number}. {finding.cause.replace('_', ' ')}", style="bold", markup=False)
        console.print(f"   {finding.sentence}", markup=False, highlight=False)
    if rest := diagnosis.findings[_MOST_FINDINGS:]:
        tokens = sum(finding.tokens_lost for finding in rest)
        console.print(f"{len(rest):,} more, {tokens:,} tokens together: in the JSON document", highlight=False)


def request_in_depth(
    diagnosis: Diagnosis, number: int, token_bytes: TokenBytes | None, with_texts: bool
) -> dict[str, Any]:
    """One request: where it parts from which earlier one, and why its tokens were computed."""
    log, one = diagnosis.log, diagnosis.requests[number]
    request, parting = log.requests[number], one.parting
    told: dict[str, Any] = {
        "request_id": request.request_id,
        "caller": request.caller,
        "prompt_tokens": request.num_tokens,
        "cached_tokens": one.served.cached,
        "nearest": None if parting.nearest is None else log.requests[parting.nearest].request_id,
        "common_tokens": parting.num_common,
        "common_tokens_of_same_salt": parting.num_same_salt,
        "causes": {cause.value: tokens for cause, tokens in one.causes.items()},
    }
    if one.needed_capacities:
        told["needed_capacity_blocks"] = one.needed_capacities[-1]
    if log.has_tokens and parting.nearest is not None:
        start = parting.num_common * log.symbol_bytes
        first = max(0, start - _SIDE_TOKENS * log.symbol_bytes)
        end = start + _SIDE_TOKENS * log.symbol_bytes
        both = request.prompt, log.requests[parting.nearest].sequence
        parts = [both[0][first:start], both[0][start:end], both[1][start:end]]
        for name, part in zip(("before", "here", "there"), parts, strict=True):
            tokens = unpacked(part)
            if with_texts and token_bytes is not None:
                told[f"text_{name}"] = as_text(tokens, token_bytes)
    return told


def print_request(console: Console, told: dict[str, Any]) -> None:
    table = Table(title=f"request {told['request_id']}", show_header=False)
    for name, value in told.items():
        if name == "causes":
            for cause, tokens in value.items():
                table.add_row(f"computed: {cause.replace('_', ' ')}", f"{tokens:,} tokens")
        else:
            shown = repr(value) if name.startswith("text_") else str("-" if value is None else value)
            table.add_row(name.replace("_", " "), shown)
    console.print(table, markup=False)
