"""Sampling parameters as the device holds them, without going through an admission."""

import jax.numpy as jnp
import numpy as np

from jaxkv.core.request import SamplingParams
from jaxkv.execution.decode_state import RowSampling


def rows_of(params: list[SamplingParams]) -> RowSampling:
    """One row for each of `params`."""

    def column(values, dtype):
        return jnp.asarray(np.asarray(list(values), dtype))

    return RowSampling(
        temperature=column((p.temperature for p in params), np.float32),
        top_k=column((max(p.top_k, 0) for p in params), np.int32),
        top_p=column((p.top_p for p in params), np.float32),
        min_p=column((p.min_p for p in params), np.float32),
        repetition_penalty=column((p.repetition_penalty for p in params), np.float32),
        presence_penalty=column((p.presence_penalty for p in params), np.float32),
        frequency_penalty=column((p.frequency_penalty for p in params), np.float32),
        adjusts=column((p.has_penalties or bool(p.logit_bias) for p in params), np.bool_),
        masked=column((p.has_constraint for p in params), np.bool_),
        seed=column((p.seed or 0 for p in params), np.uint32),
        num_logprobs=column((-1 if p.logprobs is None else p.logprobs for p in params), np.int32),
    )
