"""Scripted traffic through the real scheduler in simulated time: a good mean hit rate that hides a slow group.

`python tests/support/traffic_scenario.py [empty|calm|hidden_tail|busy]` serves its dashboard on a free port, prints the
address and goes on until its standard input ends.
"""

import asyncio
import dataclasses
import pathlib
import random
import runpy
import socket
import sys
import threading
import time
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from jaxkv.async_engine import AsyncEngine
from jaxkv.constraints.compiler import ConstraintCompiler
from jaxkv.control.engine import Engine
from jaxkv.control.executor import ExecutorLimits
from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.clock import SimulatedClock
from jaxkv.core.request import Request, SamplingParams
from jaxkv.insight.request_log import RequestLog
from jaxkv.insight.traffic import Traffic
from jaxkv.server.app import create_app
from jaxkv.server.history import SECONDS, History
from jaxkv.server.limits import guard
from jaxkv.server.serving import Serving
from jaxkv.simulation.cost_model import ConstantCostModel
from jaxkv.simulation.sim_executor import SimExecutor

SCENARIOS = ("empty", "calm", "hidden_tail", "busy")
LIMITS = ExecutorLimits(
    num_blocks=6001, block_size=16, max_num_seqs=32, max_num_batched_tokens=512, max_prefill_seqs=32,
    max_model_len=16384, max_decode_steps=8,
)  # fmt: skip
COSTS = ConstantCostModel(prefill_token_seconds=0.0001)
SECONDS_OF_TRAFFIC = 840.0
SHOP = tuple(range(1000, 2400))  # an instruction that nearly all requests begin with


@dataclasses.dataclass
class Played:
    """An engine after its traffic, with what watched it; `clock` stands at the last event."""

    engine: Engine
    traffic: Traffic
    history: History
    clock: SimulatedClock


def requests(scenario: str, start: float) -> list[Request]:
    """By arrival. `calm`: the shop's questions. `hidden_tail`: one in a hundred and fifty is a report, long and unlike any
    other. `busy`: more of both than the pool and the device can take, from many callers."""
    rng = random.Random(scenario)
    per_second = {"empty": 0.0, "calm": 1.5, "hidden_tail": 1.5, "busy": 11.0}[scenario]
    report_share = {"hidden_tail": 0.007, "busy": 0.01}.get(scenario, 0.0)
    end = start + SECONDS_OF_TRAFFIC
    found, when = [], end - 150.0 if scenario == "busy" else start
    while per_second and (when := when + rng.expovariate(per_second)) < end:
        number, caller = len(found), rng.choice(["shop", "shop", "shop", "help-desk"])
        prompt = SHOP + tuple(rng.choices(range(30_000), k=rng.randint(20, 200)))
        if rng.random() < report_share:
            caller, prompt = "reports", tuple(rng.choices(range(30_000), k=rng.randint(5000, 8000)))
        elif scenario == "busy" and rng.random() < 0.3:
            caller = f"tenant-{rng.randrange(20)}"
            prompt = tuple(range(number % 40 * 100, number % 40 * 100 + 300)) + prompt[-50:]
        elif scenario == "busy" and rng.random() < 0.02:
            caller = "<script>document.title = 'owned'</script>"
        sampling = SamplingParams(max_tokens=rng.randint(10, 80), ignore_eos=True, seed=number)
        found.append(Request(f"{scenario}-{number}", prompt, sampling, arrival_time=when, caller=caller))
    return found


def play(scenario: str, start: float = 0.0, log: RequestLog | None = None) -> Played:
    """Serve the scenario's requests at their times, on a clock that begins at `start`: to the end, or of `busy` until
    the last has come, with many running and waiting."""
    clock, history = SimulatedClock(start), History()
    limits, costs = LIMITS, COSTS
    if scenario == "busy":
        limits = dataclasses.replace(LIMITS, num_blocks=601)
        costs = dataclasses.replace(COSTS, decode_step_seconds=0.03)
    engine = Engine(
        SimExecutor(limits, costs, clock), SchedulerConfig(vocab_size=32_000, eviction_policy="lru"), clock=clock
    )
    traffic = Traffic(log, max_age=0.0, unix_time=clock.now)
    traffic.attach(engine)
    waiting, next_point = requests(scenario, start)[::-1], start

    def remember(until: float) -> None:
        nonlocal next_point
        while next_point <= until:
            history.add(next_point, engine.snapshot())
            next_point += SECONDS

    while waiting or (engine.has_work() and scenario != "busy"):
        if not engine.has_work():
            clock.advance_to(max(clock.now(), waiting[-1].arrival_time))
        remember(clock.now())
        while waiting and waiting[-1].arrival_time <= clock.now():
            engine.add(waiting.pop())
        engine.step()
        assert engine.failed is None
        remember(clock.now())
    clock.advance_to(max(clock.now(), start + SECONDS_OF_TRAFFIC))
    remember(clock.now())
    return Played(engine, traffic, history, clock)


class ScenarioServer:
    """The application of a played scenario on a port of 127.0.0.1, until the block ends. `around`: what to put in front of
    it."""

    def __init__(self, scenario: str, around: Callable[[ASGIApp], ASGIApp] = guard):
        small = runpy.run_path(str(pathlib.Path(__file__).parents[1] / "small_tokenizers.py"))
        tokenizer = small["byte_level"]()
        self.played = play(scenario, start=time.time() - SECONDS_OF_TRAFFIC)
        constraints = ConstraintCompiler(
            tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=tokenizer.eos_token_ids
        )
        self.engine = AsyncEngine(self.played.engine, tokenizer)
        serving = Serving(
            engine=self.engine, tokenizer=tokenizer, model_names=("simulated-8b",), vocab_size=tokenizer.vocab_size,
            max_model_len=LIMITS.max_model_len, max_logprobs=5, constraints=constraints, traffic=self.played.traffic,
            history=self.played.history,
        )  # fmt: skip
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        app = around(create_app(serving))
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none", lifespan="off"))
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._server.serve(sockets=[self._listener])), daemon=True
        )

    def __enter__(self) -> "ScenarioServer":
        if self.played.engine.num_waiting == 0:
            self.engine.start()
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        self.engine.shutdown()
        self._listener.close()


if __name__ == "__main__":
    with ScenarioServer((sys.argv[1:] or ["hidden_tail"])[0]) as server:
        sys.stdout.write(f"{server.url}/dashboard\n")
        sys.stdout.flush()
        sys.stdin.read()
