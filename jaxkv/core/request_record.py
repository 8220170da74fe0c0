"""One served request as the request log holds it: a line of JSON. Written by the server, read by replay and diagnosis.

Texts are not in it. Blocks of tokens are told by hashes; token ids, which can be turned back into text, only on request.
"""

import dataclasses
import hashlib
import json
from typing import Any

from jaxkv.core.metrics import RequestMetrics

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
        for name in ("blocks", "prompt_token_ids", "output_token_ids"):
            if fields.get(name) is not None:
                fields[name] = tuple(fields[name])
        return cls(**fields)


def block_name(block_hash: bytes) -> str:
    """Half of 64 bits' worth of blocks, 4 billion, before two are likely to share a name."""
    return block_hash.hex()[:NAME_DIGITS]


def salt_name(cache_salt: str | None) -> str | None:
    """Tells salts apart without telling them."""
    if cache_salt is None:
        return None
    return hashlib.sha256(cache_salt.encode("utf-8", "surrogatepass")).hexdigest()[:NAME_DIGITS]


_FIELDS = tuple(field.name for field in dataclasses.fields(RequestRecord))
_REQUIRED = {
    field.name
    for field in dataclasses.fields(RequestRecord)
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
}
