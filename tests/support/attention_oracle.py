"""Attention in float64, one query and one head at a time, over plain sequences: it knows no blocks."""

import numpy as np


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, scale: float, window: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """One query [H, D] at the last position of k, v [n, K, D].

    Returns out [H, D] and lse [H], zeros and -inf for n = 0.
    """
    num_heads, group = q.shape[0], q.shape[0] // k.shape[1]
    out, lse = np.zeros(q.shape, np.float64), np.full((num_heads,), -np.inf)
    first = 0 if window is None else max(0, len(k) - window)
    for head in range(num_heads):
        keys = k[first:, head // group].astype(np.float64)
        values = v[first:, head // group].astype(np.float64)
        if len(keys) == 0:
            continue
        logits = keys @ q[head].astype(np.float64) * scale
        weights = np.exp(logits - logits.max())
        out[head] = weights @ values / weights.sum()
        lse[head] = logits.max() + np.log(weights.sum())
    return out, lse


def decode(q, k, v, *, scale: float, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Rows q [S, H, D] against S sequences k, v; out [S, H, D] and lse [S, H]."""
    rows = [attend(*row, scale=scale, window=window) for row in zip(q, k, v, strict=True)]
    return np.stack([out for out, _ in rows]), np.stack([lse for _, lse in rows])


def prefill(q, k, v, cu_q_lens, context_lens, *, scale: float, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Ragged chunks q [T, H, D] against R sequences k, v; padding gives zeros and -inf."""
    out, lse = np.zeros(q.shape, np.float64), np.full(q.shape[:2], -np.inf)
    for seq, context in enumerate(context_lens):
        for i, token in enumerate(range(cu_q_lens[seq], cu_q_lens[seq + 1])):
            end = context + i + 1
            out[token], lse[token] = attend(q[token], k[seq][:end], v[seq][:end], scale=scale, window=window)
    return out, lse
