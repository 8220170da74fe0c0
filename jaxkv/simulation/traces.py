"""Request traces: when requests came, how long they were, and which prefix blocks they share.

Three public forms and our own are read, plain or gzipped, and told apart by their content:

  Mooncake (FAST'25)   JSON lines: `timestamp` in ms, input_length, output_length, hash_ids of 512-token blocks
  Qwen-Bailian         JSON lines: `timestamp` in seconds, chat_id, ..., hash_ids of 16-token blocks
  Azure LLM inference  CSV: TIMESTAMP (wall clock), ContextTokens, GeneratedTokens; no blocks
  our request log      JSON lines of `core.request_record`, in order of ending: names of full blocks, maybe token ids

A hash id names a block together with everything before it; the last id of a prompt may stand for a partial block, but
for those of the request log.
"""

import csv
import dataclasses
import datetime
import gzip
import json
import math
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from jaxkv.core.errors import UserError
from jaxkv.core.request_record import SCHEMA, read_records

_MOST_TOKENS = 2**24
"""More than any model's context: a longer row is a mistake, and would be replayed for hours."""


class TraceError(UserError):
    """A trace that cannot be read; names file, line and what was expected."""


@dataclasses.dataclass(frozen=True, slots=True)
class TraceRequest:
    """One row of a trace.

    Attributes:
      arrival: seconds since the first row.
      input_length / output_length: tokens.
      block_ids: one for each block of the prompt, ceil(input_length / block_size) of them; None where unknown. Equal
        ids mean equal whole prefixes. Those of a request log are of full blocks, of the output too.
      salt: only requests of the same salt shared blocks.
      token_ids / output_token_ids: of the prompt and of what followed, where the trace has them.
      chat_id / parent_chat_id: conversation links, where the trace has them.
    """

    arrival: float
    input_length: int
    output_length: int
    block_ids: tuple[int, ...] | None = None
    chat_id: int | None = None
    parent_chat_id: int | None = None
    salt: str | None = None
    token_ids: tuple[int, ...] | None = None
    output_token_ids: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Trace:
    """Rows, and how to read them.

    Attributes:
      requests: in the file's order; of a request log by arrival.
      block_size: tokens that one block id stands for; None without block ids.
      is_log: of our own, so all block ids are those of full blocks.
    """

    name: str
    requests: tuple[TraceRequest, ...]
    block_size: int | None
    is_log: bool = False


def read_trace(path: str | pathlib.Path, *, block_size: int | None = None, limit: int | None = None) -> Trace:
    """Read a trace.

    Args:
      block_size: tokens a block id stands for; None takes the power of two that fits every row.
      limit: read only that many rows.

    Raises:
      TraceError: a file of another form, a damaged row, or no block size that fits.
    """
    path = pathlib.Path(path)
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            if SCHEMA in file.readline():
                file.seek(0)
                return _request_log(file, path.name, limit)
            file.seek(0)
            requests = tuple(_rows(file, path.name, limit))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: {error}") from error
    if not requests:
        raise TraceError(f"{path}: the trace has no rows")
    if any(request.block_ids is None for request in requests):
        return Trace(path.name, requests, None)
    if block_size is None:
        return Trace(path.name, requests, _fitting_block_size(requests, path.name))
    for number, row in enumerate(requests, 1):
        fewest = row.input_length // block_size
        if not fewest <= len(row.block_ids) <= fewest + 1:
            raise TraceError(
                f"{path.name}, row {number}: {len(row.block_ids)} hash_ids for {row.input_length} tokens are not of blocks "
                f"of {block_size}: change the block size given for the trace, or leave it unset"
            )
    return Trace(path.name, requests, block_size)


def full_block_ids(trace: Trace) -> Iterator[tuple[int, ...]]:
    """Ids of each prompt's full blocks: what an engine that shares whole blocks can find."""
    for request in trace.requests:
        yield request.block_ids[: request.input_length // trace.block_size]


def _request_log(file: Iterable[str], name: str, limit: int | None) -> Trace:
    """Requests that were served whole, by arrival."""
    try:
        records = read_records(file, name)
    except ValueError as error:
        raise TraceError(str(error)) from error
    # Others were aborted before their prompt was computed, or never admitted.
    records = [record for record in records if record.output_tokens]
    if not records:
        raise TraceError(f"{name}: no request in it was served")
    records.sort(key=lambda record: record.arrival)
    records = records[:limit]
    sizes = {record.block_size for record in records}
    has_tokens = all(record.prompt_token_ids is not None for record in records)
    if len(sizes) > 1 and not has_tokens:
        raise TraceError(
            f"{name}: blocks of {' and '.join(map(str, sorted(sizes)))} tokens in one log, whose names cannot be compared: "
            "split it where the server's block_size was changed, or log token ids"
        )
    start = records[0].arrival
    requests = [
        TraceRequest(
            arrival=record.arrival - start,
            input_length=record.prompt_tokens,
            output_length=record.output_tokens,
            block_ids=tuple([int(block, 16) for block in record.blocks]),
            salt=record.salt,
            token_ids=record.prompt_token_ids if has_tokens else None,
            output_token_ids=record.output_token_ids if has_tokens else None,
        )
        for record in records
    ]
    return Trace(name, tuple(requests), max(sizes) or None, is_log=True)


def _rows(file: TextIO, name: str, limit: int | None) -> Iterator[TraceRequest]:
    first_line = file.readline()
    file.seek(0)
    is_csv = first_line.upper().startswith("TIMESTAMP,")
    if first_line.strip() and not is_csv and not first_line.lstrip().startswith("{"):
        raise TraceError(
            f"{name}: its first line is neither a JSON object nor the header TIMESTAMP,ContextTokens,GeneratedTokens"
        )
    read = _csv_rows if is_csv else _json_rows
    start = None
    for number, row in enumerate(read(file, name)):
        if number == limit:
            return
        start = row.arrival if start is None else start
        yield dataclasses.replace(row, arrival=row.arrival - start)


def _json_rows(file: Iterable[str], name: str) -> Iterator[TraceRequest]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            in_seconds = "chat_id" in row
            yield _row(
                arrival=float(row["timestamp"]) / (1 if in_seconds else 1000),
                input_length=int(row["input_length"]),
                output_length=int(row["output_length"]),
                block_ids=tuple(map(int, row["hash_ids"])) if "hash_ids" in row else None,
                chat_id=row.get("chat_id"),
                parent_chat_id=row.get("parent_chat_id"),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TraceError(
                f"{name}, line {number}: expected a JSON object with timestamp, input_length, output_length and "
                f"hash_ids ({type(error).__name__}: {error})"
            ) from error


def _csv_rows(file: Iterable[str], name: str) -> Iterator[TraceRequest]:
    for number, row in enumerate(csv.DictReader(file), 2):
        try:
            yield _row(
                arrival=_wall_clock_seconds(row["TIMESTAMP"]),
                input_length=int(row["ContextTokens"]),
                output_length=int(row["GeneratedTokens"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(
                f"{name}, line {number}: expected TIMESTAMP,ContextTokens,GeneratedTokens "
                f"({type(error).__name__}: {error})"
            ) from error


def _row(arrival: float, input_length: int, output_length: int, **fields: Any) -> TraceRequest:
    """Raises ValueError for what no request can be."""
    if not math.isfinite(arrival):
        raise ValueError(f"the time is {arrival}")
    if not 1 <= input_length <= _MOST_TOKENS:
        raise ValueError(f"the prompt has {input_length} tokens; it must be 1 to {_MOST_TOKENS:,}")
    if not 0 <= output_length <= _MOST_TOKENS:
        raise ValueError(f"the output has {output_length} tokens; it must be 0 to {_MOST_TOKENS:,}")
    return TraceRequest(arrival, input_length, output_length, **fields)


def _wall_clock_seconds(text: str) -> float:
    """Seconds since 1970 of "2023-11-16 18:15:46.6805900" (any number of digits, with or without an offset; UTC)."""
    whole, _, rest = text.strip().partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    when = datetime.datetime.fromisoformat(whole + rest[len(digits) :])
    if when.tzinfo is None:
        when = when.replace(tzinfo=datetime.UTC)
    return when.timestamp() + (int(digits) / 10 ** len(digits) if digits else 0.0)


def _fitting_block_size(requests: tuple[TraceRequest, ...], name: str) -> int:
    """The largest power of two for which every row has ceil(input_length / block_size) ids."""
    for block_size in (2**power for power in range(12, -1, -1)):
        if all(-(-request.input_length // block_size) == len(request.block_ids) for request in requests):
            return block_size
    raise TraceError(
        f"{name}: no power of two up to 4096 is a block size for which every row has ceil(input_length / block_size) "
        "hash_ids; give block_size"
    )
