"""Logit adjustments and sampling filters in float64, one row at a time: the rules of transformers' logits processors
and, for presence and frequency, of OpenAI's API reference."""

import collections
from collections.abc import Sequence

import numpy as np

from jaxkv.core.request import SamplingParams


def filtered_logits(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Scaled logits [V] with everything outside top-k, top-p and min-p at -inf."""
    scaled = logits.astype(np.float64) / params.temperature
    if 0 < params.top_k < len(scaled):
        scaled = np.where(scaled >= np.sort(scaled)[-params.top_k], scaled, -np.inf)
    order = np.argsort(-scaled, kind="stable")
    probability = softmax(scaled)
    kept, total = np.zeros(len(scaled), bool), 0.0
    for token in order:
        if params.top_p < 1 and total >= params.top_p and kept.any():
            break
        kept[token] = probability[token] >= params.min_p * probability.max()
        total += probability[token]
    return np.where(kept, scaled, -np.inf)


def adjusted_logits(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    forbidden: Sequence[int] = (),
) -> np.ndarray:
    """Logits [V] of the token after prompt + output, with min_tokens' ids forbidden, biased, then penalised."""
    adjusted = logits.astype(np.float64)
    adjusted[list(forbidden)] = -np.inf
    for token, bias in dict(params.logit_bias).items():
        adjusted[token] += bias
    for token in {*prompt, *output}:
        penalty = params.repetition_penalty
        adjusted[token] = adjusted[token] / penalty if adjusted[token] > 0 else adjusted[token] * penalty
    for token, times in collections.Counter(output).items():
        adjusted[token] -= params.frequency_penalty * times + params.presence_penalty
    return adjusted


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
