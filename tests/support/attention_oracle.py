"""Attention in float64, one query and one head at a time, over plain sequences: it knows no blocks."""

import numpy as np

from pallas_kernels.attention_options import AttentionOptions


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, options: AttentionOptions, sinks: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """One query [H, D] at the last position of k, v [n, K, D].

    Returns out [H, D] and lse [H], zeros and -inf for n = 0.
    """
    num_heads, group = q.shape[0], q.shape[0] // k.shape[1]
    out, lse = np.zeros(q.shape, np.float64), np.full((num_heads,), -np.inf)
    first = 0 if options.window is None else max(0, len(k) - options.window)
    for head in range(num_heads):
        keys = k[first:, head // group].astype(np.float64)
        values = v[first:, head // group].astype(np.float64)
        if len(keys) == 0:
            continue
        logits = keys @ q[head].astype(np.float64) * options.scale
        if options.soft_cap is not None:
            logits = options.soft_cap * np.tanh(logits / options.soft_cap)
        largest = logits.max() if sinks is None else max(logits.max(), sinks[head])
        weights = np.exp(logits - largest)
        total = weights.sum() + (0 if sinks is None else np.exp(sinks[head] - largest))
        out[head] = weights @ values / total
        lse[head] = largest + np.log(total)
    return out, lse


def decode(q, k, v, options: AttentionOptions, sinks=None) -> tuple[np.ndarray, np.ndarray]:
    """Rows q [S, H, D] against S sequences k, v; out [S, H, D] and lse [S, H]."""
    rows = [attend(*row, options, sinks) for row in zip(q, k, v, strict=True)]
    return np.stack([out for out, _ in rows]), np.stack([lse for _, lse in rows])


def prefill(q, k, v, cu_q_lens, context_lens, options: AttentionOptions, sinks=None) -> tuple[np.ndarray, np.ndarray]:
    """Ragged chunks q [T, H, D] against R sequences k, v; padding gives zeros and -inf."""
    out, lse = np.zeros(q.shape, np.float64), np.full(q.shape[:2], -np.inf)
    for seq, context in enumerate(context_lens):
        for i, token in enumerate(range(cu_q_lens[seq], cu_q_lens[seq + 1])):
            end = context + i + 1
            out[token], lse[token] = attend(q[token], k[seq][:end], v[seq][:end], options, sinks)
    return out, lse
