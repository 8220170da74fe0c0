"""Tokens of the whole engine on the real executor, against a dense model that recomputes everything.

Whatever the chunks, the loop length, the overlap, the prefix cache, the pool and the company: each token must be the
one that the dense model chooses after the tokens before it. Where its two best lie within 1e-4 either counts; that must
be rare.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxkv.control.engine import Engine
from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.clock import MonotonicClock
from jaxkv.core.model_config import ModelConfig
from jaxkv.core.request import FinishReason, Request, SamplingParams
from jaxkv.core.token_constraint import TokenConstraint, allows
from jaxkv.execution import compile_watch
from jaxkv.execution.jax_executor import JaxExecutor
from tests.support.config_matrix import MATRIX
from tests.support.dense_model import DenseModel
from tests.support.numpy_sampling import adjusted_logits, filtered_logits, log_softmax
from tests.support.tiny_models import parse, random_tensors, random_tokens
from tests.support.tiny_programs import make_engine, make_programs, run_requests, tiny_llama, tokens_of, weights

NEAR_TIE = 1e-4
NUM_TOKENS = 24


@functools.lru_cache
def dense(config: ModelConfig) -> DenseModel:
    return DenseModel(config, random_tensors(config))


@functools.lru_cache(maxsize=4096)
def dense_logits(config: ModelConfig, token_ids: tuple[int, ...]) -> np.ndarray:
    return dense(config).logits(token_ids)


@functools.lru_cache(maxsize=4096)
def gumbel(seed: int, position: int, vocab_size: int) -> np.ndarray:
    """The noise that a seeded request's token at `position` is drawn with: the engine's stated rule."""
    key = jax.random.fold_in(jax.random.key(np.uint32(seed % 2**31)), position)  # seeds are taken modulo 2**31
    return np.asarray(jax.random.gumbel(key, (vocab_size,)))


def check_tokens(
    config: ModelConfig,
    prompt: tuple[int, ...],
    tokens: tuple[int, ...],
    params: SamplingParams,
    constraint: TokenConstraint | None = None,
) -> int:
    """Every token is the dense model's choice or a near tie with it, among what `constraint` allows; returns the number of
    near ties."""
    logits = dense_logits(config, prompt + tokens)[len(prompt) - 1 : -1]
    near_ties = 0
    for i, (row, token) in enumerate(zip(logits, tokens, strict=True)):
        forbidden = params.stop_token_ids if i < params.min_tokens else ()
        scores, slack = adjusted_logits(row, params, prompt, tokens[:i], forbidden), NEAR_TIE
        if constraint is not None:
            mask = constraint.mask()
            scores = np.where([allows(mask, id) for id in range(len(row))], scores, -np.inf)
            constraint.accept((token,))
        if params.temperature > 0:
            noise = gumbel(params.seed, len(prompt) + i, len(row))
            scores, slack = filtered_logits(scores, params) + noise, NEAR_TIE / params.temperature
        best = int(scores.argmax())
        assert scores[token] >= scores[best] - slack, f"token {i}: got {token}, the dense model chooses {best}"
        near_ties += token != best
    return near_ties


def requests() -> list[Request]:
    """Eight prompts of 1 to 150 tokens, two pairs with a common prefix; greedy and seeded."""
    shared = random_tokens(70, seed=50)
    prompts = [
        random_tokens(1, seed=1), random_tokens(15, seed=2), random_tokens(16, seed=3), random_tokens(150, seed=4),
        shared + random_tokens(20, seed=5), shared + random_tokens(3, seed=6), random_tokens(33, seed=7), shared[:64],
    ]  # fmt: skip
    sampling = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=123),
        SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=2**32 - 5),
    ]
    return [
        Request(str(i), prompt, dataclasses.replace(sampling[i % 3], max_tokens=NUM_TOKENS - i))
        for i, prompt in enumerate(prompts)
    ]


@dataclasses.dataclass(frozen=True)
class Setting:
    block_size: int = 16
    chunk: int = 64
    decode_steps: int = 0
    max_in_flight: int = 2
    prefix_caching: bool = True
    num_blocks: int = 97
    stagger: int = 0
    preempt_every: int = 0

    def __str__(self) -> str:
        names = {
            "block_size": "P", "chunk": "T", "decode_steps": "C", "max_in_flight": "F", "num_blocks": "N",
            "stagger": "s", "preempt_every": "p",
        }  # fmt: skip
        return "-".join(f"{short}{getattr(self, name)}" for name, short in names.items()) + "-pc" * self.prefix_caching


SETTINGS = (
    Setting(),
    Setting(8, 64, 1, 1, False),
    Setting(8, 5, 3, 2, True, stagger=2),
    Setting(8, 16, 8, 2, False, num_blocks=26, preempt_every=3),
    Setting(16, 4, 1, 2, True, stagger=1),
    Setting(16, 7, 2, 1, True),
    Setting(16, 16, 5, 2, True, stagger=3),
    Setting(16, 64, 8, 1, True, num_blocks=13, preempt_every=2),
    Setting(16, 33, 0, 2, True, num_blocks=13, stagger=1, preempt_every=5),
    Setting(16, 64, 0, 1, False, num_blocks=13, preempt_every=2),
    Setting(32, 64, 4, 2, True),
    Setting(32, 9, 0, 2, True, num_blocks=8, stagger=1, preempt_every=5),
)


def run(config: ModelConfig, setting: Setting, batch: list[Request]):
    engine = make_engine(
        config,
        block_size=setting.block_size,
        chunk=setting.chunk,
        num_blocks=setting.num_blocks,
        max_in_flight=setting.max_in_flight,
        scheduler=SchedulerConfig(
            decode_steps=setting.decode_steps,
            enable_prefix_caching=setting.prefix_caching,
            vocab_size=config.vocab_size,
        ),
    )
    return engine, run_requests(engine, batch, stagger=setting.stagger, preempt_every=setting.preempt_every)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_tokens_are_those_of_the_dense_model(setting):
    config = tiny_llama()
    engine, news = run(config, setting, requests())
    near_ties = total = 0
    for request in requests():
        tokens = tokens_of(news[request.request_id])
        assert len(tokens) == request.sampling.max_tokens
        assert news[request.request_id][-1].finish_reason is FinishReason.LENGTH
        near_ties += check_tokens(config, request.prompt_token_ids, tokens, request.sampling)
        total += len(tokens)
    assert total == sum(NUM_TOKENS - i for i in range(8))
    print(f"near ties: {near_ties} of {total}")
    assert near_ties <= 0.001 * total
    # The setting really exercises what it is there for.
    assert (engine.stats.preemptions > 0) == (setting.preempt_every > 0)
    if not setting.prefix_caching:
        assert engine.stats.cached_tokens == 0
    elif setting.stagger:
        assert engine.stats.cached_tokens > 0
    if setting.decode_steps:
        assert max(engine.stats.loop_steps) == 1 << (setting.decode_steps.bit_length() - 1) or (
            max(engine.stats.loop_steps) == setting.decode_steps
        )


@pytest.mark.parametrize("name", ["mistral_window", "qwen3_bias_window"])
def test_other_architectures(name):
    """Sliding windows, QK norm and biases under chunks, loops, overlap and preemption."""
    config = parse(MATRIX[name])
    engine, news = run(config, Setting(16, 24, 0, 2, True, num_blocks=13, stagger=1, preempt_every=4), requests())
    assert engine.stats.preemptions > 0
    for request in requests():
        tokens = tokens_of(news[request.request_id])
        assert len(tokens) == request.sampling.max_tokens
        assert check_tokens(config, request.prompt_token_ids, tokens, request.sampling) == 0


def test_forced_tokens_are_generated_tokens():
    """Checking each token after the engine's own history equals generating token by token, without a cache."""
    config = tiny_llama()
    prompt = random_tokens(15, seed=2)
    request = Request("a", prompt, SamplingParams(temperature=0.0, max_tokens=12))
    _, news = run(config, Setting(), [request])
    assert list(tokens_of(news["a"])) == dense(config).generate(prompt, 12)


def test_a_wrong_token_is_found():
    config = tiny_llama()
    prompt = random_tokens(15, seed=2)
    tokens = dense(config).generate(prompt, 12)
    tokens[7] = (tokens[7] + 1) % config.vocab_size
    with pytest.raises(AssertionError, match="token 7"):
        check_tokens(config, prompt, tuple(tokens), SamplingParams(temperature=0.0))


def test_a_prefix_hit_changes_no_token_and_is_counted():
    config = tiny_llama()
    engine = make_engine(config)
    prompt = random_tokens(100, seed=8)
    outputs = []
    for name in ("miss", "hit"):
        news = run_requests(engine, [Request(name, prompt, SamplingParams(temperature=0.0, max_tokens=20))])[name]
        outputs.append((tokens_of(news), news[-1].num_cached_tokens))
    assert outputs[0][0] == outputs[1][0] and [cached for _, cached in outputs] == [0, 99]


@pytest.mark.parametrize("num_common", [3, 16, 39, 63, 90])
def test_a_copied_head_gives_the_tokens_of_a_cold_run(num_common):
    """Another prompt with the same first tokens is cached: whole blocks are shared, the rest of the head is copied."""
    config = tiny_llama()
    prompt = random_tokens(100, seed=8)
    other = prompt[:num_common] + tuple((token + 1) % config.vocab_size for token in prompt[num_common:])
    sampling = SamplingParams(temperature=0.0, max_tokens=20)
    outputs = []
    for warm_up in ([], [other]):
        engine = make_engine(config)
        for number, tokens in enumerate(warm_up):
            run_requests(engine, [Request(f"w{number}", tokens, sampling)])
        news = run_requests(engine, [Request("a", prompt, sampling)])["a"]
        outputs.append((tokens_of(news), news[-1].num_cached_tokens))
        assert (engine.stats.prefix_cache.hit_partial_block > 0) == (bool(warm_up) and num_common % 16 > 0)
        # What the copy was made into is the request's own: the prompt that it was copied from is still intact.
        for tokens in warm_up:
            again = run_requests(engine, [Request("again", tokens, sampling)])["again"]
            cold = run_requests(make_engine(config), [Request("cold", tokens, sampling)])["cold"]
            assert tokens_of(again) == tokens_of(cold) and again[-1].num_cached_tokens == 99
    assert outputs[0][0] == outputs[1][0] and [cached for _, cached in outputs] == [0, num_common]


def test_stop_ids_min_tokens_and_eos():
    config = tiny_llama()
    prompt = random_tokens(15, seed=2)
    greedy = dense(config).generate(prompt, 20)
    stop = greedy[6]
    first = greedy.index(stop)
    engine = make_engine(config, scheduler=SchedulerConfig(eos_token_ids=(stop,)))
    base = SamplingParams(temperature=0.0, max_tokens=20)
    batch = {
        "eos": base,
        "ignored": dataclasses.replace(base, ignore_eos=True),
        "stop id": dataclasses.replace(base, ignore_eos=True, stop_token_ids=(greedy[3],)),
        "later": dataclasses.replace(base, min_tokens=first + 1),
    }
    news = run_requests(engine, [Request(name, prompt, params) for name, params in batch.items()])
    assert list(tokens_of(news["eos"])) == greedy[: first + 1]
    assert news["eos"][-1].finish_reason is FinishReason.STOP and news["eos"][-1].stop_token_id == stop
    assert list(tokens_of(news["ignored"])) == greedy
    assert list(tokens_of(news["stop id"])) == greedy[: greedy.index(greedy[3]) + 1]
    later = tokens_of(news["later"])
    assert later[:first] == tuple(greedy[:first]) and later[first] != stop and len(later) > first + 1


def test_logprobs_equal_the_dense_models():
    config = tiny_llama()
    prompt = random_tokens(33, seed=7)
    sampled = SamplingParams(temperature=1.0, seed=4, max_tokens=15, logprobs=3)
    silent = Request("silent", random_tokens(9, seed=1), SamplingParams(temperature=0.0, max_tokens=15))
    news = run_requests(make_engine(config), [Request("a", prompt, sampled), silent])
    tokens = tokens_of(news["a"])
    entries = [entry for output in news["a"] for entry in output.logprobs]
    expected = log_softmax(dense(config).logits(prompt + tokens))[len(prompt) - 1 : -1]
    assert len(entries) == 15 and [entry.token_id for entry in entries] == list(tokens)
    for row, entry in zip(expected, entries, strict=True):
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=1e-4)
        assert entry.rank == (row > row[entry.token_id]).sum() + 1
        assert [token for token, _ in entry.top] == np.argsort(-row)[:3].tolist()
        assert [value for _, value in entry.top] == pytest.approx(np.sort(row)[::-1][:3].tolist(), abs=1e-4)
    assert all(output.logprobs is None for output in news["silent"])


def test_logprobs_are_raw_where_min_tokens_forbids_the_best():
    config = tiny_llama()
    prompt = random_tokens(15, seed=2)
    best = dense(config).generate(prompt, 1)[0]
    params = SamplingParams(temperature=0.0, max_tokens=6, min_tokens=6, stop_token_ids=(best,), logprobs=1)
    entries = [e for o in run_requests(make_engine(config), [Request("a", prompt, params)])["a"] for e in o.logprobs]
    row = log_softmax(dense(config).logits(prompt))[-1]
    assert entries[0].token_id == np.argsort(-row)[1] and entries[0].rank == 2
    assert entries[0].top[0] == (best, pytest.approx(row[best], abs=1e-4))


def test_aborting_a_neighbour_changes_nothing():
    config = tiny_llama()
    engine = make_engine(config)
    kept, aborted = requests()[0], requests()[3]
    engine.add(kept)
    engine.add(aborted)
    tokens: list[int] = []
    for step in range(200):
        if step == 3:
            assert engine.abort(aborted.request_id)
        for output in engine.step():
            tokens += output.token_ids if output.request_id == kept.request_id else ()
        engine.scheduler.check()
        if not engine.has_work():
            break
    assert len(tokens) == NUM_TOKENS and check_tokens(config, kept.prompt_token_ids, tuple(tokens), kept.sampling) == 0
    assert engine.kv_cache_usage == 0


def test_eager_gives_the_compiled_tokens():
    """enforce_eager runs the un-jitted step functions, one step a call. Loops are not compiled at every call, which ended a
    process after some 75 tokens of the demo model: no address space was left for code."""
    config = tiny_llama()
    programs = make_programs(config, max_decode_steps=1)  # never compiled
    engine = Engine(JaxExecutor(programs, weights(config), MonotonicClock()))
    batch = [dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, max_tokens=4)) for r in requests()[1:2]]
    news = run_requests(engine, batch)
    assert set(engine.stats.loop_steps) == {1}
    for request in batch:
        tokens = tokens_of(news[request.request_id])
        assert len(tokens) == 4
        assert check_tokens(config, request.prompt_token_ids, tokens, request.sampling) == 0
    compiled = []
    for name in ("first to find the prefix", "second"):  # the copy of a block's head is compiled for the first
        run_requests(engine, [dataclasses.replace(request, request_id=name) for request in batch])
        compiled.append(compile_watch.compiled_here())
    assert compiled[0] == compiled[1]
