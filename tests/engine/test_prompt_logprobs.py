"""Log-probabilities of prompt tokens, against the dense model."""

import dataclasses

import numpy as np
import pytest

from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.metrics import MissReason
from jaxkv.core.request import Request, RequestOutput, SamplingParams
from tests.engine.test_engine_exactness import Setting, check_tokens, dense, run
from tests.support.numpy_sampling import log_softmax
from tests.support.tiny_models import random_tokens
from tests.support.tiny_programs import make_engine, run_requests, tiny_llama, tokens_of


def check_prompt_logprobs(prompt: tuple[int, ...], news: list[RequestOutput], num_top: int) -> None:
    """Told once, with the first tokens, and equal to the dense model's."""
    assert [output.prompt_logprobs is not None for output in news] == [True] + [False] * (len(news) - 1)
    entries = news[0].prompt_logprobs
    assert len(entries) == len(prompt) and entries[0] is None
    expected = log_softmax(dense(tiny_llama()).logits(prompt))
    for row, token, entry in zip(expected, prompt[1:], entries[1:], strict=False):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(row[token], abs=1e-4)
        assert entry.rank == (row > row[token]).sum() + 1
        assert [token for token, _ in entry.top] == np.argsort(-row)[:num_top].tolist()
        assert [value for _, value in entry.top] == pytest.approx(np.sort(row)[::-1][:num_top].tolist(), abs=1e-4)


def requests() -> list[Request]:
    """Prompts of 1 to 150 tokens, some with a common prefix; all but two want prompt logprobs."""
    shared = random_tokens(70, seed=50)
    prompts = [
        random_tokens(1, seed=1), random_tokens(150, seed=4), random_tokens(16, seed=3),
        shared + random_tokens(20, seed=5), shared + random_tokens(3, seed=6), shared[:64], random_tokens(2, seed=9),
    ]  # fmt: skip
    wanted = (2, 3, None, 0, 5, None, 1)
    return [
        Request(str(i), prompt, SamplingParams(temperature=0.0, max_tokens=6 + i, prompt_logprobs=wanted[i]))
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize(
    "setting",
    [
        Setting(),
        Setting(16, 7, 1, 1, False),
        Setting(16, 64, 0, 2, True, stagger=2),
        Setting(16, 20, 2, 2, True, num_blocks=14, stagger=1, preempt_every=2),
        Setting(16, 33, 0, 1, False, num_blocks=14, preempt_every=3),
    ],
    ids=str,
)
def test_they_are_the_dense_models_and_change_no_token(setting):
    config = tiny_llama()
    engine, news = run(config, setting, requests())
    for request in requests():
        outputs, count = news[request.request_id], request.sampling.prompt_logprobs
        if count is None:
            assert all(output.prompt_logprobs is None for output in outputs)
        else:
            check_prompt_logprobs(request.prompt_token_ids, outputs, count)
        assert len(tokens_of(outputs)) == request.sampling.max_tokens
        assert check_tokens(config, request.prompt_token_ids, tokens_of(outputs), request.sampling) == 0
    stats = engine.stats.prefix_cache
    assert stats.hit + stats.num_missed == stats.queried
    assert (engine.stats.preemptions > 0) == (setting.preempt_every > 0)


def test_with_max_tokens_of_one_and_sampled_logprobs_too():
    prompt = random_tokens(33, seed=7)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=2, prompt_logprobs=2)
    (output,) = run_requests(make_engine(tiny_llama()), [Request("a", prompt, params)])["a"]
    check_prompt_logprobs(prompt, [output], 2)
    row = log_softmax(dense(tiny_llama()).logits(prompt))[-1]
    assert output.logprobs[0].logprob == pytest.approx(row.max(), abs=1e-4)


def test_a_cached_prompt_is_computed_whole_and_counted_so():
    """Its blocks serve others; what was found and not used is counted as NEEDS_LOGITS."""
    config = tiny_llama()
    engine = make_engine(config, scheduler=SchedulerConfig(vocab_size=config.vocab_size))
    prompt, stats = random_tokens(100, seed=8), engine.stats.prefix_cache
    plain = SamplingParams(temperature=0.0, max_tokens=3)
    asking = dataclasses.replace(plain, prompt_logprobs=1)
    seen = []
    for number, params in enumerate((asking, asking, plain)):
        before = dict(stats.missed)
        news = run_requests(engine, [Request(str(number), prompt, params)])[str(number)]
        missed = {reason: stats.missed[reason] - before[reason] for reason in MissReason}
        seen.append((news[-1].num_cached_tokens, missed[MissReason.NEEDS_LOGITS], sum(missed.values())))
        assert stats.hit + stats.num_missed == stats.queried == 100 * (number + 1)
        if params is asking:
            check_prompt_logprobs(prompt, news, 1)
    assert seen == [(0, 0, 100), (0, 99, 100), (99, 0, 1)]
    assert engine.stats.computed_tokens == 201
