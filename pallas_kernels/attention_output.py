"""What every attention operation returns."""

from typing import NamedTuple

import jax


class AttentionOutput(NamedTuple):
    """Attention over one part of the keys; parts merge by their log-sum-exp.

    out: [T or S, H, D] in the query's dtype; zero where no key was seen.
    lse: f32[T or S, H] natural log of the sum of exponentiated scaled logits; -inf where no key was seen.
    """

    out: jax.Array
    lse: jax.Array
