"""n > 1 and forks on the real executor: the tokens of separate requests, with the prompt computed once."""

import dataclasses

import pytest

from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.request import Request, SamplingParams
from tests.engine.test_engine_exactness import check_tokens
from tests.support.tiny_models import random_tokens
from tests.support.tiny_programs import make_engine, run_requests, tiny_llama, tokens_of

SAMPLED = SamplingParams(temperature=1.0, seed=40, max_tokens=20)


def run_all(engine) -> dict[str, tuple[int, ...]]:
    """Tokens of every sequence, by id; invariants are checked after every step."""
    tokens: dict[str, tuple[int, ...]] = {}
    while engine.has_work():
        for output in engine.step():
            tokens[output.request_id] = tokens.get(output.request_id, ()) + output.token_ids
        engine.scheduler.check()
    assert engine.failed is None, engine.failed
    return tokens


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [5, 16, 100])
def test_n_sequences_are_n_separate_requests(caching, length):
    """Prompts shorter than a block, of whole blocks, and over two chunks; on a model whose tokens depend on history."""
    config, prompt = tiny_llama(), random_tokens(length, seed=8)
    scheduler = SchedulerConfig(enable_prefix_caching=caching, vocab_size=config.vocab_size)
    engine = make_engine(config, scheduler=scheduler)
    engine.add(Request("a", prompt, dataclasses.replace(SAMPLED, n=4)))
    tokens = run_all(engine)
    assert engine.stats.computed_tokens == length + 3
    assert len(set(tokens.values())) == 4
    for i, name in enumerate(["a", "a#1", "a#2", "a#3"]):
        alone = dataclasses.replace(SAMPLED, seed=40 + i)
        news = run_requests(make_engine(config, scheduler=scheduler), [Request("alone", prompt, alone)])["alone"]
        assert tokens[name] == tokens_of(news)
        assert check_tokens(config, prompt, tokens[name], alone) == 0


@pytest.mark.parametrize("caching", [True, False])
def test_a_fork_goes_on_from_its_parents_tokens(caching):
    """The parent and its forks write on after the copied block, and none disturbs another."""
    config, prompt = tiny_llama(), random_tokens(37, seed=8)
    greedy = SamplingParams(temperature=0.0, max_tokens=24)
    engine = make_engine(config, scheduler=SchedulerConfig(enable_prefix_caching=caching, decode_steps=2))
    engine.add(Request("a", prompt, greedy))
    delivered: tuple[int, ...] = ()
    while len(delivered) < 5:
        delivered += engine.step()[0].token_ids
    known = engine.fork("a", "greedy", greedy)
    assert known == delivered and engine.fork("a", "sampled", dataclasses.replace(SAMPLED, max_tokens=24)) == known
    tokens = run_all(engine)
    assert engine.stats.computed_tokens == 37 + 2 and engine.stats.prefix_cache.hit_partial_block > 0
    whole = known + tokens["a"]
    assert len(whole) == 24 and known + tokens["greedy"] == whole
    sampled = known + tokens["sampled"]
    assert len(sampled) == 24 and tokens["sampled"] != tokens["greedy"]
    assert check_tokens(config, prompt, whole, greedy) == 0
    assert check_tokens(config, prompt + known, tokens["sampled"], SAMPLED) == 0
