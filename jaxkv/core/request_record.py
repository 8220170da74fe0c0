"""One served request as the request log holds it: a line of JSON. Written by the server, read by replay and diagnosis.

Texts are not in it. Blocks of tokens are told by hashes; token ids, which can be turned back into text, only on request.
"""

import dataclasses
import hashlib
import json
import logging
import math
import types
import typing
from collections.abc import Iterable
from typing import Any

from jaxkv.core.metrics import RequestMetrics

logger = logging.getLogger(__name__)

SCHEMA = "jaxkv.request/1"
NAME_DIGITS = 16


@dataclasses.dataclass(frozen=True)
class RequestRecord:
    """A request from arrival to end. Times are seconds.

    Attributes:
      arrival: Unix time.
      finish_reason: value of a FinishReason.
      caller: who sent it, as the server knows them; None if unknown.
      salt: `salt_name` of its cache_salt; None without one.
      prompt_tokens / output_tokens: lengths; cached_tokens: of the prompt, found at the first admission;
        computed_tokens: run through prefill, again after preemptions included.
      missed: prompt tokens by value of MissReason, at the first admission; nothing where it did not look.
      queue, prefill, decode, ttft, e2e: as in RequestMetrics; None if it ended before.
      itl / itl_max: mean time a token after the first, and the longest gap between two deliveries; None below two.
      block_size: tokens a name in `blocks` stands for.
      blocks: `block_name` of each full block of the prompt and then of the output, without the salt: equal names mean
        equal tokens from the start up to there.
      prompt_token_ids / output_token_ids: None unless asked for.
    """

    request_id: str
    arrival: float
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    max_tokens: int = 0
    missed: dict[str, int] = dataclasses.field(default_factory=dict)
    preemptions: int = 0
    queue: float | None = None
    prefill: float | None = None
    decode: float | None = None
    ttft: float | None = None
    itl: float | None = None
    itl_max: float | None = None
    e2e: float | None = None
    caller: str | None = None
    salt: str | None = None
    block_size: int = 0
    blocks: tuple[str, ...] = ()
    prompt_token_ids: tuple[int, ...] | None = None
    output_token_ids: tuple[int, ...] | None = None

    @property
    def ended(self) -> float | None:
        """Unix time; None if the record does not tell."""
        return None if self.e2e is None else self.arrival + self.e2e

    @property
    def hit_rate(self) -> float:
        """Share of its prompt that was cached, 0 to 1."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @classmethod
    def of(cls, metrics: RequestMetrics, clock_start: float = 0.0) -> "RequestRecord":
        """Without blocks and token ids. `clock_start`: the Unix time at which the engine's clock was 0."""
        return cls(
            request_id=metrics.request_id,
            arrival=clock_start + metrics.arrival,
            finish_reason=metrics.finish_reason.value,
            prompt_tokens=metrics.num_prompt_tokens,
            cached_tokens=metrics.num_cached_tokens,
            computed_tokens=metrics.num_computed_tokens,
            output_tokens=metrics.num_generated_tokens,
            max_tokens=metrics.max_tokens,
            missed={reason.value: count for reason, count in metrics.missed.items()},
            preemptions=metrics.num_preemptions,
            queue=metrics.queue_time,
            prefill=metrics.prefill_time,
            decode=metrics.decode_time,
            ttft=metrics.ttft,
            itl=metrics.tpot,
            itl_max=metrics.longest_gap,
            e2e=metrics.e2e,
            caller=metrics.caller,
            salt=salt_name(metrics.cache_salt),
        )

    def to_json(self) -> str:
        """A line without its end; fields that are None are left out."""
        fields = {name: value for name, value in vars(self).items() if value is not None}
        return json.dumps({"schema": SCHEMA, **fields}, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> "RequestRecord":
        """Raises ValueError for what is no record; unknown fields, of later versions, are passed over."""
        row = json.loads(line)
        if not isinstance(row, dict) or row.get("schema") != SCHEMA:
            raise ValueError(f"expected a JSON object with schema {SCHEMA!r}")
        fields: dict[str, Any] = {name: row[name] for name in _FIELDS if name in row}
        if missing := _REQUIRED - fields.keys():
            raise ValueError(f"the record lacks {', '.join(sorted(missing))}")
        for name, value in fields.items():
            if not _fits(value, _KINDS[name]):
                raise ValueError(f"{name} is {str(value)[:60]!r}; expected {_told(_KINDS[name])}")
            if isinstance(value, list):
                fields[name] = tuple(value)
        if any(len(name) != NAME_DIGITS or not set(name) <= _HEX for name in fields.get("blocks", ())):
            raise ValueError(f"blocks must be names of {NAME_DIGITS} hexadecimal digits")
        return cls(**fields)


def read_records(lines: Iterable[str], name: str) -> list[RequestRecord]:
    """The records of a request log's lines. One that a server or a full disk broke off in writing is told and left out.

    Raises:
      ValueError: a line that is JSON and no record, or no record at all. It names `name`, the log, and the line.
    """
    records, broken = [], 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            records.append(RequestRecord.from_json(line))
        except json.JSONDecodeError:
            broken = number
            logger.warning("%s, line %d is no JSON, as one broken off in writing is: left out", name, number)
        except ValueError as error:
            raise ValueError(f"{name}, line {number}: no record of a request log ({error})") from error
    if not records:
        raise ValueError(f"{name}, line {broken}: no JSON" if broken else f"{name}: the log has no requests")
    return records


def block_name(block_hash: bytes) -> str:
    """Half of 64 bits' worth of blocks, 4 billion, before two are likely to share a name."""
    return block_hash.hex()[:NAME_DIGITS]


def salt_name(cache_salt: str | None) -> str | None:
    """Tells salts apart without telling them."""
    if cache_salt is None:
        return None
    return hashlib.sha256(cache_salt.encode("utf-8", "surrogatepass")).hexdigest()[:NAME_DIGITS]


def _fits(value: Any, kind: Any) -> bool:
    """Whether JSON's value is one of a field's type; whole numbers are not negative, the others finite."""
    inner = typing.get_args(kind)
    if isinstance(kind, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if typing.get_origin(kind) is tuple:  # thousands of values: their types are looked at, not each of them
        if not isinstance(value, list) or not {type(one) for one in value} <= {inner[0]}:
            return False
        return inner[0] is not int or min(value, default=0) >= 0
    if typing.get_origin(kind) is dict:
        return isinstance(value, dict) and all(_fits(one, inner[1]) for one in value.values())
    if kind is int:
        return type(value) is int and value >= 0
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    return isinstance(value, kind)


def _told(kind: Any) -> str:
    words = {int: "a whole number of at least 0", float: "a finite number", str: "a string"}
    return words.get(kind) or str(kind).replace(", ...", "")


_HEX = set("0123456789abcdef")
_KINDS = typing.get_type_hints(RequestRecord)
_FIELDS = tuple(field.name for field in dataclasses.fields(RequestRecord))
_REQUIRED = {
    field.name
    for field in dataclasses.fields(RequestRecord)
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
}
