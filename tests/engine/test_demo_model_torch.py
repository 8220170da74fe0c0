"""The engine on the demo model against transformers: greedy text of 20 prompts, token for token.

transformers' greedy generation would need 2,560 steps. One forward pass over prompt and output says the same: each of
our tokens must be its best choice after the tokens before it, so by induction `generate` would have produced them.
Where its two best logits lie within 1e-4 either counts; that must be rare.
"""

import functools

import numpy as np
import pytest

pytest.importorskip("torch", reason="the oracle is transformers' torch model")

from jaxkv.core.config import EngineConfig
from jaxkv.core.request import Request, SamplingParams
from jaxkv.startup import StartedEngine, start_engine
from tests.support import torch_oracle
from tests.support.demo import demo_source
from tests.support.text import long_text
from tests.support.tiny_programs import run_requests, tokens_of

NEAR_TIE = 1e-4
NUM_TOKENS = 128
PROMPT_LENGTHS = (5, 6, 8, 12, 16, 17, 31, 32, 33, 64, 65, 100, 128, 150, 200, 256, 300, 400, 600, 900)


@functools.lru_cache
def started() -> StartedEngine:
    config = EngineConfig(
        model="demo",
        dtype="float32",
        max_model_len=1088,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=512 * 2**20,
        enable_prefix_caching=False,
    )
    return start_engine(config)


def requests() -> list[Request]:
    tokenizer = started().tokenizer
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    batch = []
    for i, length in enumerate(PROMPT_LENGTHS):
        ids = tokenizer.encode(long_text(9, start=i), add_special_tokens=False)
        assert len(ids) >= length
        batch.append(Request(f"{length} tokens", tuple(ids[:length]), sampling))
    return batch


@functools.lru_cache
def near_ties(prompt: tuple[int, ...], tokens: tuple[int, ...]) -> int:
    """How often ours is the other one of a near tie; fails when it is neither."""
    logits = torch_oracle.logits(torch_oracle.demo_model(demo_source().path), prompt + tokens)[len(prompt) - 1 : -1]
    chosen = logits[np.arange(len(tokens)), list(tokens)]
    behind = logits.max(-1) - chosen
    wrong = np.flatnonzero(behind > NEAR_TIE)
    assert not wrong.size, f"{len(prompt)} tokens: token {wrong[0]} is {behind[wrong[0]]} behind the best logit"
    return int((behind > 0).sum())


def check(outputs: dict[str, tuple[int, ...]]) -> None:
    total = 0
    for request in requests():
        tokens = outputs[request.request_id]
        assert len(tokens) == NUM_TOKENS
        total += near_ties(request.prompt_token_ids, tokens)
    print(f"near ties: {total} of {len(outputs) * NUM_TOKENS}")
    assert total <= 0.001 * len(outputs) * NUM_TOKENS


def test_all_prompts_at_once():
    check({name: tokens_of(news) for name, news in run_requests(started().engine, requests()).items()})


def test_one_prompt_at_a_time():
    engine = started().engine
    check({r.request_id: tokens_of(run_requests(engine, [r])[r.request_id]) for r in requests()})
