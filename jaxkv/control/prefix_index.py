"""Find blocks by the tokens they hold.

A full block is named by a hash of its own tokens and of everything before them:

    root = sha256(model fingerprint, KV format, cache_salt)
    h[0] = sha256(root + tokens[0:P])     h[1] = sha256(h[0] + tokens[P:2P])     ...

so equal hashes mean equal whole prefixes, and a lookup is one dict access a block. sha256 because prompts are
untrusted: a hash that can be steered would let one user read another's cache.
"""

import array
import dataclasses
import hashlib
from collections.abc import Sequence
from typing import NewType

BlockHash = NewType("BlockHash", bytes)


@dataclasses.dataclass(frozen=True)
class MatchResult:
    """The longest findable prefix: `blocks` in order, covering the first `num_tokens` tokens."""

    blocks: tuple[int, ...]
    num_tokens: int


def root_hash(cache_root: bytes, cache_salt: str | None) -> BlockHash:
    """Parent of a first block. `cache_root` names what K/V values depend on beside tokens: weights and KV format."""
    # The length goes first, so that root and salt cannot be shifted into each other; no salt differs from an empty one.
    salt = b"" if cache_salt is None else b"\x01" + cache_salt.encode("utf-8", "surrogatepass")
    return BlockHash(hashlib.sha256(len(cache_root).to_bytes(8, "little") + cache_root + salt).digest())


def hash_blocks(parent: BlockHash, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    """Hashes of the full blocks of `token_ids`, whose first token follows directly on `parent`'s last.

    Token ids are 0 to 2**31 - 1; the tokens of a last, partial block are ignored.
    """
    tokens = array.array("i", token_ids)
    data, stride = tokens.tobytes(), block_size * tokens.itemsize
    hashes = []
    sha256 = hashlib.sha256
    for start in range(0, len(data) - stride + 1, stride):
        parent = BlockHash(sha256(parent + data[start : start + stride]).digest())
        hashes.append(parent)
    return hashes


class PrefixIndex:
    """One block for a hash, one hash for a block."""

    def __init__(self):
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}

    def add(self, block_hash: BlockHash, block: int) -> bool:
        """Make `block` findable; False, and nothing changes, when another block already stands for this hash."""
        if block_hash in self._block_of:
            return False
        assert block not in self._hash_of, f"block {block} is already indexed under another hash"
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash
        return True

    def remove(self, block: int) -> None:
        del self._block_of[self._hash_of.pop(block)]

    def find(self, block_hash: BlockHash) -> int | None:
        return self._block_of.get(block_hash)

    def match(self, hashes: Sequence[BlockHash], block_size: int) -> MatchResult:
        """Blocks of the longest run of leading hashes that are all findable."""
        blocks = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return MatchResult(tuple(blocks), len(blocks) * block_size)

    def __contains__(self, block: int) -> bool:
        return block in self._hash_of

    def __len__(self) -> int:
        return len(self._hash_of)

    def check(self) -> None:
        assert len(self._block_of) == len(self._hash_of), "hashes and blocks are not one to one"
        for block, block_hash in self._hash_of.items():
            assert self._block_of.get(block_hash) == block, f"block {block} is indexed under a hash that is not its own"
