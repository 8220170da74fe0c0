"""Greedy and seeded tokens of the demo model: every pair of settings, against naive full recompute."""

import dataclasses
import functools

import numpy as np
import pytest
from allpairspy import AllPairs

from jaxkv.control.engine import Engine
from jaxkv.core.clock import MonotonicClock
from jaxkv.core.config import EngineConfig
from jaxkv.core.request import Request, SamplingParams
from jaxkv.startup import StartedEngine, start_engine
from tests.engine.test_engine_exactness import gumbel
from tests.support.demo import demo_config, demo_dense_model, demo_text_ids
from tests.support.exactness import FACTORS, Setting, run_setting
from tests.support.tiny_programs import LimitedExecutor

NUM_TOKENS = 16
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@functools.lru_cache
def started(block_size: int) -> StartedEngine:
    config = EngineConfig(
        model="demo",
        dtype="float32",
        block_size=block_size,
        max_model_len=256,
        max_num_seqs=4,  # the smallest chunk is 7
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=128 * 2**20,
    )
    return start_engine(config)


def make(setting: Setting) -> Engine:
    base = started(setting.block_size).engine
    limits = dataclasses.replace(base.executor.limits, max_num_batched_tokens=setting.chunk)
    config = dataclasses.replace(
        base.scheduler.config,
        decode_steps=setting.decode_steps,
        enable_prefix_caching=setting.cache != "off",
        eos_token_ids=(),
    )
    return Engine(
        LimitedExecutor(base.executor, limits), config, clock=MonotonicClock(), max_in_flight=setting.max_in_flight
    )


@functools.lru_cache
def requests() -> tuple[Request, ...]:
    ids = demo_text_ids()
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    seeded = SamplingParams(temperature=0.9, seed=7, max_tokens=NUM_TOKENS)
    prompts = {"long": ids[:80], "branch": ids[:50] + ids[100:120], "short": ids[200:216]}
    return (
        Request("long", prompts["long"], greedy),
        Request("branch", prompts["branch"], greedy),
        Request("seeded", prompts["branch"], seeded),
        Request("short", prompts["short"], greedy),
    )


@functools.lru_cache
def check_against_recompute(request: Request, tokens: tuple[int, ...]) -> None:
    """Each token is the best after those before it, by a margin: so token-by-token recomputation gives the same."""
    prompt, params = request.prompt_token_ids, request.sampling
    logits = demo_dense_model().logits(prompt + tokens)[len(prompt) - 1 : -1]
    for i, (scores, token) in enumerate(zip(logits, tokens, strict=True)):
        if params.temperature > 0:
            scores = scores / params.temperature + gumbel(params.seed, len(prompt) + i, len(scores))
        second, best = np.sort(scores)[-2:]
        assert best - second > 1e-3, "a near tie: choose another prompt"
        assert int(scores.argmax()) == token, (request.request_id, i)


def test_no_pair_of_settings_changes_a_token():
    settings = [Setting(*values) for values in AllPairs(list(FACTORS.values()))]
    pairs = {
        (i, a, j, b)
        for s in settings
        for i, a in enumerate(dataclasses.astuple(s))
        for j, b in enumerate(dataclasses.astuple(s))
        if i < j
    }
    levels = list(FACTORS.values())
    assert len(pairs) == sum(len(a) * len(b) for i, a in enumerate(levels) for b in levels[i + 1 :])
    first: dict[str, tuple[int, ...]] = {}
    for setting in settings:
        tokens, _ = run_setting(setting, requests(), make, vocab_size=demo_config().vocab_size)
        for request in requests():
            runs = tokens[request.request_id]
            expected = first.setdefault(request.request_id, runs[0])
            assert len(expected) == NUM_TOKENS
            assert set(runs) == {expected}, (setting, request.request_id)
        print(setting)
    for request in requests():
        check_against_recompute(request, first[request.request_id])
