"""The oracle: what is shared does not matter to the result, so every row attends to all of its own table."""

from pallas_kernels.decode_attention.reference import decode_attention as cascade_attention

__all__ = ["cascade_attention"]
