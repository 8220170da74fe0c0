"""Cascade on the real executor: the tokens of flat attention, whatever comes and goes, and the rows that it served."""

import dataclasses

import numpy as np
import pytest

from jaxkv import program_plan, settings, startup
from jaxkv.control.cascade_cost import ALWAYS
from jaxkv.control.engine import Engine
from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.config import EngineConfig
from jaxkv.core.errors import ConfigError
from jaxkv.core.model_config import ModelConfig
from jaxkv.core.plan import PrefixGroup
from jaxkv.core.request import Request, SamplingParams
from jaxkv.execution import batch
from jaxkv.execution.batch import pack_groups
from pallas_kernels.attention_output import AttentionOutput
from tests.engine.test_engine_exactness import check_tokens
from tests.engine.test_sequences_and_forks import run_all
from tests.support.compile_counter import counting_compilations
from tests.support.tiny_models import random_tokens
from tests.support.tiny_programs import (
    LIMITS,
    compiled_programs,
    make_engine,
    run_requests,
    tiny_llama,
    tokens_of,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
MAX_GROUPS = 2


def cascade_engine(config: ModelConfig, decode_steps: int = 0, **settings) -> Engine:
    scheduler = SchedulerConfig(cascade=ALWAYS, decode_steps=decode_steps, vocab_size=config.vocab_size)
    return make_engine(config, scheduler=scheduler, max_prefix_groups=MAX_GROUPS, **settings)


def prompts() -> list[tuple[int, ...]]:
    """Two groups of two and three, of which one has a longer prefix than the other, and one prompt alone; the rows are
    four, so that they change all the time."""
    long, short = random_tokens(83, seed=20), random_tokens(40, seed=21)
    own = [random_tokens(3 + 9 * i, seed=30 + i) for i in range(6)]
    return [long + own[0], short + own[1], long + own[2], random_tokens(21, seed=22), short + own[4], long + own[5]]


def requests() -> list[Request]:
    """The prompts, greedy and seeded, of other lengths: rows end inside a call."""
    sampled = SamplingParams(temperature=0.8, top_p=0.9, seed=5)
    return [
        Request(str(i), prompt, dataclasses.replace(sampled if i == 4 else GREEDY, max_tokens=24 - 3 * i))
        for i, prompt in enumerate(prompts())
    ]


@pytest.mark.parametrize(
    "settings, stagger, preempt_every",
    [
        ({"decode_steps": 8}, 0, 0),
        ({"decode_steps": 1, "max_in_flight": 1}, 2, 0),
        ({"chunk": 33, "num_blocks": 22}, 1, 3),
    ],
    ids=["all at once", "one step a call", "preempted"],
)
def test_tokens_are_those_of_the_dense_model(settings, stagger, preempt_every):
    config = tiny_llama()
    engine = cascade_engine(config, **settings)
    news = run_requests(engine, requests(), stagger=stagger, preempt_every=preempt_every)
    for request in requests():
        tokens = tokens_of(news[request.request_id])
        assert len(tokens) == request.sampling.max_tokens
        assert check_tokens(config, request.prompt_token_ids, tokens, request.sampling) == 0
    decoded = engine.stats.generated_tokens - len(news)
    assert 20 < engine.stats.cascade_rows < decoded
    assert (engine.stats.preemptions > 0) == ("num_blocks" in settings)


def test_tokens_are_those_of_flat_attention():
    config = tiny_llama()
    flat = run_requests(make_engine(config, max_prefix_groups=MAX_GROUPS), requests())
    engine = cascade_engine(config)
    together = run_requests(engine, requests())
    assert {i: tokens_of(news) for i, news in together.items()} == {i: tokens_of(news) for i, news in flat.items()}
    assert engine.stats.cascade_rows > 0


def test_n_sequences_and_forks():
    """All of a prompt's sequences share it; a fork shares what its parent has generated too."""
    config, prompt = tiny_llama(), random_tokens(37, seed=8)
    sampled = SamplingParams(temperature=1.0, seed=40, max_tokens=20)
    engine = cascade_engine(config, decode_steps=2)
    engine.add(Request("a", prompt, dataclasses.replace(sampled, n=3)))
    tokens = run_all(engine)
    assert engine.stats.cascade_rows > 2 * 19 and len(set(tokens.values())) == 3
    for i, name in enumerate(["a", "a#1", "a#2"]):
        assert check_tokens(config, prompt, tokens[name], dataclasses.replace(sampled, seed=40 + i)) == 0

    engine.add(Request("b", prompt, dataclasses.replace(GREEDY, max_tokens=40)))
    known = ()
    while len(known) < 13:  # more than a block beyond the prompt
        known += engine.step()[0].token_ids
    before = engine.stats.cascade_rows
    assert engine.fork("b", "fork", dataclasses.replace(GREEDY, max_tokens=40)) == known
    tokens = run_all(engine)
    assert tokens["fork"] == tokens["b"] and len(known + tokens["b"]) == 40
    assert check_tokens(config, prompt, known + tokens["b"], GREEDY) == 0
    assert engine.stats.cascade_rows - before > 30


def test_a_wrong_prefix_changes_tokens():
    """The tokens hang on the groups: one block more than is shared, and they differ."""
    config = tiny_llama()
    engine = cascade_engine(config)
    choose = engine.scheduler.prefix_groups.choose

    def too_long(decoding):
        choice = choose(decoding)
        return choice._replace(groups=tuple(g._replace(num_blocks=g.num_blocks + 1) for g in choice.groups))

    engine.scheduler.prefix_groups.choose = too_long
    news = run_requests(engine, requests()[:3])
    with pytest.raises(AssertionError, match="the dense model chooses"):
        for request in requests()[:3]:
            check_tokens(config, request.prompt_token_ids, tokens_of(news[request.request_id]), request.sampling)


def test_layers_with_a_window_stay_flat(monkeypatch):
    """A row's window would cover another part of the prefix than its neighbour's."""
    called = []
    for name in ("decode_attention", "cascade_attention"):
        monkeypatch.setattr(
            batch, name, lambda *args, name=name, **_: called.append(name) or AttentionOutput(None, None)
        )
    for groups, window in ((pack_groups((), max_groups=2, block_size=16), None), (None, None), (..., 64)):
        attention = batch.DecodeAttention(None, None, None, groups=groups, implementation="xla")
        attention.attend(None, None, scale=1.0, window=window)
    assert called == ["cascade_attention", "decode_attention", "decode_attention"]


def test_steady_state_compiles_nothing():
    engine = cascade_engine(tiny_llama())
    with counting_compilations() as count:
        run_requests(engine, requests(), stagger=1)
    assert engine.stats.cascade_rows > 0 and (count.compilations, count.traces) == (0, 0)


@pytest.mark.parametrize(
    "asked, implementation, windows, used",
    [
        ("auto", "pallas_triton", (None, 64), "auto"),
        ("auto", "pallas_triton", (64, 64), "off"),
        ("auto", "xla", (None, None), "off"),
        ("on", "xla", (None, 64), "on"),
        ("off", "pallas_triton", (None, None), "off"),
    ],
)
def test_what_the_setting_means(asked, implementation, windows, used):
    model = dataclasses.replace(tiny_llama(), window_sizes=windows)
    config = EngineConfig(cascade=asked, kv_cache_dtype="int8")
    config = dataclasses.replace(config, cascade=settings.resolve_cascade(config, model, implementation))
    assert config.cascade == used
    cost = startup.cascade_cost(config, model)
    assert (cost is None) == (used == "off") and (cost == ALWAYS) == (used == "on")
    if used == "auto":
        assert cost.token == pytest.approx(2 * 2 * (32 + 2) / 3.87e12)  # of one layer


def test_cascade_on_needs_a_layer_without_a_window():
    model = dataclasses.replace(tiny_llama(), window_sizes=(64, 64))
    with pytest.raises(ConfigError, match="every layer of the model has a sliding window"):
        settings.resolve_cascade(EngineConfig(cascade="on"), model, "xla")


def test_groups_run_in_the_larger_decode_buckets():
    assert program_plan.cascade_buckets((1, 4, 16, 64, 256)) == (16, 64, 256)
    assert program_plan.cascade_buckets((1, 4, 8)) == (8,) and program_plan.cascade_buckets((1, 2)) == (2,)


def test_groups_as_arrays():
    groups = pack_groups((PrefixGroup(3, 2), PrefixGroup(2, 5)), max_groups=4, block_size=16)
    assert groups.cu_rows.tolist() == [0, 3, 5, 5, 5] and groups.prefix_lens.tolist() == [32, 80, 0, 0]
    assert groups.cu_rows.dtype == groups.prefix_lens.dtype == np.int32
    assert groups.kv_starts(7).tolist() == [32, 32, 32, 80, 80, 0, 0]
    assert pack_groups((), max_groups=2, block_size=16).kv_starts(2).tolist() == [0, 0]


def test_the_cache_is_updated_in_place():
    programs = compiled_programs(tiny_llama(), LIMITS.block_size, max_prefix_groups=MAX_GROUPS)
    cache_bytes = sum(2 * layer.k.size * layer.k.dtype.itemsize for layer in programs.abstract_cache.layers)
    flat, cascade = (kind[LIMITS.max_num_seqs].memory_analysis() for kind in (programs.decode, programs.cascade))
    assert cascade.alias_size_in_bytes == flat.alias_size_in_bytes >= cache_bytes
    # Partial outputs and the parts' tiles, 119 KB; a copy of one layer's keys would be another 397 KB.
    assert cascade.temp_size_in_bytes - flat.temp_size_in_bytes < 128 * 1024 < cache_bytes / 8
    assert ("cascade", LIMITS.max_num_seqs) in programs.largest() and list(programs.cascade) == [LIMITS.max_num_seqs]
