"""Greedy and seeded tokens over the whole product of settings, against naive full recompute.

On a tiny model whose logits depend strongly on the history; `test_exactness_demo.py` has the real one. Unlike in
test_engine_exactness.py no near tie is let pass: the prompts are such that there is none.
"""

import functools
import itertools

import numpy as np
import pytest

from jaxkv.control.engine import Engine
from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.request import Request, SamplingParams
from tests.engine.test_engine_exactness import dense_logits, gumbel
from tests.support.exactness import FACTORS, Setting, run_setting
from tests.support.numpy_sampling import filtered_logits
from tests.support.tiny_models import TINY, random_tokens
from tests.support.tiny_programs import make_engine, tiny_llama

NUM_TOKENS = 10


@functools.lru_cache
def requests() -> tuple[Request, ...]:
    shared = random_tokens(40, seed=11)
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    seeded = SamplingParams(temperature=0.9, top_k=30, seed=7, max_tokens=NUM_TOKENS)
    prompts = (shared + random_tokens(7, seed=12), shared + random_tokens(21, seed=13), random_tokens(16, seed=14))
    return tuple(
        Request(f"{name}{i}", prompt, sampling)
        for i, prompt in enumerate(prompts)
        for name, sampling in (("greedy", greedy), ("seeded", seeded))
    )[:5]


@functools.lru_cache
def expected(request: Request) -> tuple[int, ...]:
    """Token by token, everything recomputed for each; no choice may be close."""
    known, params = request.prompt_token_ids, request.sampling
    for _ in range(params.max_tokens):
        scores = dense_logits(tiny_llama(), known)[-1]
        if params.temperature > 0:
            scores = filtered_logits(scores, params) + gumbel(params.seed, len(known), len(scores))
        second, best = np.sort(scores)[-2:]
        assert best - second > 1e-3, "a near tie: choose another prompt"
        known += (int(scores.argmax()),)
    return known[len(request.prompt_token_ids) :]


def make(setting: Setting) -> Engine:
    return make_engine(
        tiny_llama(),
        block_size=setting.block_size,
        chunk=setting.chunk,
        max_in_flight=setting.max_in_flight,
        scheduler=SchedulerConfig(
            decode_steps=setting.decode_steps,
            enable_prefix_caching=setting.cache != "off",
            vocab_size=TINY["vocab_size"],
        ),
    )


@pytest.mark.parametrize("cache", FACTORS["cache"])
@pytest.mark.parametrize("block_size", FACTORS["block_size"])
def test_no_setting_changes_a_token(block_size, cache):
    levels = FACTORS | {"cache": (cache,), "block_size": (block_size,)}
    settings = [Setting(*values) for values in itertools.product(*levels.values())]
    assert len(settings) == 48
    all_partial = 0
    for setting in settings:
        tokens, engines = run_setting(setting, requests(), make, vocab_size=TINY["vocab_size"])
        for request in requests():
            runs = tokens[request.request_id]
            assert len(runs) == (2 if cache == "in_flight" else 1)
            assert set(runs) == {expected(request)}, (setting, request.request_id)
        # The setting really does what it is there for.
        stats = [engine.stats for engine in engines]
        hits = sum(s.prefix_cache.hit for s in stats)
        all_partial += sum(s.prefix_cache.hit_partial_block for s in stats)
        assert hits > 0 or cache in ("off", "cold")
        assert hits == 0 or cache != "off"
        # Eight steps a call are over before the third call.
        if (
            setting.preempt_every
            and setting.decode_steps == 1
            and (setting.neighbours != "alone" or cache == "in_flight")
        ):
            assert sum(s.preemptions for s in stats) > 0
        assert max(max(s.loop_steps) for s in stats) == setting.decode_steps
    assert all_partial > 0 or cache != "partial"
