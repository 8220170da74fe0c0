#!/usr/bin/env python
"""Why the prefix cache missed: where requests part from earlier ones, what changes there, and what mending it gains.

    python scripts/diagnose_prefix.py                                        # made-up traffic with planted faults
    python scripts/diagnose_prefix.py --log=requests.jsonl --model=demo      # serve.py --request_log=... --request_log_tokens
    python scripts/diagnose_prefix.py --prompts=prompts.jsonl --caller=web --show_text
    python scripts/diagnose_prefix.py --log=requests.jsonl --request_id=cmpl-1 --timeline=run.png

Gains are computed: the log is replayed, as it is and mended, one request at a time through the engine's own prefix
sharing and block manager. Needs no weights and no GPU. Texts are shown with --show_text only.
"""

import dataclasses
import pathlib

from absl import flags
from benchlib.diagnosis_tables import caller_rows, print_findings, print_request, print_totals, request_in_depth
from benchlib.planted_faults import NUM_ROUNDS, POOL, Example, make_example
from benchlib.prompt_files import read_prompts

from jaxkv import measurement
from jaxkv.console import ConsoleProgress
from jaxkv.control.eviction_choice import EVICTION_POLICIES
from jaxkv.core.errors import ConfigError
from jaxkv.core.progress import SilentProgress
from jaxkv.core.request_record import RequestRecord
from jaxkv.insight.diagnosis import Diagnosis, compare
from jaxkv.insight.prompt_log import PromptLog, log_of_records, read_records, token_log
from jaxkv.insight.prompt_replay import Pool
from jaxkv.insight.proposals import Settings, find_faults
from jaxkv.insight.token_texts import TokenBytes
from jaxkv.loading.resolve import resolve_model
from jaxkv.tokenization.tokenizer import Tokenizer, load_tokenizer

_LOG = flags.DEFINE_string("log", None, "Request log of serve.py: with token ids, or with block names for less.")
_PROMPTS = flags.DEFINE_string("prompts", None, "JSON lines with prompt or messages, caller, arrival, cache_salt.")
_MODEL = flags.DEFINE_string("model", None, "Whose tokenizer to use (no weights are read); demo with --prompts.")
_CALLER = flags.DEFINE_string("caller", None, "Diagnose the requests of this caller alone, among themselves.")
_REQUEST = flags.DEFINE_string("request_id", None, "Show this request in depth: by the id of its record or its response.")
_CAPACITY = flags.DEFINE_integer(
    "capacity_blocks", None, "Usable blocks of the pool; unset: told by the log, or no bound.", 1
)
_BLOCK = flags.DEFINE_integer("block_size", None, "Tokens a block; unset: that of the log, or 16.", 1)
_PARTIAL = flags.DEFINE_bool("share_partial_blocks", True, "Replay with copies of blocks' matching heads.")
_POLICY = flags.DEFINE_enum("eviction_policy", "lru", EVICTION_POLICIES, "Replay with this policy.")
_TEXT = flags.DEFINE_bool("show_text", False, "Show texts of prompts; needs a tokenizer.")
_FINDINGS = flags.DEFINE_integer("most_replayed", 8, "Findings whose gain is computed, those with most tokens lost.", 0)
_TOKENS = flags.DEFINE_integer(
    "replay_tokens", 8_000_000, "Replay the last requests of so many tokens or block names.", 1
)
_PLOT = flags.DEFINE_string("plot", None, "Draw tokens by cause, and gains, to this PNG; needs '.[plot]'.")
_TIMELINE = flags.DEFINE_string("timeline", None, "Draw each request's time to this PNG; needs '.[plot]'.")
_MOST_IN_TIMELINE = flags.DEFINE_integer("timeline_requests", 200, "Draw the last so many requests.", 1)


@dataclasses.dataclass(frozen=True)
class _Input:
    log: PromptLog
    records: list[RequestRecord]
    token_bytes: TokenBytes | None
    pool: Pool
    example: Example | None = None


def _config() -> dict:
    names = (
        "log", "prompts", "model", "caller", "request_id", "capacity_blocks", "block_size", "share_partial_blocks",
        "eviction_policy", "show_text", "most_replayed", "replay_tokens", "plot", "timeline", "quick",
    )  # fmt: skip
    return {name: flags.FLAGS[name].value for name in names}


def _measure(report: measurement.Report) -> None:
    _check_flags()
    given = _read()
    number = _number_of_request(given.log)
    with ConsoleProgress() if not report.console.quiet else _NoProgress() as progress:
        diagnosis = compare(given.log, given.pool, given.token_bytes, progress)
        settings = Settings(_FINDINGS.value, _TOKENS.value, with_texts=_TEXT.value)
        diagnosis = find_faults(diagnosis, settings, given.token_bytes, progress)
    _tell(report, diagnosis, given)
    if number is not None:
        told = request_in_depth(diagnosis, number, given.token_bytes, _TEXT.value)
        print_request(report.console, told)
        report.add("request", [told["cached_tokens"]], unit="tokens", metric="request", engine="log", **told)
    if given.example is not None:
        for planted in given.example.planted:
            report.check(f"{planted.cause} of {planted.caller}", planted.problems(list(diagnosis.findings)))
        report.check("callers without a fault", _accused(diagnosis, given.example))
    _draw(report, diagnosis, given)


class _NoProgress(SilentProgress):
    def __enter__(self) -> SilentProgress:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _check_flags() -> None:
    if _LOG.value is not None and _PROMPTS.value is not None:
        raise ConfigError("log and prompts are both set; diagnose one of them")
    for name in ("plot", "timeline"):
        measurement.check_plot(flags.FLAGS[name].value, flag=name)
    if _PROMPTS.value is not None and _TIMELINE.value is not None:
        raise ConfigError("timeline is set, but prompts have no times: give a log of served requests")
    if _TEXT.value and _LOG.value is not None and _MODEL.value is None:
        raise ConfigError("show_text is set, but the log has no texts: set model to the one whose tokenizer it used")


def _read() -> _Input:
    pool = Pool(_CAPACITY.value, _PARTIAL.value, _POLICY.value)
    if _PROMPTS.value is not None:
        tokenizer = _tokenizer(_MODEL.value or "demo")
        log = token_log(read_prompts(_PROMPTS.value, tokenizer), _BLOCK.value or 16)
        return _Input(_of_caller(log), [], tokenizer.token_bytes.__getitem__, pool)
    if _LOG.value is not None:
        records = read_records(_LOG.value)
        token_bytes = _tokenizer(_MODEL.value).token_bytes.__getitem__ if _MODEL.value is not None else None
        return _Input(_of_caller(log_of_records(records, _BLOCK.value)), records, token_bytes, pool)
    example = make_example(NUM_ROUNDS // 2 if flags.FLAGS.quick else NUM_ROUNDS)
    if _CAPACITY.value is None:
        pool = dataclasses.replace(POOL, eviction_policy=_POLICY.value)
    log = _of_caller(log_of_records(example.records, _BLOCK.value))
    return _Input(log, example.records, example.tokenizer.token_bytes, pool, None if _CALLER.value else example)


def _tokenizer(model: str) -> Tokenizer:
    return load_tokenizer(resolve_model(model))


def _of_caller(log: PromptLog) -> PromptLog:
    if _CALLER.value is None:
        return log
    requests = tuple([request for request in log.requests if request.caller == _CALLER.value])
    if not requests:
        names = sorted({str(request.caller) for request in log.requests})[:8]
        raise ConfigError(f"caller is {_CALLER.value!r}, of whom there is no request; there are: {', '.join(names)}")
    return dataclasses.replace(log, requests=requests)


def _tell(report: measurement.Report, diagnosis: Diagnosis, given: _Input) -> None:
    print_totals(report.console, diagnosis)
    print_findings(report.console, diagnosis)
    if not diagnosis.log.has_tokens:
        report.console.print("The log has block names only, so what changes behind a parting cannot be told.")
    elif given.token_bytes is None:
        report.console.print("Without model, spans have no labels and texts are not compared.")
    report.config |= {
        "block_size": diagnosis.log.block_size,
        "pool_blocks": diagnosis.pool.capacity_blocks,
        "pool_is_estimated": diagnosis.is_estimated,
        "hits_are_replayed": diagnosis.is_replayed,
    }
    for name, value, unit in (
        ("hit_rate", diagnosis.hit_rate, "hits/token"),
        ("requests", len(diagnosis.requests), "requests"),
        ("prompt_tokens", diagnosis.tokens, "tokens"),
    ):
        report.add(name, [value], unit=unit, metric=name, engine="log")
    for cause, tokens in diagnosis.causes.items():
        report.add(
            f"computed: {cause.value}", [tokens], unit="tokens", metric="computed", engine="log", cause=cause.value
        )
    for row in caller_rows(diagnosis):
        report.add(
            f"caller {row['caller']}", [row.pop("hit_rate")], unit="hits/token", metric="hit_rate", engine="log", **row
        )
    for number, finding in enumerate(diagnosis.findings, 1):
        told = finding.as_json()
        report.add(f"finding {number}", [told["tokens_lost"]], unit="tokens", metric="finding", engine="replay", **told)


def _number_of_request(log: PromptLog) -> int | None:
    """Of the request to show in depth, if there is one to show."""
    if _REQUEST.value is None:
        return None
    ids = [request.request_id for request in log.requests]
    # A response's id names all its sequences, each of which has a record: chatcmpl-a1b2 is a1b2-0 there, and a1b2-1, ...
    bare = _REQUEST.value.removeprefix("chatcmpl-").removeprefix("cmpl-")
    for wanted in (_REQUEST.value, f"{bare}-0"):
        if wanted in ids:
            return ids.index(wanted)
    raise ConfigError(f"request_id is {_REQUEST.value!r}, which is not in the log; there are {', '.join(ids[:3])}, ...")


def _accused(diagnosis: Diagnosis, example: Example) -> list[str]:
    """Callers without a fault who are said to have one."""
    accused = []
    for finding in diagnosis.findings:
        if finding.cause in ("changed_text", "reordered", "token_boundary"):
            names = {name for name, _, _ in finding.callers} & set(example.clean_callers)
            accused += [f"{name} is told to have {finding.cause}" for name in sorted(names)]
    return accused


def _draw(report: measurement.Report, diagnosis: Diagnosis, given: _Input) -> None:
    if _PLOT.value is not None or _TIMELINE.value is not None:
        from benchlib.diagnosis_plots import plot_diagnosis, plot_timeline
    if _PLOT.value is not None:
        plot_diagnosis(diagnosis, pathlib.Path(_PLOT.value))
        report.files.append(_PLOT.value)
    if _TIMELINE.value is not None:
        ids = {request.request_id for request in diagnosis.log.requests}
        records = [record for record in given.records if record.request_id in ids]
        plot_timeline(records[-_MOST_IN_TIMELINE.value :], pathlib.Path(_TIMELINE.value))
        report.files.append(_TIMELINE.value)


if __name__ == "__main__":
    measurement.run("diagnose_prefix", _config, _measure, timed=False)
