"""Penalties and logit_bias in the whole engine: tokens are those of a full recompute with numpy's penalties, whatever
the chunks, the loop length, the prefix cache, preemption and the company."""

import dataclasses

import pytest

from jaxkv.core.request import Request, SamplingParams
from tests.engine.test_engine_exactness import Setting, check_tokens, run
from tests.support.tiny_models import random_tokens
from tests.support.tiny_programs import make_engine, run_requests, tiny_llama, tokens_of

NUM_TOKENS = 20
KINDS = (
    SamplingParams(temperature=0.0, repetition_penalty=1.4),
    SamplingParams(temperature=0.0, frequency_penalty=2.0, presence_penalty=1.0),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, logit_bias={5: 9.0, 17: 8.5, 60: -100.0}, frequency_penalty=1.5),
    SamplingParams(temperature=0.9, seed=11, repetition_penalty=0.8, frequency_penalty=0.7),
    SamplingParams(temperature=0.8, seed=12, top_p=0.9),
    SamplingParams(
        temperature=0.7,
        seed=13,
        top_k=30,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        logit_bias=((40, 4.0), (41, 4.0)),
    ),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, min_tokens=10, stop_token_ids=tuple(range(0, 60, 2))),
)

SETTINGS = (
    Setting(),
    Setting(16, 7, 1, 1, False),
    Setting(16, 16, 5, 2, True, stagger=3),
    Setting(16, 64, 8, 1, True, num_blocks=14, preempt_every=2),
    Setting(16, 33, 0, 2, False, num_blocks=14, stagger=1, preempt_every=4),
)


def eight_prompts() -> list[tuple[int, ...]]:
    """Of 1 to 150 tokens, two with a common prefix."""
    shared = random_tokens(70, seed=50)
    return [
        random_tokens(15, seed=2), random_tokens(150, seed=4), random_tokens(16, seed=3), random_tokens(1, seed=1),
        shared + random_tokens(20, seed=5), shared + random_tokens(3, seed=6), random_tokens(33, seed=7),
        random_tokens(40, seed=8),
    ]  # fmt: skip


def requests() -> list[Request]:
    return [
        Request(str(i), prompt, dataclasses.replace(KINDS[i], max_tokens=NUM_TOKENS - i))
        for i, prompt in enumerate(eight_prompts())
    ]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_tokens_are_those_of_a_full_recompute(setting):
    config = tiny_llama()
    engine, news = run(config, setting, requests())
    for request in requests():
        tokens = tokens_of(news[request.request_id])
        if not request.sampling.stop_token_ids:
            assert len(tokens) == request.sampling.max_tokens
        assert len(tokens) >= max(1, request.sampling.min_tokens)
        assert check_tokens(config, request.prompt_token_ids, tokens, request.sampling) == 0
    assert (engine.stats.preemptions > 0) == (setting.preempt_every > 0)


def test_they_matter_here():
    """Without them these requests give other tokens, so that the test above is not empty."""
    config, differing = tiny_llama(), 0
    plain = {
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": (), "min_tokens": 0
    }  # fmt: skip
    bare = [dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, **plain)) for r in requests()]
    _, with_them = run(config, Setting(), requests())
    _, without = run(config, Setting(), bare)
    for request, changed in zip(requests(), bare, strict=True):
        differs = tokens_of(with_them[request.request_id]) != tokens_of(without[request.request_id])
        assert differs == (request.sampling != changed.sampling)
        differing += differs
    assert differing == 6


def test_a_rows_next_owner_inherits_nothing():
    """More requests than rows, one after the other on a row that had counted and biased for another."""
    config = tiny_llama()
    engine = make_engine(config)
    for number, request in enumerate(requests() * 2):
        request = dataclasses.replace(request, request_id=str(number))
        tokens = tokens_of(run_requests(engine, [request])[request.request_id])
        assert check_tokens(config, request.prompt_token_ids, tokens, request.sampling) == 0


def test_logprobs_stay_raw_under_penalties():
    config = tiny_llama()
    prompt = random_tokens(15, seed=2)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=1)
    (plain,) = run_requests(make_engine(config), [Request("a", prompt, params)])["a"]
    best = plain.token_ids[0]
    params = dataclasses.replace(params, logit_bias={best: -100.0})
    (biased,) = run_requests(make_engine(config), [Request("a", prompt, params)])["a"]
    assert biased.token_ids[0] != best and biased.logprobs[0].rank == 2
    assert biased.logprobs[0].top == plain.logprobs[0].top
