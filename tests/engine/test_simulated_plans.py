"""The simulated engine plans what the real one plans: same scheduler, and a device that hides nothing from it.

Arrivals are replayed by step index. C is fixed, since the adaptive one looks at how long steps take.
"""

import dataclasses

import pytest

from jaxkv.control.engine import Engine
from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.clock import SimulatedClock
from jaxkv.core.request import Request, SamplingParams
from jaxkv.simulation.cost_model import ConstantCostModel
from jaxkv.simulation.sim_executor import SimExecutor
from tests.support.tiny_models import random_tokens
from tests.support.tiny_programs import make_engine, run_requests, tiny_llama, tokens_of


class Recorder:
    """An executor that keeps the plans."""

    def __init__(self, executor):
        self.limits, self.plans, self._executor = executor.limits, [], executor

    def submit(self, plan):
        self.plans.append(plan)
        return self._executor.submit(plan)


def load():
    """Shared prefixes, prompts of several chunks, fewer rows than requests, stops at ids."""
    common = random_tokens(70, seed=1)
    requests = []
    for i in range(14):
        prompt = common[: 20 + 9 * (i % 5)] + random_tokens(1 + 7 * i % 40, seed=i)
        stops = (3, 11, 40) if i % 3 == 0 else ()
        sampling = SamplingParams(temperature=float(i % 2), seed=i, max_tokens=3 + 5 * i % 50, stop_token_ids=stops)
        requests.append(Request(str(i), prompt, sampling))
    return requests


@pytest.mark.parametrize("decode_steps, stagger, num_blocks", [(1, 0, 97), (4, 2, 97), (8, 3, 14), (8, 0, 12)])
def test_plans_are_equal(decode_steps, stagger, num_blocks):
    config = SchedulerConfig(decode_steps=decode_steps)
    real = make_engine(tiny_llama(), num_blocks=num_blocks, scheduler=config)
    real.executor = recorded = Recorder(real.executor)
    news = run_requests(real, load(), stagger=stagger)
    known = {request.request_id: request.prompt_token_ids + tokens_of(news[request.request_id]) for request in load()}

    clock = SimulatedClock()
    executor = Recorder(SimExecutor(real.executor.limits, ConstantCostModel(), clock, sequences=known))
    simulated = Engine(executor, dataclasses.replace(real.scheduler.config), clock=clock)
    again = run_requests(simulated, load(), stagger=stagger)
    assert executor.plans == recorded.plans and len(recorded.plans) > 20
    assert {key: tokens_of(value) for key, value in again.items()} == {
        key: tokens_of(value) for key, value in news.items()
    }
    assert num_blocks > 14 or real.stats.preemptions > 0
    assert simulated.stats.preemptions == real.stats.preemptions
