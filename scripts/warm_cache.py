#!/usr/bin/env python
"""Brings known prompts into a server's prefix cache, after a restart and before the users come.

    python scripts/warm_cache.py --prompts=system_prompts.jsonl                  # {"messages": [...]} or {"prompt": ...} a line
    python scripts/warm_cache.py --prompts=instructions.txt --base_url=http://127.0.0.1:8000
    python scripts/warm_cache.py --log=requests.jsonl --top=8                    # what most requests of a log begin with
    python scripts/warm_cache.py --prompts=system_prompts.jsonl --measure        # what it saves the first users

Each is sent with one token to generate, over the OpenAI API, to any server. When all have been sent they are sent once more, to
see what is found: a pool too small for all of them has evicted some by then. --measure empties the cache, which others feel.
"""

import asyncio
import os
import pathlib
from typing import Any

import aiohttp
from absl import flags
from benchlib import cache_warming
from benchlib.cache_warming import KnownPrompt, Warmed
from benchlib.serving_client import first_model
from rich.table import Table

from jaxkv import measurement
from jaxkv.core.errors import ConfigError
from jaxkv.core.request_record import RequestRecord

_BASE_URL = flags.DEFINE_string("base_url", "http://127.0.0.1:8000", "Server to warm.")
_NAME = flags.DEFINE_string("served_model_name", None, "Model id in requests; unset takes the first of the server's.")
_PROMPTS = flags.DEFINE_multi_string("prompts", [], "File of prompts; the flag may be repeated.")
_LOG = flags.DEFINE_string("log", None, "Request log with token ids: its most shared prefixes are sent.")
_TOP = flags.DEFINE_integer("top", 16, "Most prefixes of the log.", lower_bound=1)
_MIN_REQUESTS = flags.DEFINE_integer(
    "min_requests", None, "That share a prefix; unset: 2 %, at least 3.", lower_bound=2
)
_MIN_TOKENS = flags.DEFINE_integer("min_tokens", 16, "Shorter prefixes are left out.", lower_bound=1)
_MEASURE = flags.DEFINE_bool("measure", False, "TTFT of the first request behind each prompt, cold and warm.")
_RUNS = flags.DEFINE_integer("runs", 3, "Times that measure does it.", lower_bound=1)


def _config() -> dict[str, Any]:
    names = ("base_url", "served_model_name", "prompts", "log", "top", "min_requests", "min_tokens", "measure", "runs")
    return {name: flags.FLAGS[name].value for name in (*names, "quick")}


def _measure(report: measurement.Report) -> None:
    prompts = _known(report)
    if not prompts:
        raise ConfigError("nothing to send: no prefix of the log is shared by so many requests; lower min_requests")
    asyncio.run(_talk(report, prompts))


def _known(report: measurement.Report) -> list[KnownPrompt]:
    if not _PROMPTS.value and _LOG.value is None:
        raise ConfigError("neither prompts nor log is given: name a file of prompts, or a request log")
    found = [prompt for name in _PROMPTS.value for prompt in cache_warming.read_prompts(pathlib.Path(name))]
    if _LOG.value is not None:
        records = _records(pathlib.Path(_LOG.value))
        least = _MIN_REQUESTS.value or max(3, len(records) // 50)
        prefixes, salted = cache_warming.top_prefixes(
            records, most=_TOP.value, min_requests=least, min_tokens=_MIN_TOKENS.value
        )
        report.console.print(f"{len(records)} requests, {len(prefixes)} prefixes that {least} or more share")
        if salted:
            report.console.print(f"{salted} requests have a salt or no token ids and cannot be warmed from a log")
        found += prefixes
    return found


def _records(path: pathlib.Path) -> list[RequestRecord]:
    records = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                records.append(RequestRecord.from_json(line))
    except OSError as error:
        raise ConfigError(f"log is {str(path)!r}, which cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path.name}, line {number}: {error}") from error
    return records


async def _talk(report: measurement.Report, prompts: list[KnownPrompt]) -> None:
    headers = {"authorization": f"Bearer {key}"} if (key := os.environ.get("OPENAI_API_KEY")) else {}
    base_url, timeout = _BASE_URL.value.rstrip("/"), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        model = _NAME.value or await first_model(session, base_url)
        if not _MEASURE.value:
            _tell(report, await cache_warming.warm(session, base_url, model, prompts))
            return
        ttft: dict[str, list[float]] = {"cold": [], "warm": []}
        for _ in range(1 if flags.FLAGS.quick else _RUNS.value):
            for name in ttft:
                await cache_warming.empty_cache(session, base_url)
                warmed = await cache_warming.warm(session, base_url, model, prompts) if name == "warm" else []
                outcomes = await cache_warming.first_requests(session, base_url, model, prompts)
                report.check("all first requests succeed", sorted({o.error for o in outcomes if o.error}))
                ttft[name].append(sum(outcome.ttft for outcome in outcomes) / len(outcomes))
        _tell(report, warmed)
        results = [
            report.add(f"mean TTFT of the first requests, {name}", values, unit="s", metric="ttft", engine=base_url)
            for name, values in ttft.items()
        ]
        if results[1]["value"] > 0:
            report.ratio("mean TTFT of the first requests: cold / warm", *results, target=None)


def _tell(report: measurement.Report, warmed: list[Warmed]) -> None:
    table = Table(title="In the prefix cache")
    for heading in ("prompt", "tokens", "cached before", "cached now", "seconds"):
        table.add_column(heading, justify="left" if heading == "prompt" else "right")
    for one in warmed:
        numbers = (f"{one.tokens:,}", f"{one.cached_before:,}", f"{one.cached_after:,}", f"{one.seconds:.2f}")
        table.add_row(one.prompt.name, *numbers)
        details = {"tokens": one.tokens, "cached_before": one.cached_before, "seconds": one.seconds}
        report.add(
            one.prompt.name, [one.cached_after], unit="tokens", metric="cached", engine=_BASE_URL.value, **details
        )
    report.console.print(table)
    lost = [one.prompt.name for one in warmed if not one.error and one.cached_after < one.tokens // 2]
    if lost:
        report.console.print(
            f"Not found when all had been sent: {', '.join(lost)}. The pool is too small for all of them (send fewer), or "
            "the server tells no cached tokens."
        )
    report.check("all prompts are answered", [f"{one.prompt.name}: {one.error}" for one in warmed if one.error])


if __name__ == "__main__":
    measurement.run("warm_cache", _config, _measure, timed=False)
