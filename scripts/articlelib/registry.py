"""Which measurements the verdicts of each row come from."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from gpulib.step_programs import MODELS

from articlelib import blocks, capacity, customers, load, quality, speed
from articlelib import judge_blocks as block_rules
from articlelib import judge_cache as cache
from articlelib import judge_capacity as room
from articlelib import judge_load as load_rules
from articlelib import judge_speed as pace
from articlelib.lab import Lab
from articlelib.verdict import Verdict

Values = dict[str, Any]
Where = Literal["plan", "basics", "serving", "engine", "layers", "model"]
"""plan: no engine runs. basics, serving: the simulated worlds of the two articles. engine: a real one. layers: real ones of a
few random layers. model: a trained model, or an engine with one."""

REAL = ("engine", "layers", "model")


class Part(NamedTuple):
    """One measurement, and the rules that judge it.

    Attributes:
      rules: by the row that they belong to.
    """

    name: str
    where: Where
    measure: Callable[[Lab], Values]
    rules: dict[str, Callable[[Values], list[Verdict]]]


def _in(world: str, measure: Callable) -> Callable[[Lab], Values]:
    return lambda lab: measure(lab, getattr(lab, world))


def _of_row(row: str, rule: Callable[[Values], list[Verdict]]) -> Callable[[Values], list[Verdict]]:
    return lambda values: rule(values[row])


_PLANNED = {"B2": room.b2, "B3": room.b3, "B4": room.b4, "B5": room.b5, "B6": room.b6, "A4": room.a4_capacity,
            "A14": room.a14_plan}  # fmt: skip

PARTS = (
    Part(
        "capacity",
        "plan",
        lambda lab: capacity.measure(MODELS["llama-2-7b"], MODELS["llama-3-8b"]),
        {row: _of_row(row, rule) for row, rule in _PLANNED.items()} | {"B10": cache.b10_memory},
    ),
    Part("allocations", "plan", blocks.a_million_allocations, {"A12": block_rules.a12}),
    Part("batch limit", "serving", _in("serving", blocks.far_too_many_rows), {"B7": block_rules.b7}),
    Part("memory by length", "serving", _in("serving", blocks.memory_by_length), {"B12": block_rules.b12_memory}),
    Part("replicas", "serving", _in("serving", blocks.replicas), {"B14": block_rules.b14}),
    Part("start lines", "serving", _in("serving", blocks.start_lines), {"A14": block_rules.a14_ran}),
    Part("hit rate by block size", "serving", _in("serving", customers.block_sizes), {"A1": cache.a1}),
    Part("hit rate by format", "serving", _in("serving", customers.hit_rate_by_format), {"A4": cache.a4_hit_rate}),
    Part("goodput by hit rate", "serving", _in("serving", load.goodput_by_hit_rate), {"A5": pace.a5}),
    Part("two changes", "serving", _in("serving", customers.two_changes), {"A6": cache.a6}),
    Part("system prompts", "serving", _in("serving", customers.system_prompts), {"A7": cache.a7}),
    Part("rounds", "serving", _in("serving", customers.rounds), {"A8": pace.a8}),
    Part("three steps", "basics", _in("basics", customers.three_steps), {"B11": pace.b11}),
    Part("hidden tail", "serving", _in("serving", load.hidden_tail), {"A9": load_rules.a9}),
    Part("queueing", "serving", _in("serving", load.queueing), {"A10": load_rules.a10}),
    Part("changing front", "serving", _in("serving", load.changing_front), {"A11": load_rules.a11}),
    Part("restart, simulated", "serving", _in("serving", load.restart), {"A13": load_rules.a13}),
    Part("without a cache, simulated", "basics", _in("basics", speed.without_cache), {"B1": pace.b1}),
    Part("shared prefix, simulated", "basics", _in("basics", speed.shared_prefix), {"B9": pace.b9}),
    Part("documents, simulated", "serving", _in("serving", speed.documents), {"A3": pace.a3}),
    Part("full pool, simulated", "basics", _in("basics", speed.full_pool), {"B10": pace.b10_throughput}),
    Part("without a cache", "engine", _in("engine", speed.without_cache), {"B1": pace.b1}),
    Part("shared prefix", "engine", _in("engine", speed.shared_prefix), {"B9": pace.b9}),
    Part("unique prompts", "engine", _in("engine", speed.unique_prompts), {"A2": pace.a2}),
    Part("documents", "engine", _in("engine", speed.documents), {"A3": pace.a3}),
    Part("restart", "engine", _in("engine", load.restart), {"A13": load_rules.a13}),
    Part("batch limit, for real", "layers", _in("layers", blocks.far_too_many_rows), {"B7": block_rules.b7}),
    Part("throughput by block size", "layers", _in("layers", speed.block_sizes), {"B8": pace.b8}),
    Part("full pool", "layers", _in("layers", speed.full_pool), {"B10": pace.b10_throughput}),
    Part("rounds, scaled down", "layers", _in("layers", customers.rounds), {"A8": pace.a8}),
    Part("eager", "layers", _in("layers", speed.eager), {"B13": pace.b13}),
    Part("8-bit quality", "model", quality.eight_bits, {"A4": cache.a4_quality, "B10": cache.b10_quality}),
    Part("needle", "model", _in("needles", quality.needle), {"B12": block_rules.b12_needle}),
)
