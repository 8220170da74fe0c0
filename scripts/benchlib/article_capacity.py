"""What two articles on KV caches say of capacity, beside what the engine's plan says. Verdicts follow from the numbers.

The articles' machine is an A100 with 80 or 40 GB, their model one of the 7B shape in float16.
"""

import dataclasses
import random
from collections.abc import Iterable, Iterator
from typing import Literal

import jax

from jaxkv.capacity import Capacity, plan_capacity
from jaxkv.control.block_manager import BlockManager
from jaxkv.core.config import EngineConfig
from jaxkv.core.model_config import ModelConfig
from jaxkv.device import DEVICES
from jaxkv.execution.kv_cache import empty_cache, kv_bytes_per_token
from jaxkv.execution.memory import GiB, MemoryPlan
from pallas_kernels.kv_format import FORMATS

GB = 10**9
LENGTH = 2048
OUTSIDE = (GiB // 2, GiB)
"""Least and most memory that is not the allocator's to share out: CUDA's context, the kernels' code and libraries'.
Assumed, from reports of 0.4 to 0.8 GiB."""


Says = Literal["confirmed", "refuted", "not measurable here"]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """`claimed` and `ours` are what is compared."""

    claim: str
    what: str
    claimed: str
    ours: str
    verdict: Says
    why: str
    numbers: tuple[float, ...]  # of `ours`


def verdicts(mha: ModelConfig, gqa: ModelConfig) -> list[Verdict]:
    """Of every claim. `mha`: Llama-2-7B, with as many KV heads as heads; `gqa`: Llama-3-8B, with a quarter of them."""
    request = LENGTH * kv_bytes_per_token(mha, "float16")
    at_90 = _plan(mha, "a100-80g", 0.9)
    return [
        _bytes_a_request(mha, request),
        _grouped_queries(gqa),
        _one_gb_each(at_90.memory, request),
        _requests_by_utilization(mha, request),
        _share_for_kv(at_90),
        *_safe_utilization(),
        _five_percent(mha),
        _int8_capacity(mha),
        _start_lines(at_90.memory),
    ]


def num_that_fit(memory: MemoryPlan, lengths: Iterable[int]) -> int:
    """Requests of these lengths, sharing nothing, that the engine's block manager takes before one does not fit."""
    manager = BlockManager(memory.num_blocks + 1, memory.block_size)
    count = 0
    for length in lengths:
        blocks = -(-length // memory.block_size)
        if blocks > manager.num_free:
            break
        manager.allocate(blocks)
        count += 1
    return count


def _plan(model: ModelConfig, device: str, utilization: float, kv_cache_dtype: str = "auto") -> Capacity:
    config = EngineConfig(dtype="float16", gpu_memory_utilization=utilization, kv_cache_dtype=kv_cache_dtype)
    return plan_capacity(config, model, DEVICES[device])


def _says(holds: bool) -> Says:
    return "confirmed" if holds else "refuted"


def _bytes_a_request(mha: ModelConfig, request: int) -> Verdict:
    cache = jax.eval_shape(lambda: empty_cache(mha, num_blocks=LENGTH // 16, block_size=16, dtype="float16"))
    allocated = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    formula = 2 * mha.num_layers * mha.num_heads * mha.head_dim * LENGTH * 2
    return Verdict(
        "B2",
        "7B, float16, 2,048 tokens: 2 x layers x heads x head_dim x length x 2 bytes",
        f"{2**30:,} B",
        f"{allocated:,} B",
        _says(allocated == formula == request == 2**30),
        f"so many bytes have {LENGTH // 16} blocks of 16 tokens in the engine's cache",
        (allocated,),
    )


def _grouped_queries(gqa: ModelConfig) -> Verdict:
    formula = 2 * gqa.num_layers * gqa.num_heads * gqa.head_dim * 2
    stored = kv_bytes_per_token(gqa, "float16")
    return Verdict(
        "B2",
        "the same formula for every model (Llama-3-8B, bytes a token)",
        f"{formula:,}",
        f"{stored:,}",
        _says(formula == stored),
        f"KV heads are stored, not heads: the formula is {formula / stored:g}x too large",
        (stored,),
    )


def _one_gb_each(memory: MemoryPlan, request: int) -> Verdict:
    whole = num_that_fit(memory, _endlessly(LENGTH))
    # A seed of its own, so that the figure is the same every time; lengths favour nothing.
    lengths = random.Random(0)
    real = num_that_fit(memory, iter(lambda: lengths.randint(1, LENGTH), None))
    return Verdict(
        "B3",
        "each request takes 1 GB, so (80 - 14) GB hold at most 60",
        "60",
        f"{real}",
        _says(real <= 60),
        f"blocks are taken as tokens come: {real} requests of 1 to {LENGTH:,} tokens, evenly, fit at utilization 0.90, "
        f"{whole} of {LENGTH:,}; reserved whole, 66 GB hold {66 * GB // request}",
        (real, whole),
    )


def _requests_by_utilization(mha: ModelConfig, request: int) -> Verdict:
    claimed = {0.90: 42, 0.95: 49, 0.98: 53}
    by_article = [f"{(80 * GB * share - 14 * GB) / request:.1f}" for share in claimed]
    ours = [int(_plan(mha, "a100-80g", share).memory.concurrency(LENGTH)) for share in claimed]
    # What must go elsewhere for the claim to hold, and the device that would gain requests as fast as claimed.
    elsewhere = [80 * share - 14 - count * request / GB for share, count in claimed.items()]
    steps = list(claimed.items())
    device = (steps[-1][1] - steps[0][1]) * request / GB / (steps[-1][0] - steps[0][0])
    return Verdict(
        "B4",
        f"0.90 / 0.95 / 0.98 of 80 GB hold 42 / 49 / 53 requests of {LENGTH:,} tokens",
        _slashed(claimed.values()),
        _slashed(ours),
        _says(all(abs(a - b) <= 1 for a, b in zip(ours, claimed.values()))),
        f"(80 x share - 14) GB hold {_slashed(by_article)}; {_slashed(f'{x:.1f}' for x in elsewhere)} GB must go "
        f"elsewhere, and no fixed cost does that: the claim gains as a device of {device:.0f} GB would",
        tuple(ours),
    )


def _share_for_kv(capacity: Capacity) -> Verdict:
    memory = capacity.memory
    return Verdict(
        "B5",
        "gpu_memory_utilization is the share that KV may use (0.90 of 80 GB)",
        f"{memory.available / GB:.1f} GB",
        f"{memory.kv_bytes / GB:.1f} GB",
        _says(memory.kv_bytes + memory.needs.weights > memory.available),
        f"{memory.needs.weights / GB:.1f} GB of weights, temporaries and the rows' state come out of it too",
        (memory.kv_bytes,),
    )


def _safe_utilization() -> Iterator[Verdict]:
    """The largest share that leaves CUDA its memory, on each card; decided unless it hangs on how much that is."""
    for device, text, low, high in (
        ("a100-80g", "0.92-0.93 is right for 80 GB", 0.92, 0.93),
        ("a100-80g", "0.98 risks running out of memory (80 GB)", 0.0, 0.97),
        ("a100-40g", "0.85-0.90 is right for 40 GB", 0.85, 0.90),
        ("a100-40g", "0.99 runs out of memory (40 GB)", 0.0, 0.98),
        ("24g", "at most 0.8 with 24 GB", 0.0, 0.80),
    ):
        most, least = (int(100 * (1 - outside / DEVICES[device].memory)) / 100 for outside in OUTSIDE)
        holds = {low <= safe <= high for safe in (least, most)}
        claimed = f"at most {high:.2f}" if low == 0 else f"{low:.2f}-{high:.2f}"
        yield Verdict(
            "B6",
            text,
            claimed,
            f"{least:.2f}-{most:.2f}",
            _says(holds.pop()) if len(holds) == 1 else "not measurable here",
            "largest share that leaves CUDA its 0.5 to 1 GiB (assumed); in this engine it covers temporaries",
            (least, most),
        )


def _five_percent(mha: ModelConfig) -> Verdict:
    small, large = (_plan(mha, "a100-40g", share).memory.kv_bytes / GB for share in (0.85, 0.90))
    return Verdict(
        "B6",
        "0.85 to 0.90 of 40 GB raises the pool by 3 GB (16 to 19 GB)",
        "3.0 GB",
        f"{large - small:.1f} GB ({small:.1f} to {large:.1f})",
        _says(abs(large - small - 3) < 0.3),
        "0.05 of 40 GB is 2 GB",
        (large - small, small, large),
    )


def _int8_capacity(mha: ModelConfig) -> Verdict:
    plain, int8 = (_plan(mha, "a100-40g", 0.9, name).memory.num_tokens for name in ("float16", "int8"))
    gain = int8 / plain
    stored = {name: kv_bytes_per_token(mha, name) for name in FORMATS}
    gains = [f"{name} {stored['float16'] / size:.2f}x" for name, size in stored.items() if size < stored["float16"]]
    return Verdict(
        "A4",
        "int8 KV raises capacity by 80 %",
        "1.80x",
        f"{gain:.2f}x",
        _says(gain >= 1.8),
        f"{int8:,} instead of {plain:,} tokens on an A100-40G; bytes a token fall by {', '.join(gains)}",
        (gain,),
    )


def _start_lines(memory: MemoryPlan) -> Verdict:
    told = int(memory.max_concurrency)
    fit = num_that_fit(memory, _endlessly(memory.max_model_len))
    half = num_that_fit(memory, _endlessly(memory.max_model_len // 2))
    return Verdict(
        "A14",
        "the start lines (cache size, maximum concurrency) tell what fits",
        f"{told}",
        f"{fit}",
        _says(fit == told),
        f"requests of {memory.max_model_len:,} tokens until the block manager is full; of half the length {half}: the "
        "line is the worst case",
        (fit, half),
    )


def _endlessly(length: int) -> Iterator[int]:
    while True:
        yield length


def _slashed(values: Iterable[object]) -> str:
    return " / ".join(map(str, values))
