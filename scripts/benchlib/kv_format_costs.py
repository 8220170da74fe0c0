"""What storing K/V in fewer bits costs, as measured on the demo model: README, "What a smaller cache costs"."""

import math
from typing import NamedTuple


class FormatCost(NamedTuple):
    """Against float32 K/V: change of the perplexity in percent, and mean KL divergence of the next token."""

    perplexity_percent: float
    kl: float


# By kv_cache_dtype with the default rotation. scripts/eval_kv_quality.py measures other models.
FORMAT_COSTS = {
    "float32": FormatCost(0.0, 0.0),
    "bfloat16": FormatCost(0.007, 2.2e-5),
    "int8": FormatCost(0.003, 1.6e-4),
    "fp8_e4m3": FormatCost(0.437, 3.7e-3),
    "fp8_e5m2": FormatCost(1.324, 1.5e-2),
    "int8,int4": FormatCost(0.353, 3.8e-3),
    "int4": FormatCost(2.868, 2.8e-2),
}


def kl_of(kv_cache_dtype: str) -> float:
    """Infinite where nothing was measured."""
    cost = FORMAT_COSTS.get(kv_cache_dtype)
    return math.inf if cost is None else cost.kl


def told(kv_cache_dtype: str) -> str:
    cost = FORMAT_COSTS.get(kv_cache_dtype)
    if cost is None:
        return f"{kv_cache_dtype}: its quality was not measured"
    return f"{kv_cache_dtype}: perplexity {cost.perplexity_percent:+.3f} %, KL {cost.kl:.1e}"
