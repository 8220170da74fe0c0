"""How the keys of a decode batch are cut into equal items of work, computed on the device from the real lengths."""

import dataclasses

import jax
import jax.numpy as jnp

# Items begin at multiples of this many tokens, a multiple of every kernel's tile.
TILE = 64
# Programs (items times KV heads) a call is cut into, in this order: as many as fill a GPU of 108 to 132 multiprocessors
# (4 each), however short the chunks; then chunks of 4 tiles, so that an item outweighs its own start and merge; then
# longer chunks in at most 2,048 programs: about two turns of what is resident at 8 programs a multiprocessor, so that
# rows of unequal lengths balance.
_FILLING_PROGRAMS, _SHORT_CHUNK, _MAX_PROGRAMS = 512, 4, 2048


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SplitPlan:
    """Items of work: item i is tokens start[i] .. end[i] - 1 of row[i]; all of a row's items are neighbours.

    Every row has an item, if an empty one. The number of items W is static; what is left over has row -1.
    """

    row: jax.Array  # i32[W]
    start: jax.Array  # i32[W]
    end: jax.Array  # i32[W]
    first_item: jax.Array  # i32[S + 1] row s has items first_item[s] .. first_item[s + 1] - 1
    is_split: bool = dataclasses.field(metadata={"static": True})  # False: item s is all of row s


def plan_decode(
    seq_lens: jax.Array,
    *,
    num_kv_heads: int,
    capacity: int,
    window: int | None = None,
    kv_starts: jax.Array | None = None,
    chunk: int | None = None,
) -> SplitPlan:
    """Cut rows of `seq_lens` i32[S] tokens, of which `window` and `kv_starts` i32[S] hide the first.

    Args:
      num_kv_heads: KV heads of the device, each of which runs every item.
      capacity: tokens that a row can have at most.
      chunk: tokens an item, a multiple of TILE. None: by the total of this batch, so that the GPU is filled; then a
        row's result depends on its company in its last bits.
    """
    if chunk is not None and (chunk <= 0 or chunk % TILE):
        raise ValueError(f"Expected {chunk=} to be a positive multiple of {TILE}")
    num_rows = seq_lens.shape[0]
    starts = jnp.zeros_like(seq_lens) if kv_starts is None else kv_starts
    max_tiles = -(-capacity // TILE)
    if window is not None:
        starts = jnp.maximum(starts, seq_lens - window)
        max_tiles = min(max_tiles, (window - 2) // TILE + 2)  # a window of 2 may lie in two tiles
    first_tile = starts // TILE
    num_tiles = jnp.where(seq_lens > starts, -(-seq_lens // TILE) - first_tile, 0)
    if chunk is not None:
        tiles_an_item = jnp.int32(chunk // TILE)
        num_items = num_rows * max(1, -(-max_tiles // (chunk // TILE)))
    else:
        programs = jnp.sum(num_tiles) * num_kv_heads  # at one tile each
        tiles_an_item = jnp.maximum(
            _ceil_div(programs, _MAX_PROGRAMS), jnp.clip(_ceil_div(programs, _FILLING_PROGRAMS), 1, _SHORT_CHUNK)
        )
        # A row's last chunk is the only one that is not full, so full ones are at most _MAX_PROGRAMS / K.
        num_items = min(num_rows * max(1, max_tiles), num_rows + _MAX_PROGRAMS // num_kv_heads)
    items_a_row = jnp.maximum(1, _ceil_div(num_tiles, tiles_an_item))
    last_item = jnp.cumsum(items_a_row, dtype=jnp.int32)
    first_item = jnp.concatenate([jnp.zeros((1,), jnp.int32), last_item])
    item = jnp.arange(num_items, dtype=jnp.int32)
    row = jnp.sum(item[:, None] >= last_item, axis=1, dtype=jnp.int32)  # compared with all: one small kernel
    inside = jnp.minimum(row, num_rows - 1)
    tile = first_tile[inside] + (item - first_item[inside]) * tiles_an_item
    end = jnp.minimum((tile + tiles_an_item) * TILE, seq_lens[inside])
    return SplitPlan(
        row=jnp.where(row < num_rows, row, -1),
        start=jnp.maximum(tile * TILE, starts[inside]),
        end=end,
        first_item=first_item,
        is_split=num_items > num_rows,
    )


def _ceil_div(a: jax.Array, b: jax.Array | int) -> jax.Array:
    return (a + b - 1) // b
