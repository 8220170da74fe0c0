"""Rules of the rows that the engine's plan of its memory decides. Pure: verdicts follow from the values."""

from collections.abc import Iterator, Sequence
from typing import Any

from articlelib import capacity
from articlelib.capacity import LENGTH
from articlelib.verdict import Verdict, says, slashed
from jaxkv.core.model_config import ModelConfig

GB = 10**9
Values = dict[str, Any]


def verdicts(mha: ModelConfig, gqa: ModelConfig) -> list[Verdict]:
    """All that the plan says of the articles' figures; models as in `capacity.measure`."""
    values = capacity.measure(mha, gqa)
    rules = (b2, b3, b4, b5, b6, a4_capacity, a14_plan)
    return [verdict for rule, of_row in zip(rules, values.values(), strict=True) for verdict in rule(of_row)]


def b2(values: Values) -> list[Verdict]:
    allocated, formula = values["allocated"], values["formula"]
    gqa_formula, gqa_stored = values["gqa_formula"], values["gqa_stored"]
    return [
        Verdict(
            "B2",
            "7B, float16, 2,048 tokens: 2 x layers x heads x head_dim x length x 2 bytes",
            f"{2**30:,} B",
            f"{allocated:,} B",
            says(allocated == formula == 2**30),
            f"so many bytes have {LENGTH // 16} blocks of 16 tokens in the engine's cache",
            (allocated,),
        ),
        Verdict(
            "B2",
            "the same formula for every model (Llama-3-8B, bytes a token)",
            f"{gqa_formula:,}",
            f"{gqa_stored:,}",
            says(gqa_formula == gqa_stored),
            f"KV heads are stored, not heads: the formula is {gqa_formula / gqa_stored:g}x too large",
            (gqa_stored,),
        ),
    ]


def b3(values: Values) -> list[Verdict]:
    real, whole = values["real"], values["whole"]
    return [
        Verdict(
            "B3",
            "each request takes 1 GB, so (80 - 14) GB hold at most 60",
            "60",
            f"{real}",
            says(real <= 60),
            f"blocks are taken as tokens come: {real} requests of 1 to {LENGTH:,} tokens, evenly, fit at utilization "
            f"0.90, {whole} of {LENGTH:,}; reserved whole, 66 GB hold {66 * GB // values['request_bytes']}",
            (real, whole),
        )
    ]


def b4(values: Values) -> list[Verdict]:
    claimed, request = dict(zip(values["shares"], (42, 49, 53), strict=True)), values["request_bytes"]
    by_article = [f"{(80 * GB * share - 14 * GB) / request:.1f}" for share in claimed]
    # What must go elsewhere for the claim to hold, and the device that would gain requests as fast as claimed.
    elsewhere = [80 * share - 14 - count * request / GB for share, count in claimed.items()]
    steps = list(claimed.items())
    device = (steps[-1][1] - steps[0][1]) * request / GB / (steps[-1][0] - steps[0][0])
    return [
        Verdict(
            "B4",
            f"0.90 / 0.95 / 0.98 of 80 GB hold 42 / 49 / 53 requests of {LENGTH:,} tokens",
            slashed(claimed.values()),
            slashed(values["fit"]),
            says(all(abs(a - b) <= 1 for a, b in zip(values["fit"], claimed.values(), strict=True))),
            f"(80 x share - 14) GB hold {slashed(by_article)}; {slashed(f'{x:.1f}' for x in elsewhere)} GB must go "
            f"elsewhere, and no fixed cost does that: the claim gains as a device of {device:.0f} GB would",
            tuple(values["fit"]),
        )
    ]


def b5(values: Values) -> list[Verdict]:
    available, kv, weights = values["available"], values["kv"], values["weights"]
    return [
        Verdict(
            "B5",
            "gpu_memory_utilization is the share that KV may use (0.90 of 80 GB)",
            f"{available / GB:.1f} GB",
            f"{kv / GB:.1f} GB",
            says(kv + weights > available),
            f"{weights / GB:.1f} GB of weights, temporaries and the rows' state come out of it too",
            (kv,),
        )
    ]


def b6(values: Values) -> list[Verdict]:
    small, large = (size / GB for size in values["pools"])
    return [
        *_safe_utilization(values["largest_safe"]),
        Verdict(
            "B6",
            "0.85 to 0.90 of 40 GB raises the pool by 3 GB (16 to 19 GB)",
            "3.0 GB",
            f"{large - small:.1f} GB ({small:.1f} to {large:.1f})",
            says(abs(large - small - 3) < 0.3),
            "0.05 of 40 GB is 2 GB",
            (large - small, small, large),
        ),
    ]


def _safe_utilization(largest_safe: dict[str, Sequence[float]]) -> Iterator[Verdict]:
    """Decided unless it hangs on how much memory CUDA takes."""
    for device, text, low, high in (
        ("a100-80g", "0.92-0.93 is right for 80 GB", 0.92, 0.93),
        ("a100-80g", "0.98 risks running out of memory (80 GB)", 0.0, 0.97),
        ("a100-40g", "0.85-0.90 is right for 40 GB", 0.85, 0.90),
        ("a100-40g", "0.99 runs out of memory (40 GB)", 0.0, 0.98),
        ("24g", "at most 0.8 with 24 GB", 0.0, 0.80),
    ):
        least, most = largest_safe[device]
        holds = {low <= safe <= high for safe in (least, most)}
        yield Verdict(
            "B6",
            text,
            f"at most {high:.2f}" if low == 0 else f"{low:.2f}-{high:.2f}",
            f"{least:.2f}-{most:.2f}",
            says(holds.pop()) if len(holds) == 1 else "not measurable here",
            "largest share that leaves CUDA its 0.5 to 1 GiB (assumed); in this engine it covers temporaries",
            (least, most),
        )


def a4_capacity(values: Values) -> list[Verdict]:
    tokens, stored = values["tokens"], values["bytes_per_token"]
    gain = tokens["int8"] / tokens["float16"]
    gains = [f"{name} {stored['float16'] / size:.2f}x" for name, size in stored.items() if size < stored["float16"]]
    return [
        Verdict(
            "A4",
            "int8 KV raises capacity by 80 %",
            "1.80x",
            f"{gain:.2f}x",
            says(gain >= 1.8),
            f"{tokens['int8']:,} instead of {tokens['float16']:,} tokens on an A100-40G; bytes a token fall by "
            f"{', '.join(gains)}",
            (gain,),
        )
    ]


def a14_plan(values: Values) -> list[Verdict]:
    told, fit, half = values["told"], values["fit"], values["fit_half"]
    return [
        Verdict(
            "A14",
            "the start lines (cache size, maximum concurrency) tell what fits",
            f"{told}",
            f"{fit}",
            says(fit == told),
            f"requests of {values['max_model_len']:,} tokens until the block manager is full; of half the length {half}: "
            "the line is the worst case",
            (fit, half),
        )
    ]
