"""A smaller format's capacity is there to be used: as many requests at once as its bytes promise, in the same memory."""

import jax
import pytest

from jaxkv import startup
from jaxkv.core.config import EngineConfig
from jaxkv.core.progress import SilentProgress
from jaxkv.core.request import Request, SamplingParams
from tests.support.tiny_models import model_of, parse, random_tensors, random_tokens, tiny_config

BUDGET = 64 * 1024
# Four blocks in the end; one at first, so that all are admitted.
PROMPT, OUTPUT = 12, 52


@pytest.mark.slow  # compiles three engines, 3 CPU minutes
def test_the_cache_fills_to_what_the_format_promises():
    model = parse(tiny_config(num_hidden_layers=1, head_dim=64, num_attention_heads=2, num_key_value_heads=1))
    tokens = {}
    for dtype in ("bfloat16", "int8", "int4"):
        config = EngineConfig(
            kv_cache_dtype=dtype, kv_cache_memory_bytes=BUDGET, max_num_seqs=16, max_num_batched_tokens=64,
            max_model_len=64, decode_steps=1, enable_prefix_caching=False, compilation_cache_dir="",
        )  # fmt: skip
        tensors = random_tensors(model)
        built = startup.build_engine(
            config, model, lambda _: model_of(model, tensors), origin="tiny", progress=SilentProgress()
        )
        engine, blocks = built.engine, built.engine.scheduler.blocks
        allocated = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.executor._cache))
        assert BUDGET - built.memory.block_size * built.memory.needs.kv_per_token < allocated <= BUDGET
        for i in range(blocks.num_usable // 4):
            sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT)
            engine.add(Request(str(i), random_tokens(PROMPT, seed=i), sampling))
        most, generated = 0, 0
        while engine.has_work():
            generated += sum(len(output.token_ids) for output in engine.step())
            most = max(most, blocks.num_usable - blocks.num_free)
        assert generated == OUTPUT * (blocks.num_usable // 4) and engine.stats.preemptions == 0
        assert most >= blocks.num_usable - 4
        tokens[dtype] = most * built.memory.block_size
        assert f"KV cache size: {built.memory.num_tokens:,} tokens" in built.memory.lines()
    assert tokens["int8"] >= 1.9 * tokens["bfloat16"] and tokens["int4"] >= 3.1 * tokens["bfloat16"]
