"""Sampling filters in float64, one row at a time: the rules of transformers' logits processors."""

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
        if total >= params.top_p and kept.any():
            break
        kept[token] = probability[token] >= params.min_p * probability.max()
        total += probability[token]
    return np.where(kept, scaled, -np.inf)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
