"""The rows about a customer service with one system prompt: A1, A4's hit rate, A6, A7, A8 and B11."""

import dataclasses
from collections.abc import Callable
from typing import Any

from articlelib.driver import Served
from articlelib.lab import Lab
from articlelib.workloads import customer_service, session_rate_for
from articlelib.worlds import Setting, World

SHORT, LONG = 30, 500
"""Tokens of the system prompt before and after the second round."""

FIRST = Setting(gpu_memory_utilization=0.85, max_num_seqs=16)
ROUND_1 = dataclasses.replace(FIRST, gpu_memory_utilization=0.90, max_num_seqs=8)
ROUND_3 = dataclasses.replace(ROUND_1, kv_cache_dtype="int8")


@dataclasses.dataclass(frozen=True)
class Service:
    """How many ask and how often.

    Attributes:
      overload: requests a second that no setting carries.
      shrinks: all lengths are divided by it.
      pool: blocks of a real engine, where a simulated one has its own.
    """

    num_sessions: int
    overload: float
    think: float
    shrinks: int = 1
    pool: Callable[[Setting], int] | None = None

    def serve(self, world: World, setting: Setting, system_len: int, requests_per_second: float) -> Served:
        shape = {
            "num_sessions": self.num_sessions,
            "system_len": system_len // self.shrinks,
            "question": (60 // self.shrinks, 260 // self.shrinks),
            "answer": (30 // self.shrinks, 90 // self.shrinks),
            "think": self.think,
        }
        probe = customer_service(world.vocab_size, session_rate=1.0, **shape)
        rate = session_rate_for(probe, requests_per_second)
        sessions = customer_service(world.vocab_size, session_rate=rate, **shape)
        if self.pool is not None:
            setting = dataclasses.replace(setting, num_blocks=self.pool(setting))
        # A real engine serves so few that it waits for all.
        return world.serve(sessions, setting, closes=world.is_simulated)

    def capacity(self, world: World, setting: Setting, system_len: int) -> float:
        """Requests a second under overload."""
        served = self.serve(world, setting, system_len, self.overload)
        # A real engine serves too few to tell a steady state apart.
        return served.steady_requests_per_second if world.is_simulated else served.requests_per_second


# The think time puts the first setting's hit rate where the article has it, under a fifth.
A100 = Service(num_sessions=600, overload=80.0, think=60.0)


SCALED_DOWN = Service(num_sessions=40, overload=1e4, think=1.0, shrinks=4)
"""For a real engine on a CPU."""

ON_GPU = Service(num_sessions=400, overload=1e4, think=2.0)
"""For a real engine on a GPU."""


def service(lab: Lab, world: World) -> Service:
    if world.is_simulated:
        of_world = A100
    elif lab.on_cpu:
        # Enough for the rows to run, too little for all histories.
        of_world = dataclasses.replace(SCALED_DOWN, pool=lambda setting: max(64, lab.serving.num_blocks(setting) // 24))
    else:
        of_world = dataclasses.replace(ON_GPU, pool=lab.serving.num_blocks)
    # Half of the simulated sessions are gone before an engine without prefix caching has ended a request.
    fewer = lab.quick and not world.is_simulated
    return dataclasses.replace(of_world, num_sessions=of_world.num_sessions // 2) if fewer else of_world


def figures(served: Served) -> dict[str, float]:
    return {
        "hit_rate": served.hit_rate,
        "ttft": served.mean("ttft"),
        "ttft_p99": served.percentile("ttft", 99),
        "queue": served.mean("queue_time"),
        "prompt_tokens": served.prompt_tokens / len(served.asked),
        "computed_tokens": served.computed_per_request,
    }


def usual_load(lab: Lab, world: World) -> float:
    """Requests a second: nine tenths of what the first setting carries."""
    key = "usual load", world.name
    if key not in lab.kept:
        lab.kept[key] = 0.9 * service(lab, world).capacity(world, FIRST, SHORT)
    return lab.kept[key]


def block_sizes(lab: Lab, world: World) -> dict[str, Any]:
    """A1: with whole blocks shared only, as in the article's engine, and to the token."""
    load, hit_rates = usual_load(lab, world) / 2, {"whole": [], "to_the_token": []}
    sizes = (8, 16, 32, 128) if lab.quick else (8, 16, 32, 64, 128)
    for block_size in sizes:
        for name, partial in (("whole", False), ("to_the_token", True)):
            setting = dataclasses.replace(ROUND_1, block_size=block_size, share_partial_blocks=partial)
            hit_rates[name].append(service(lab, world).serve(world, setting, LONG, load).hit_rate)
            lab.tick()
    tables = [-(-world.max_model_len // size) for size in sizes]
    return {"block_sizes": list(sizes), "hit_rates": hit_rates, "table_entries": tables}


def two_changes(lab: Lab, world: World) -> dict[str, Any]:
    """A6: utilization and max_num_seqs, together and apart, at the usual load and at a third of it, which every setting
    carries."""
    found: dict[str, Any] = {}
    for name, share in (("busy", 1.0), ("quiet", 1 / 3)):
        load = share * usual_load(lab, world)
        runs = {}
        for utilization in (0.85, 0.90):
            for rows in (16, 8):
                setting = Setting(gpu_memory_utilization=utilization, max_num_seqs=rows)
                runs[f"{utilization:.2f} {rows}"] = figures(service(lab, world).serve(world, setting, SHORT, load))
                lab.tick()
        found[name] = {"load": load, "runs": runs}
    return found


def system_prompts(lab: Lab, world: World) -> dict[str, Any]:
    """A7: what a longer system prompt does to the hit rate, to the tokens computed and to TTFT."""
    load, runs = usual_load(lab, world), {}
    for system_len in (SHORT, LONG):
        # With rows enough: a queue would drown what is asked here.
        setting = dataclasses.replace(ROUND_1, max_num_seqs=32)
        runs[str(system_len)] = figures(service(lab, world).serve(world, setting, system_len, load))
        lab.tick()
    return {"load": load, "runs": runs}


def rounds(lab: Lab, world: World) -> dict[str, Any]:
    """A8: the rounds one on the other; TTFT at the load that the first setting just carries."""
    load, found = usual_load(lab, world), {}
    for name, setting, system_len in (
        ("before", FIRST, SHORT),
        ("round 1", ROUND_1, SHORT),
        ("round 2", ROUND_1, LONG),
        ("round 3", ROUND_3, LONG),
        ("round 3 with 16 rows", dataclasses.replace(ROUND_3, max_num_seqs=16), LONG),
    ):
        busy = service(lab, world).capacity(world, setting, system_len)
        found[name] = figures(service(lab, world).serve(world, setting, system_len, load)) | {
            "requests_per_second": busy
        }
        lab.tick()
    return {"load": load, "rounds": found}


def three_steps(lab: Lab, world: World) -> dict[str, Any]:
    """B11: utilization, prefix caching and int8 KV, one on the other; the system prompt is a long one throughout."""
    plain = Setting(gpu_memory_utilization=0.90, enable_prefix_caching=False)
    found = {}
    for name, setting in (
        ("before", plain),
        ("utilization", raised := dataclasses.replace(plain, gpu_memory_utilization=0.93)),
        ("prefix caching", caching := dataclasses.replace(raised, enable_prefix_caching=True)),
        ("int8", dataclasses.replace(caching, kv_cache_dtype="int8")),
    ):
        found[name] = service(lab, world).capacity(world, setting, LONG)
        lab.tick()
    return {"requests_per_second": found}


def hit_rate_by_format(lab: Lab, world: World) -> dict[str, Any]:
    """A4: what the room that 8-bit formats make does to the hit rate, at one load."""
    load, found = usual_load(lab, world), {}
    for name in ("float16", "int8", "fp8_e4m3"):
        setting = dataclasses.replace(ROUND_1, kv_cache_dtype=name)
        found[name] = service(lab, world).serve(world, setting, LONG, load).hit_rate
        lab.tick()
    return {"hit_rates": found}
