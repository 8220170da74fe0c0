"""When attending to a shared prefix once for several rows is faster than once for each."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class CascadeCost:
    """What the attention of one layer takes, in seconds. The common L tokens of n rows take n * L * token read row by
    row, and L * max(token, tile * ceil(n / tile_rows)) read once; a call with any groups takes `call` longer.

    The shape is that of Hydragen (arXiv 2402.05099) and FlashInfer (flashinfer.ai, 2024-02-02): bytes that are saved
    against arithmetic that stays, a second kernel and a merge.

    Attributes:
      token: to read one token's keys and values, as one of many.
      tile: to compute one token's part for one tile of query rows.
      tile_rows: decode rows whose queries fill a tile.
    """

    token: float
    tile: float = 0.0
    tile_rows: int = 1
    call: float = 0.0

    def saved(self, num_rows: int, num_tokens: int) -> float:
        """Seconds that one group saves, `call` not counted."""
        together = max(self.token, self.tile * -(-num_rows // self.tile_rows))
        return num_tokens * (num_rows * self.token - together)


ALWAYS = CascadeCost(token=1.0)
"""Whatever is shared is worth it: for comparisons and tests."""

# An H200: 90 % of the 4.3 TB/s of a copy, 350 TFLOP/s in tiles of 128 query rows; the least that a kernel takes, and a
# merge. Where memory is slower cascade gains earlier than these say.
_BANDWIDTH, _FLOPS, _TILE_ROWS = 0.9 * 4.3e12, 350e12, 128
_KERNEL_SECONDS, _MERGE_SECONDS = 8e-6, 4e-6


def gpu_cost(*, num_heads: int, num_kv_heads: int, head_dim: int, kv_bytes: int) -> CascadeCost:
    """On a GPU; `kv_bytes` are those of one token in one layer.

    With Llama-3-8B in bfloat16 and blocks of 64 it begins to gain at 4,416 common tokens for 4 rows, 1,728 for 8, 384
    for 32.
    """
    return CascadeCost(
        token=kv_bytes / _BANDWIDTH,
        tile=4 * head_dim * num_kv_heads * _TILE_ROWS / _FLOPS,
        tile_rows=max(1, _TILE_ROWS * num_kv_heads // num_heads),
        call=_KERNEL_SECONDS + _MERGE_SECONDS,
    )
