"""RoPE fields of a Hugging Face config.json, in every spelling, to RopeConfig. Imports no jax.

Three spellings mean the same: `rope_theta` beside `rope_scaling: {"type": ...}` (oldest), the same with
`rope_type`, and transformers 5's `rope_parameters`, which holds `rope_theta` too.
"""

from collections.abc import Callable
from typing import Any

from jaxkv.core.errors import CheckpointError
from jaxkv.core.model_config import RopeConfig

# Keys a type must have, and may have, beside its name and rope_theta.
_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
}
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": (),
    "dynamic": (),
    "llama3": (),
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}
ROPE_TYPES = tuple(_REQUIRED)

# Fields of config.json that this module answers for.
ROPE_FIELDS = frozenset(
    {"rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings", "partial_rotary_factor"}
)


def parse_rope(config: dict[str, Any], max_position_embeddings: int, source: str) -> RopeConfig:
    """RopeConfig of a whole config.json.

    Defaults are those of transformers 5.24: theta 10,000; `original_max_position_embeddings` from the top level first,
    then the scaling dict, then max_position_embeddings. `dynamic` always scales from max_position_embeddings.
    Raises CheckpointError, naming `source` and the field, for an unknown type, a missing or an unhonoured key.
    """
    fields = [name for name in ("rope_scaling", "rope_parameters") if config.get(name)]
    if len(fields) == 2 and config["rope_scaling"] != config["rope_parameters"]:
        raise CheckpointError(f"{source}: rope_scaling and rope_parameters differ; remove the one that is wrong.")
    field = fields[0] if fields else "rope_parameters"
    given = config.get(field) or {}
    if not isinstance(given, dict):
        raise CheckpointError(f"{source}: {field} is {given!r}, expected an object.")
    # An explicit null means "not given", as everywhere in these files.
    rope = {key: value for key, value in given.items() if value is not None}

    def fail(key: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{source}: {field}.{key} {problem}")

    kind = _rope_type(rope, fail)
    theta = rope.pop("rope_theta", config.get("rope_theta"))
    theta = 10_000.0 if theta is None else _number(theta, "rope_theta", fail)
    _refuse_partial_rotary(config, rope, source, field)

    original = rope.pop("original_max_position_embeddings", None)
    top_level = config.get("original_max_position_embeddings")
    if kind in ("llama3", "yarn"):
        original = top_level or original or max_position_embeddings
        if not isinstance(original, int) or original <= 0:
            raise fail("original_max_position_embeddings", f"is {original!r}, expected a positive integer.")
    elif kind == "dynamic":
        # transformers reads max_position_embeddings here and ignores the key: a file where they differ is ambiguous.
        if (original or top_level or max_position_embeddings) != max_position_embeddings:
            raise fail(
                "original_max_position_embeddings",
                f"is {original or top_level}, but dynamic scaling starts at max_position_embeddings "
                f"({max_position_embeddings}); make them equal or remove the key.",
            )
        original = max_position_embeddings
    else:
        original = None  # default and linear do not depend on it

    if missing := [key for key in _REQUIRED[kind] if key not in rope]:
        raise fail(missing[0], f"is missing; rope type {kind!r} needs {', '.join(_REQUIRED[kind])}.")
    allowed = _REQUIRED[kind] + _OPTIONAL[kind]
    if unknown := [key for key in rope if key not in allowed]:
        raise fail(unknown[0], f"= {rope[unknown[0]]!r} is not honoured for rope type {kind!r} (known: {allowed}).")

    values = {key: value if key == "truncate" else _number(value, key, fail) for key, value in rope.items()}
    if kind == "yarn":
        values.setdefault("factor", max_position_embeddings / original)
        # transformers reads 0 as "unset" for these.
        values["beta_fast"] = values.get("beta_fast") or 32.0
        values["beta_slow"] = values.get("beta_slow") or 1.0
        if not isinstance(values.get("truncate", True), bool):
            raise fail("truncate", f"is {values['truncate']!r}, expected true or false.")
    if kind == "llama3" and values["high_freq_factor"] == values["low_freq_factor"]:
        raise fail("high_freq_factor", f"equals low_freq_factor ({values['low_freq_factor']}): no interpolation range.")
    if values.get("factor", 1.0) <= 0 or theta <= 0:
        raise fail("factor", f"= {values.get('factor')} and rope_theta = {theta} must both be above 0.")
    return RopeConfig(theta=theta, type=kind, original_max_position_embeddings=original, **values)


def _rope_type(rope: dict[str, Any], fail: Callable[[str, str], CheckpointError]) -> str:
    names = [rope.pop(key) for key in ("rope_type", "type") if key in rope]
    kind = names[0] if names else "default"
    if len(names) == 2 and names[0] != names[1]:
        raise fail("rope_type", f"is {names[0]!r} but type is {names[1]!r}; remove the one that is wrong.")
    if nested := [key for key, value in rope.items() if isinstance(value, dict)]:
        raise fail(nested[0], "gives this layer type its own RoPE, which is not supported: one RoPE for all layers.")
    if kind not in ROPE_TYPES:
        raise fail("rope_type", f"is {kind!r}; supported: {', '.join(ROPE_TYPES)}.")
    return kind


def _refuse_partial_rotary(config: dict[str, Any], rope: dict[str, Any], source: str, field: str) -> None:
    for name, value in (
        ("partial_rotary_factor", config.get("partial_rotary_factor")),
        (f"{field}.partial_rotary_factor", rope.pop("partial_rotary_factor", None)),
    ):
        if value is not None and value != 1:
            raise CheckpointError(f"{source}: {name} = {value} is not honoured: RoPE covers the whole head here.")


def _number(value: Any, key: str, fail: Callable[[str, str], CheckpointError]) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise fail(key, f"is {value!r}, expected a number.")
    return float(value)
