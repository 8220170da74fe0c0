"""Windows: what a running request gives back, and the policy that gives any model one (kv_window, kv_sinks)."""

import numpy as np
import pytest

from jaxkv.core.request import FinishReason, Request, SamplingParams
from jaxkv.models.llama import KVStorage
from tests.support.dense_model import DenseModel
from tests.support.paged_forward import paged_logits
from tests.support.tiny_models import model_of, parse, random_tensors, random_tokens, tiny_config
from tests.support.tiny_programs import make_engine, run_requests, tiny_llama, tokens_of

WINDOW = KVStorage(window=40, num_sinks=5)
MISTRAL = tiny_config(architectures=["MistralForCausalLM"], sliding_window=20, max_position_embeddings=512)


def greedy(name: str, prompt: tuple[int, ...], max_tokens: int) -> Request:
    return Request(name, prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens))


@pytest.mark.parametrize(
    "chunk, num_decoded, window, num_sinks", [(128, 0, 40, 5), (17, 0, 7, 33), (64, 90, 40, 5), (64, 90, 1, 1), (17, 0, 40, 0)]
)
def test_logits_are_those_of_the_dense_model(chunk, num_decoded, window, num_sinks):
    config, storage = tiny_llama(), KVStorage(window=window, num_sinks=num_sinks)
    tensors, tokens = random_tensors(config), random_tokens(130)
    expected = DenseModel(config, tensors, storage).logits(tokens)
    model = model_of(config, tensors, storage=storage)
    np.testing.assert_allclose(paged_logits(model, tokens, chunk=chunk, num_decoded=num_decoded), expected, atol=2e-3)
    unlimited = DenseModel(config, tensors).logits(tokens)
    covered = window + num_sinks
    np.testing.assert_allclose(expected[:covered], unlimited[:covered], atol=1e-9)
    assert np.abs(expected[covered:] - unlimited[covered:]).max() > 0.1


def test_layers_made_for_a_shorter_window_keep_it():
    config = parse(MISTRAL)
    storage = KVStorage(window=40, num_sinks=5)
    model = model_of(config, random_tensors(config), storage=storage)
    assert [(layer.attention.window, layer.attention.num_sinks) for layer in model.layers] == [(20, 0)] * 2
    assert model.angles(np.arange(3)).sink_cos is None


@pytest.mark.parametrize("settings", [{}, {"kv_dtype": "int8"}, {"implementation": "pallas_triton_interpreted"}])
def test_tokens_are_those_of_the_dense_model(settings):
    """Chunks, loops, preemption and neighbours, with blocks given back and taken by others all the time."""
    config = tiny_llama()
    if "implementation" in settings:
        config = parse(tiny_config(num_hidden_layers=1, head_dim=64, num_attention_heads=2, num_key_value_heads=1))
    dense = DenseModel(config, random_tensors(config), WINDOW)
    engine = make_engine(config, storage=WINDOW, chunk=24, num_blocks=15, **settings)
    requests = [greedy(str(i), random_tokens(30 + 37 * i, seed=i), 60) for i in range(4)]
    news = run_requests(engine, requests, stagger=2, preempt_every=9)
    assert engine.stats.preemptions > 2
    retention = engine.scheduler.retention
    assert retention.max_blocks == 1 + 5 and engine.scheduler.blocks.num_free == 14
    for request in requests:
        tokens = tokens_of(news[request.request_id])
        assert len(tokens) == 60
        logits = dense.logits(request.prompt_token_ids + tokens)[len(request.prompt_token_ids) - 1 : -1]
        behind = logits.max(axis=1) - logits[np.arange(60), tokens]
        assert behind.max() < (0.6 if "kv_dtype" in settings else 2e-3)


def test_prompts_share_what_they_see_of_each_other():
    """Of a long prompt only the end and the sinks are needed: the rest may have been overwritten."""
    config = tiny_llama()
    engine = make_engine(config, storage=WINDOW, chunk=64, num_blocks=12)
    prompt = random_tokens(200)
    first = tokens_of(run_requests(engine, [greedy("a", prompt, 8)])["a"])
    blocks = engine.scheduler.blocks
    findable = [blocks.index.find(name) is not None for name in _hashes(engine, prompt)]
    assert findable[0] and not all(findable) and all(findable[-2:])
    news = run_requests(engine, [greedy("b", prompt + first[:3], 8)])["b"]
    assert news[0].num_cached_tokens == 202
    expected = DenseModel(config, random_tensors(config), WINDOW).generate(prompt, 11)
    assert [*first[:3], *tokens_of(news)] == expected


def _hashes(engine, prompt):
    engine.scheduler.add(greedy("probe", prompt, 1))
    (state,) = engine.scheduler.waiting
    engine.scheduler.finish("probe", FinishReason.ABORT)
    return state.block_hashes


def test_native_windows_give_blocks_back():
    """A request three times as long as the pool."""
    config = parse(MISTRAL)
    engine = make_engine(config, chunk=16, num_blocks=5)
    assert engine.scheduler.retention.max_blocks == 4
    prompt = random_tokens(100)
    tokens = tokens_of(run_requests(engine, [greedy("a", prompt, 92)])["a"])
    assert len(prompt) + len(tokens) == 3 * 4 * 16
    logits = DenseModel(config, random_tensors(config)).logits(prompt + tokens)[99:-1]
    assert (logits.max(axis=1) - logits[np.arange(92), tokens]).max() < 2e-3


def test_endless_generation_in_a_fixed_pool():
    """100,000 tokens in 8 blocks; the last ones are those of the dense model. One layer, so that a token's keys and values
    hang on nothing but itself."""
    config = parse(tiny_config(num_hidden_layers=1, vocab_size=32, max_position_embeddings=128))
    count = 100_000
    engine = make_engine(config, storage=WINDOW, chunk=16, num_blocks=9, max_model_len=count + 8)
    engine.add(greedy("a", random_tokens(8, 32), count))
    outputs, most_blocks = [], 0
    while engine.has_work():
        outputs += engine.step()
        for state in engine.scheduler.running:
            most_blocks = max(most_blocks, sum(block != 0 for block in state.blocks))
    tokens = random_tokens(8, 32) + tokens_of(outputs)
    assert len(tokens) == count + 8 and outputs[-1].finish_reason is FinishReason.LENGTH and most_blocks <= 6
    assert engine.stats.preemptions == 0
    dense = DenseModel(config, random_tensors(config), WINDOW)
    for last in range(count - 20, count + 7):  # the token whose successor is looked at
        positions = np.array([*range(5), *range(last - 39, last + 1)])
        logits = dense.logits(tuple(tokens[i] for i in positions), positions)[-1]
        assert logits.max() - logits[tokens[last + 1]] < 0.02
