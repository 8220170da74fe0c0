#!/usr/bin/env python
"""Load on an OpenAI endpoint: throughput and latencies under the names of `vllm bench serve`, so that results compare line
by line.

    python scripts/bench_serving.py --num_prompts=64 --request_rate=2          # on a server of its own, the demo model
    python scripts/bench_serving.py --base_url=http://127.0.0.1:8000           # on any other
    python scripts/bench_serving.py --dataset_name=multi_turn --num_turns=4 --prefix_len=200
    python scripts/bench_serving.py --dataset_name=trace --trace=mooncake_conversation.jsonl.gz --trace_scale=0.03125

Data sets: random prompts; shared_prefix, prompts behind num_prefixes prefixes; multi_turn, conversations; trace, with the
trace's own arrival times unless request_rate is given. Flags of the engine go to the server that is started.
"""

import asyncio
import contextlib
import datetime
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from absl import flags
from benchlib import serving_metrics
from benchlib import serving_workloads as workloads
from benchlib.serving_client import Outcome, ask, first_model
from rich.progress import Progress

from jaxkv import measurement
from jaxkv.core.errors import ConfigError
from jaxkv.flags import GROUPS, define_engine_flags
from jaxkv.simulation.traces import read_trace

_BASE_URL = flags.DEFINE_string("base_url", None, "Server to ask; unset starts one.")
_ENDPOINT = flags.DEFINE_enum(
    "endpoint", "/v1/completions", ["/v1/completions", "/v1/chat/completions"], "What to ask there."
)
_NAME = flags.DEFINE_string(
    "served_model_name", None, "Model id in requests; unset takes the first that the server has."
)
_DATASET = flags.DEFINE_enum(
    "dataset_name", "random", ["random", "shared_prefix", "multi_turn", "trace"], "What to ask."
)
_NUM_PROMPTS = flags.DEFINE_integer("num_prompts", 100, "Requests in all; of a trace, its first ones.", lower_bound=1)
_INPUT_LEN = flags.DEFINE_integer("input_len", 128, "Tokens of a prompt, without prefix and history.", lower_bound=1)
_OUTPUT_LEN = flags.DEFINE_integer("output_len", 64, "Tokens of an answer.", lower_bound=1)
_RANGE_RATIO = flags.DEFINE_float(
    "range_ratio", 0.0, "Lengths are drawn from (1 - r) to (1 + r) times themselves.", lower_bound=0.0, upper_bound=1.0
)
_PREFIX_LEN = flags.DEFINE_integer("prefix_len", 0, "Tokens of a shared prefix.", lower_bound=0)
_NUM_PREFIXES = flags.DEFINE_integer("num_prefixes", 4, "Prefixes of shared_prefix.", lower_bound=1)
_NUM_TURNS = flags.DEFINE_integer("num_turns", 4, "Requests of a conversation.", lower_bound=1)
_TRACE = flags.DEFINE_string("trace", None, "Mooncake or Qwen-Bailian JSON lines, or Azure CSV.")
_TRACE_SCALE = flags.DEFINE_float("trace_scale", 1.0, "Multiplies a trace's lengths.", lower_bound=0.0)
_TIME_SCALE = flags.DEFINE_float("time_scale", 1.0, "Multiplies a trace's arrival times.", lower_bound=0.0)
_RATE = flags.DEFINE_float("request_rate", math.inf, "Requests (conversations) a second; inf sends all at once.")
_BURSTINESS = flags.DEFINE_float(
    "burstiness", 1.0, "1 is a Poisson process, less comes in bursts, inf on a fixed schedule."
)
_MAX_CONCURRENCY = flags.DEFINE_integer("max_concurrency", None, "Most requests under way at a time.", lower_bound=1)
_IGNORE_EOS = flags.DEFINE_boolean("ignore_eos", True, "Answers have exactly output_len tokens (vLLM's field).")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "Sampling temperature.")
_VOCAB_SIZE = flags.DEFINE_integer("vocab_size", 8192, "Prompts of token ids have ids below it.", lower_bound=128)
_TEXT = flags.DEFINE_boolean("text_prompts", False, "Completions with prompts of English words instead of token ids.")
_WARMUPS = flags.DEFINE_integer("num_warmups", 1, "Requests before, not counted.", lower_bound=0)
_PERCENTILES = flags.DEFINE_list("metric_percentiles", ["99"], "Percentiles of latencies.")
_RESULT = flags.DEFINE_string(
    "result_filename", None, "Write what `vllm bench serve --save-detailed` would to this file."
)
define_engine_flags()

_ROOT = Path(__file__).parents[1]


def _config() -> dict[str, Any]:
    names = [flag.name for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0])]
    values = {name: flags.FLAGS[name].value for name in (*names, "model", "quick")}
    return {name: "inf" if value == math.inf else value for name, value in values.items()}


def _measure(report: measurement.Report) -> None:
    percentiles = _percentiles()
    if _RATE.value <= 0 or _BURSTINESS.value <= 0:
        raise ConfigError(f"request_rate is {_RATE.value:g} and burstiness {_BURSTINESS.value:g}; both must be above 0")
    conversations = _conversations()
    with contextlib.ExitStack() as stack:
        base_url = _BASE_URL.value or stack.enter_context(_own_server(report))
        run = asyncio.run(_drive(report, base_url.rstrip("/"), conversations))
    result = serving_metrics.summary(run.outcomes, run.seconds, percentiles) | run.server_side
    for line in serving_metrics.table(result):
        report.console.print(line, highlight=False, markup=False)
    for key, unit in serving_metrics.units(result).items():
        report.add(key, [result[key]], unit=unit, metric=key, engine=_BASE_URL.value or "jaxkv")
    failures = sorted({outcome.error for outcome in run.outcomes if outcome.error})
    report.check("all requests succeed", failures[:10])
    if _RESULT.value is not None:
        _save({"model_id": run.model} | result | serving_metrics.details(run.outcomes))
        report.files.append(_RESULT.value)


def _percentiles() -> list[float]:
    try:
        found = [float(text) for text in _PERCENTILES.value]
    except ValueError:
        found = [-1.0]
    if any(not 0 <= value <= 100 for value in found):
        raise ConfigError(f"metric_percentiles is {','.join(_PERCENTILES.value)!r}; it must be numbers from 0 to 100")
    return found


def _conversations() -> list[workloads.Conversation]:
    count = min(8, _NUM_PROMPTS.value) if flags.FLAGS.quick else _NUM_PROMPTS.value
    seed = flags.FLAGS.seed
    lengths = workloads.Lengths(_INPUT_LEN.value, _OUTPUT_LEN.value, _PREFIX_LEN.value, _RANGE_RATIO.value)
    own_times = None
    if _DATASET.value == "random":
        prompts = workloads.shared_prefix(count, lengths, 1, seed)
    elif _DATASET.value == "shared_prefix":
        prompts = workloads.shared_prefix(count, lengths, _NUM_PREFIXES.value, seed)
    elif _DATASET.value == "multi_turn":
        prompts = workloads.multi_turn(count, lengths, _NUM_TURNS.value, seed)
    else:
        if _TRACE.value is None:
            raise ConfigError("dataset_name is trace, and trace names no file")
        trace = read_trace(_TRACE.value, limit=count)
        prompts = workloads.of_trace(trace, _TRACE_SCALE.value, seed)
        own_times = [request.arrival * _TIME_SCALE.value for request in trace.requests]
    if own_times is None or not math.isinf(_RATE.value):
        own_times = workloads.arrivals(len(prompts), _RATE.value, _BURSTINESS.value, seed)
    return workloads.scheduled(prompts, own_times)


class _Run(NamedTuple):
    """`seconds` from the start to the last outcome; `server_side` is what the server counted meanwhile."""

    model: str
    outcomes: list[Outcome]
    seconds: float
    server_side: dict[str, float]


async def _drive(report: measurement.Report, base_url: str, conversations: Sequence[workloads.Conversation]) -> _Run:
    headers = {"authorization": f"Bearer {key}"} if (key := os.environ.get("OPENAI_API_KEY")) else {}
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), headers=headers
    ) as session:
        model = _NAME.value or await first_model(session, base_url)
        client = _Client(session, base_url + _ENDPOINT.value, model)
        warm_up = workloads.Turn(tuple(range(_INPUT_LEN.value)), min(4, _OUTPUT_LEN.value))
        for _ in range(_WARMUPS.value):
            outcome = await client.ask([], [], warm_up)
            if outcome.error:
                raise ConfigError(f"{base_url}{_ENDPOINT.value}: a first request failed: {outcome.error}")
        before = await _counters(session, base_url)
        total = sum(len(conversation.turns) for conversation in conversations)
        with Progress(console=report.console, disable=report.console.quiet, transient=True) as bar:
            task = bar.add_task(f"{total} requests", total=total)
            begin = time.perf_counter()
            found = await asyncio.gather(
                *(client.talk(conversation, begin, lambda: bar.advance(task)) for conversation in conversations)
            )
            seconds = time.perf_counter() - begin
        server_side = serving_metrics.server_side(before, await _counters(session, base_url))
        return _Run(model, sum(found, []), seconds, server_side)


class _Client:
    """Has conversations with one model of one endpoint."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str):
        self._session, self._url, self._model = session, url, model
        self._places = asyncio.Semaphore(_MAX_CONCURRENCY.value or sys.maxsize)

    async def talk(
        self, conversation: workloads.Conversation, begin: float, advance: Callable[[], None]
    ) -> list[Outcome]:
        """A turn that fails ends it: the later ones fail with it, as they have no history to stand on."""
        await asyncio.sleep(begin + conversation.arrival - time.perf_counter())
        outcomes: list[Outcome] = []
        for i, turn in enumerate(conversation.turns):
            if outcomes and outcomes[-1].error:
                outcomes.append(Outcome(time.perf_counter(), error="the turn before it failed"))
            else:
                outcomes.append(await self.ask(conversation.turns[:i], outcomes, turn))
            advance()
        return outcomes

    async def ask(self, before: Sequence[workloads.Turn], answers: Sequence[Outcome], turn: workloads.Turn) -> Outcome:
        body = {"model": self._model, "temperature": _TEMPERATURE.value}
        if _IGNORE_EOS.value:
            body["ignore_eos"] = True
        said = [(workloads.text(old.symbols), answer.text) for old, answer in zip(before, answers)]
        if self._url.endswith("/chat/completions"):
            messages = [
                {"role": role, "content": text} for pair in said for role, text in zip(("user", "assistant"), pair)
            ]
            messages.append({"role": "user", "content": workloads.text(turn.symbols)})
            body |= {"messages": messages, "max_completion_tokens": turn.output_len}
        elif said or _TEXT.value or _DATASET.value == "multi_turn":
            history = "".join(f"{question}{answer}\n" for question, answer in said)
            body |= {"prompt": history + workloads.text(turn.symbols), "max_tokens": turn.output_len}
        else:
            body |= {"prompt": workloads.token_ids(turn.symbols, _VOCAB_SIZE.value), "max_tokens": turn.output_len}
        waits = time.perf_counter()
        async with self._places:
            return await ask(self._session, self._url, body, queue_time=time.perf_counter() - waits)


async def _counters(session: aiohttp.ClientSession, base_url: str) -> dict[str, float]:
    try:
        async with session.get(f"{base_url}/metrics") as response:
            return serving_metrics.server_counters(await response.text()) if response.status == 200 else {}
    except (aiohttp.ClientError, OSError):
        return {}


@contextlib.contextmanager
def _own_server(report: measurement.Report) -> Iterator[str]:
    """Address of a server with the engine's flags of this command line."""
    names = [name for names in GROUPS.values() for name in names]
    given = [flags.FLAGS[name].serialize() for name in names if flags.FLAGS[name].present]
    command = [sys.executable, str(_ROOT / "scripts" / "serve.py"), "--port=0", "--log_level=warning", *given]
    report.console.print(f"starting {' '.join(command[1:])} ...", highlight=False, markup=False)
    with tempfile.TemporaryFile("w+") as log:  # a pipe that nobody reads would stop a server with much to say
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process:
            try:
                line = process.stdout.readline()
                if not (ready := re.match(r"jaxkv is ready: (\S+)", line)):
                    process.wait()
                    log.seek(0)
                    raise ConfigError(f"the server did not start: {log.read().strip()[-500:]}")
                yield ready[1]
            finally:
                process.terminate()


def _save(result: dict[str, Any]) -> None:
    head = {
        "date": datetime.datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": "openai" if _ENDPOINT.value == "/v1/completions" else "openai-chat",
        "num_prompts": _NUM_PROMPTS.value,
        "request_rate": "inf" if math.isinf(_RATE.value) else _RATE.value,
        "burstiness": _BURSTINESS.value if math.isfinite(_BURSTINESS.value) else "inf",
        "max_concurrency": _MAX_CONCURRENCY.value,
    }
    Path(_RESULT.value).write_text(json.dumps(head | result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    measurement.run("bench_serving", _config, _measure)
