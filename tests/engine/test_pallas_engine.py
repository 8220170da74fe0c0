"""The whole engine on the GPU kernels, interpreted: the tokens of the XLA path, cascade included."""

import dataclasses

import pytest

from jaxkv.control.cascade_cost import ALWAYS
from jaxkv.control.engine import Engine
from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.request import Request, SamplingParams
from tests.support.tiny_models import parse, random_tokens, tiny_config
from tests.support.tiny_programs import make_engine, run_requests, tokens_of

# The interpreter compiles each kernel of each bucket: four minutes of CPU in all.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
CONFIG = parse(tiny_config(head_dim=64))
GREEDY = SamplingParams(temperature=0.0, max_tokens=10)


def engine(implementation: str, dtype: str, kv_dtype: str) -> Engine:
    cascades = implementation != "xla"
    return make_engine(
        CONFIG,
        implementation=implementation,
        dtype=dtype,
        kv_dtype=kv_dtype,
        max_prefix_groups=2 if cascades else 0,
        scheduler=SchedulerConfig(cascade=ALWAYS if cascades else None, vocab_size=CONFIG.vocab_size),
    )


def requests() -> list[Request]:
    """Three that share 40 tokens, two blocks and the head of a third, which is copied; one of several chunks; one short."""
    shared = random_tokens(40, seed=1)
    prompts = [shared + random_tokens(5 + 9 * i, seed=10 + i) for i in range(3)]
    prompts += [random_tokens(100, seed=3), random_tokens(3, seed=4)]
    sampled = SamplingParams(temperature=0.7, seed=11, max_tokens=10)
    return [Request(str(i), prompt, sampled if i == 1 else GREEDY) for i, prompt in enumerate(prompts)]


# bfloat16 K/V beneath float32 weights: with bfloat16 weights the best two logits are often a rounding apart, and even the
# XLA path gives other tokens where it finds a prefix than where it computed it.
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "int8")]
)
def test_tokens_are_those_of_the_xla_path(dtype, kv_dtype):
    tokens = {}
    for implementation in ("xla", "pallas_triton_interpreted"):
        running = engine(implementation, dtype, kv_dtype)
        # One after another at first, so that the later ones find the first one's blocks; then all together.
        news = run_requests(running, requests(), stagger=2)
        again = [dataclasses.replace(request, request_id=f"again-{request.request_id}") for request in requests()]
        news |= run_requests(running, again)
        tokens[implementation] = {name: tokens_of(outputs) for name, outputs in news.items()}
        assert all(len(found) == 10 for found in tokens[implementation].values())
        assert running.stats.prefix_cache.hit_partial_block > 0, "no head of a block was copied"
    assert running.stats.cascade_rows > 20
    assert tokens["pallas_triton_interpreted"] == tokens["xla"]
