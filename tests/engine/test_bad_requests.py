"""No value of any field of a request ends the engine, or changes what its neighbours get."""

import dataclasses

import pytest

from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.errors import RequestError
from jaxkv.core.request import Request, SamplingParams
from tests.support.tiny_models import random_tokens
from tests.support.tiny_programs import make_engine, run_requests, tiny_llama, tokens_of

NAN, INF, HUGE = float("nan"), float("inf"), 2**40
REFUSED = [
    {"temperature": NAN}, {"temperature": -1.0}, {"temperature": INF}, {"top_p": 0.0}, {"top_p": NAN}, {"top_k": -2},
    {"min_p": 1.5}, {"stop_token_ids": (HUGE,)}, {"stop_token_ids": (-1,)}, {"stop_token_ids": (True,)},
    {"min_tokens": HUGE}, {"max_tokens": 0}, {"max_tokens": 2.5}, {"n": 0}, {"n": 1.5},
    {"logit_bias": {i % 90: 1.0 for i in range(90)} | {HUGE: 1.0}}, {"logit_bias": ((3, NAN),)},
    {"logit_bias": tuple((i, 1.0) for i in range(301))}, {"logprobs": 1000}, {"prompt_logprobs": -1},
    {"repetition_penalty": 0.0}, {"presence_penalty": NAN}, {"frequency_penalty": HUGE}, {"seed": 1.5},
    {"stop_token_ids": tuple(range(90))},
]  # fmt: skip
SERVED = [
    {"top_k": HUGE}, {"seed": -HUGE}, {"seed": HUGE}, {"temperature": 1.2e-38}, {"temperature": 3.4e38},
    {"max_tokens": HUGE}, {"min_p": 1.0}, {"top_p": 1e-45}, {"top_k": 1}, {"repetition_penalty": 100},
    {"logit_bias": {3: -100, 4: 100}},
]  # fmt: skip


@pytest.fixture(scope="module")
def engine():
    config = tiny_llama()
    return make_engine(config, scheduler=SchedulerConfig(vocab_size=config.vocab_size))


def neighbour(name):
    return Request(name, random_tokens(20, seed=1), SamplingParams(temperature=0.0, max_tokens=24))


def served(engine, *requests):
    return {name: tokens_of(news) for name, news in run_requests(engine, list(requests)).items()}


def test_bad_values_are_refused_beside_a_running_request(engine):
    alone = served(engine, neighbour("alone"))["alone"]
    engine.add(neighbour("beside"))
    outputs = engine.step()
    for number, fields in enumerate(REFUSED):
        sampling = dataclasses.replace(SamplingParams(max_tokens=4), **fields)
        with pytest.raises(RequestError):
            engine.add(Request(f"bad {number}", (1, 2, 3), sampling))
        if "n" not in fields:
            with pytest.raises(RequestError):
                engine.fork("beside", f"bad fork {number}", sampling)
    for field, value in (("prompt_token_ids", (1, HUGE)), ("prompt_token_ids", ()), ("priority", None)):
        with pytest.raises(RequestError):
            engine.add(dataclasses.replace(neighbour("bad"), **{field: value}))
    while engine.has_work():
        outputs += engine.step()
    assert tokens_of(outputs) == alone and engine.failed is None


def test_extreme_values_that_mean_something_are_served(engine):
    alone = served(engine, neighbour("alone"))["alone"]
    requests = [
        Request(f"r{number}", (1, 2, 3), dataclasses.replace(SamplingParams(max_tokens=4, seed=0), **fields))
        for number, fields in enumerate(SERVED)
    ]
    greedy = Request("greedy", (1, 2, 3), SamplingParams(temperature=0.0, max_tokens=4))
    got = served(engine, neighbour("beside"), greedy, *requests)
    assert got["beside"] == alone and len(got) == 2 + len(SERVED) and engine.failed is None
    assert all(0 <= token < tiny_llama().vocab_size for tokens in got.values() for token in tokens)
    assert got["r3"] == got["greedy"]
