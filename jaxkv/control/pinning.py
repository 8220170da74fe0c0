"""Prefixes that no burst of other requests may evict.

A pin holds a reference on its blocks, as a running request does. At most `max_blocks` references are held in all, and
no request is accepted that would not fit beside so many, so pins can never block the engine. Full blocks only: tails of
no further use would fill the bound.
"""

from jaxkv.control.block_manager import BlockManager
from jaxkv.control.prefix_index import BlockHash, root_hash


class PinnedPrefixes:
    """Pins by cache salt (all blocks under it, those to come included) or by block hash (it and all before it)."""

    def __init__(self, blocks: BlockManager, cache_root: bytes, max_blocks: int):
        self._blocks = blocks
        self._cache_root = cache_root
        self._max_blocks = max_blocks
        self._root_of: dict[int, BlockHash] = {}  # of every block that was ever full and findable
        self._pinned: dict[BlockHash, list[int]] = {}  # by the salt's root, or the block's hash

    @property
    def num_blocks(self) -> int:
        """References held; a block under two pins counts twice."""
        return sum(map(len, self._pinned.values()))

    def pin_salt(self, cache_salt: str | None) -> int:
        """Pin what is cached and what will be cached under a salt, until the bound is reached; returns how many blocks
        of it are pinned now. Earlier blocks of a prompt come before later ones."""
        root = root_hash(self._cache_root, cache_salt)
        if root not in self._pinned:
            self._pinned[root] = []
            for block in self._blocks.index.descendants(root):
                if self.num_blocks == self._max_blocks:
                    break
                if not self._blocks.is_tail(block):
                    self.published(root, block)
        return len(self._pinned[root])

    def pin_block(self, block_hash: BlockHash) -> int:
        """Pin a cached block and those before it: all of them or, where the bound forbids or one is gone, none. Returns
        how many."""
        chain, start = self._blocks.index.ancestors(block_hash)
        is_whole = bool(chain) and start == self._root_of[chain[0]]
        if block_hash not in self._pinned and is_whole and self.num_blocks + len(chain) <= self._max_blocks:
            self._blocks.share(chain)
            self._pinned[block_hash] = chain
        return len(self._pinned.get(block_hash, ()))

    def unpin_salt(self, cache_salt: str | None) -> None:
        self._unpin(root_hash(self._cache_root, cache_salt))

    def unpin_block(self, block_hash: BlockHash) -> None:
        self._unpin(block_hash)

    def published(self, root: BlockHash, block: int) -> None:
        """A full block was made findable by a request under the salt of this root."""
        self._root_of[block] = root
        pinned = self._pinned.get(root)
        if pinned is not None and self.num_blocks < self._max_blocks:
            self._blocks.share((block,))
            pinned.append(block)

    def owners(self) -> list[list[int]]:
        """Block lists that hold references, for `BlockManager.check`."""
        return list(self._pinned.values())

    def _unpin(self, key: BlockHash) -> None:
        self._blocks.free(self._pinned.pop(key, ()))
