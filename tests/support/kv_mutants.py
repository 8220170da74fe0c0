"""Wrong KV pools, for tests that must fail."""

from pallas_kernels.layer_kv import LayerKV


def exchanged(kv: LayerKV, by: str) -> LayerKV:
    """Keys in the place of values ("k"), or the other way round ("v")."""
    swap = (lambda x: x.swapaxes(-1, -2)) if kv.v_format.is_scaled else lambda x: x
    if by == "k":
        return LayerKV(kv.k, swap(kv.k), kv.k_scale, kv.k_scale)
    return LayerKV(swap(kv.v), kv.v, kv.v_scale, kv.v_scale)
