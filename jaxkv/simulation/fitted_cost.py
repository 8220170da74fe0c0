"""A cost model made of measured calls: what `scripts/calibrate_cost_model.py` writes, and replays read."""

import dataclasses
import json
import pathlib
from bisect import bisect_left
from typing import Any

from jaxkv.control.executor import ExecutorLimits
from jaxkv.core.errors import ConfigError, UserError
from jaxkv.core.plan import PlanShape

SCHEMA = "jaxkv.cost_model/1"


class CostModelError(UserError):
    """A file that holds no cost model; names it and what was expected."""


@dataclasses.dataclass(frozen=True)
class FittedCostModel:
    """Seconds of a call, in which prefill and decode steps run one after another, padded to the executor's buckets:

        call_seconds
        + prefill_seconds[bucket] + pair_seconds * prefill_pairs                 if it prefills
        + num_steps * (decode_seconds[bucket] + kv_token_seconds * KV tokens)    if it decodes
        + copied_token_seconds * copied_tokens

    Attributes:
      prefill_seconds: by padded prompt tokens; decode_seconds: of one step, by padded rows. Rising.
      about: what was measured: model, machine, error of the fit. Only told.
    """

    call_seconds: float
    prefill_seconds: tuple[tuple[int, float], ...]
    pair_seconds: float
    decode_seconds: tuple[tuple[int, float], ...]
    kv_token_seconds: float
    copied_token_seconds: float = 0.0
    about: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    def seconds(self, shape: PlanShape) -> float:
        seconds = self.call_seconds + self.copied_token_seconds * shape.copied_tokens
        if shape.prefill_tokens:
            seconds += _padded(self.prefill_seconds, shape.prefill_tokens) + self.pair_seconds * shape.prefill_pairs
        if shape.num_steps:
            rows, steps = shape.decode_rows, shape.num_steps
            kv_tokens = shape.decode_kv_tokens + rows * (steps - 1) / 2  # on average: a token more a row and step
            seconds += steps * (_padded(self.decode_seconds, rows) + self.kv_token_seconds * kv_tokens)
        return seconds

    def check(self, limits: ExecutorLimits) -> None:
        """Raises ConfigError where an executor with these limits could be given calls larger than any measured one."""
        for name, measured in (
            ("max_num_seqs", self.decode_seconds),
            ("max_num_batched_tokens", self.prefill_seconds),
        ):
            most, asked = measured[-1][0], getattr(limits, name)
            if asked > most:
                raise ConfigError(
                    f"{name} is {asked}, but the cost model was measured up to {most}: lower {name}, or calibrate with "
                    f"--{name}={asked}"
                )

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)}, indent=2)


def read_cost_model(path: str | pathlib.Path) -> FittedCostModel:
    """What `to_json` wrote. Raises CostModelError."""
    try:
        row = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        if row.pop("schema") != SCHEMA:
            raise ValueError(f"its schema is not {SCHEMA!r}")
        for name in ("prefill_seconds", "decode_seconds"):
            row[name] = tuple([(int(bucket), float(seconds)) for bucket, seconds in row[name]])
            if not row[name] or list(row[name]) != sorted(row[name]):
                raise ValueError(f"{name} must be pairs of size and seconds, sizes rising")
        return FittedCostModel(**row)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CostModelError(f"{path} holds no cost model ({type(error).__name__}: {error})") from error


def _padded(measured: tuple[tuple[int, float], ...], size: int) -> float:
    """Seconds of the smallest bucket that holds `size`."""
    return measured[bisect_left(measured, (size,))][1]
