"""Masks in the whole engine: tokens are those of a full recompute with the same masks, whatever the chunks, the loop
length, the overlap, preemption and the company; and the company does not wait for them."""

import dataclasses

import pytest

from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.request import FinishReason, Request, SamplingParams
from jaxkv.core.token_constraint import allows, mask_of
from tests.engine.test_engine_exactness import Setting, check_tokens, run
from tests.engine.test_penalties_exactness import SETTINGS, eight_prompts
from tests.support.constraints import OutputDependent, constraint_for
from tests.support.tiny_models import random_tokens
from tests.support.tiny_programs import make_engine, run_requests, tiny_llama, tokens_of

NUM_TOKENS = 20
VOCAB = tiny_llama().vocab_size
KINDS = (
    SamplingParams(temperature=0.0, bad_words=("stands for OutputDependent",)),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, allowed_token_ids=tuple(range(3, VOCAB, 7))),
    SamplingParams(temperature=0.9, seed=11, bad_words=("stands for OutputDependent",), repetition_penalty=1.3),
    SamplingParams(temperature=0.8, seed=12, top_p=0.9),
    SamplingParams(temperature=1.0, seed=13, allowed_token_ids=(5, 9), top_k=1),
    SamplingParams(temperature=0.0, bad_words=("stands for OutputDependent",), logit_bias={4: 20.0}),
    SamplingParams(temperature=0.7, seed=14, repetition_penalty=1.2),
)


def requests() -> list[Request]:
    batch = []
    for i, (prompt, params) in enumerate(zip(eight_prompts(), KINDS, strict=True)):
        params = dataclasses.replace(params, max_tokens=NUM_TOKENS - i)
        batch.append(Request(str(i), prompt, params, constraint=constraint_for(params, VOCAB)))
    return batch


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_tokens_are_those_of_a_full_recompute(setting):
    config = tiny_llama()
    engine, news = run(config, setting, requests())
    for request in requests():
        tokens = tokens_of(news[request.request_id])
        assert len(tokens) == request.sampling.max_tokens
        constraint = constraint_for(request.sampling, VOCAB)
        assert check_tokens(config, request.prompt_token_ids, tokens, request.sampling, constraint) == 0
    assert (engine.stats.preemptions > 0) == (setting.preempt_every > 0)


def test_they_matter_here():
    """Without them these requests give other tokens, so that the test above is not empty."""
    bare = [
        dataclasses.replace(
            r, constraint=None, sampling=dataclasses.replace(r.sampling, bad_words=(), allowed_token_ids=None)
        )
        for r in requests()
    ]
    _, with_them = run(tiny_llama(), Setting(), requests())
    _, without = run(tiny_llama(), Setting(), bare)
    for request in requests():
        differs = tokens_of(with_them[request.request_id]) != tokens_of(without[request.request_id])
        assert differs == request.sampling.has_constraint


def test_the_company_goes_on_in_loops():
    """A row that needs a mask for each token takes one step a call; its neighbour takes all eight in the same calls."""
    engine = make_engine(tiny_llama(), scheduler=SchedulerConfig(decode_steps=8))
    limited = SamplingParams(temperature=0.0, max_tokens=10, bad_words=("x",))
    free = SamplingParams(temperature=0.0, max_tokens=81)
    batch = [
        Request("limited", random_tokens(15, seed=2), limited, constraint=OutputDependent(VOCAB)),
        Request("free", random_tokens(16, seed=3), free),
    ]
    news = run_requests(engine, batch)
    assert [len(output.token_ids) for output in news["limited"]] == [1] * 10
    assert [len(output.token_ids) for output in news["free"]] == [1] + [8] * 10
    alone = run_requests(make_engine(tiny_llama(), scheduler=SchedulerConfig(decode_steps=8)), batch[1:])
    assert tokens_of(news["free"]) == tokens_of(alone["free"])


def test_a_fixed_mask_goes_in_loops_too():
    engine = make_engine(tiny_llama(), scheduler=SchedulerConfig(decode_steps=8))
    params = SamplingParams(temperature=0.0, max_tokens=17, allowed_token_ids=(7, 8, 9))
    request = Request("a", random_tokens(15, seed=2), params, constraint=constraint_for(params, VOCAB))
    news = run_requests(engine, [request])["a"]
    assert [len(output.token_ids) for output in news] == [1, 8, 8] and set(tokens_of(news)) <= {7, 8, 9}


def test_a_dead_end_ends_one_request_and_no_other():
    engine = make_engine(tiny_llama())
    params = SamplingParams(temperature=0.0, max_tokens=10, bad_words=("x",))
    prompt = random_tokens(15, seed=2)
    batch = [
        Request("ends", prompt, params, constraint=OutputDependent(VOCAB, longest=4)),
        Request("goes on", prompt, params, constraint=OutputDependent(VOCAB)),
        Request("free", prompt, SamplingParams(temperature=0.0, max_tokens=10)),
    ]
    news = run_requests(engine, batch)
    last = news["ends"][-1]
    assert (last.finish_reason, last.error, len(tokens_of(news["ends"]))) == (FinishReason.ERROR, "nowhere to go", 4)
    assert tokens_of(news["ends"]) == tokens_of(news["goes on"])[:4]
    assert len(tokens_of(news["goes on"])) == len(tokens_of(news["free"])) == 10
    assert engine.failed is None and engine.kv_cache_usage == 0


def test_a_rows_next_owner_inherits_no_mask():
    config = tiny_llama()
    engine = make_engine(config)
    for number, request in enumerate(requests() * 2):
        request = dataclasses.replace(request, request_id=str(number))
        tokens = tokens_of(run_requests(engine, [request])[request.request_id])
        constraint = constraint_for(request.sampling, VOCAB)
        assert check_tokens(config, request.prompt_token_ids, tokens, request.sampling, constraint) == 0


def test_sequences_of_a_request_have_their_own_masks():
    config = tiny_llama()
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=12, bad_words=("x",))
    request = Request("a", random_tokens(40, seed=8), params, constraint=OutputDependent(VOCAB))
    engine = make_engine(config)
    engine.add(request)
    tokens = {sequence.request_id: () for sequence in request.sequences()}
    while engine.has_work():
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
        engine.scheduler.check()
    assert len(set(tokens.values())) == 3
    for sequence in request.sequences():
        constraint = OutputDependent(VOCAB)
        ids = tokens[sequence.request_id]
        assert check_tokens(config, request.prompt_token_ids, ids, sequence.sampling, constraint) == 0


@pytest.mark.parametrize("num_tokens", [0, 5])
def test_min_tokens_bow_to_a_mask_that_leaves_nothing_but_the_end(num_tokens):
    class Ends:
        is_fixed, output = False, ()

        def mask(self):
            return mask_of((3,) if len(self.output) >= num_tokens else (3, 8, 9), VOCAB)

        def accept(self, token_ids):
            self.output = (*self.output, *token_ids)

        def copy(self):
            return Ends()

    params = SamplingParams(temperature=0.0, max_tokens=30, min_tokens=20, stop_token_ids=(3,), bad_words=("x",))
    news = run_requests(make_engine(tiny_llama()), [Request("a", random_tokens(9), params, constraint=Ends())])["a"]
    tokens = tokens_of(news)
    assert len(tokens) == num_tokens + 1 and tokens[-1] == 3 and set(tokens[:-1]) <= {8, 9}
    assert news[-1].finish_reason is FinishReason.STOP


def test_the_mask_has_the_last_word():
    """After biases that pull the other way."""
    params = SamplingParams(temperature=0.0, max_tokens=6, allowed_token_ids=(7, 8), logit_bias={9: 100.0, 7: -100.0})
    request = Request("a", random_tokens(9), params, constraint=constraint_for(params, VOCAB))
    tokens = tokens_of(run_requests(make_engine(tiny_llama()), [request])["a"])
    assert tokens == (8,) * 6 and allows(request.constraint.mask(), 7)
