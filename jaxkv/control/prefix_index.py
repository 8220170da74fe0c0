"""Find blocks by the tokens they hold.

A full block is named by a hash of its own tokens and of everything before them:

    root = sha256(model fingerprint, KV format, cache_salt)
    h[0] = sha256(root + tokens[0:P])     h[1] = sha256(h[0] + tokens[P:2P])     ...

so equal hashes mean equal whole prefixes, and a lookup is one dict access a block. sha256 because prompts are
untrusted: a hash that can be steered would let one user read another's cache. A block that is not full has such a name
of the tokens it holds, which no lookup of full blocks asks for: it is found by its head.
"""

import bisect
import collections
import dataclasses
import hashlib
import struct
from collections.abc import Iterator, Sequence
from typing import NewType

BlockHash = NewType("BlockHash", bytes)
TOKEN_BYTES = struct.calcsize("i")


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
    """Hashes of the full blocks of `token_ids`, whose first token follows directly on `parent`'s last."""
    return chain_hashes(parent, split_blocks(token_ids, block_size))


def chain_hashes(parent: BlockHash, blocks: Sequence[bytes]) -> list[BlockHash]:
    """Hashes of consecutive blocks, given as `split_blocks` does."""
    hashes = []
    sha256 = hashlib.sha256
    for tokens in blocks:
        parent = BlockHash(sha256(parent + tokens).digest())
        hashes.append(parent)
    return hashes


def split_blocks(token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """`token_bytes` of the full blocks of `token_ids`; the tokens of a last, partial block are left out."""
    data, stride = token_bytes(token_ids), block_size * TOKEN_BYTES
    return [data[start : start + stride] for start in range(0, len(data) - stride + 1, stride)]


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Tokens, 0 to 2**31 - 1, as hashes and heads hold them. (For a block, struct takes a third of array's time.)"""
    return struct.pack(f"{len(token_ids)}i", *token_ids)


def num_common(a: bytes, b: bytes) -> int:
    """Length in tokens of the common head of two `token_bytes`."""
    size = min(len(a), len(b))
    differing = int.from_bytes(a[:size], "big") ^ int.from_bytes(b[:size], "big")
    return (size - (differing.bit_length() + 7) // 8) // TOKEN_BYTES


class PrefixIndex:
    """One block for a hash, one hash for a block; and the heads of blocks, by the block before them.

    The blocks that follow one parent are kept sorted by their tokens. Whatever the order of tokens is, the longest
    common head with a prompt's next tokens is then held by one of the two neighbours of the place where these would
    stand, so a lookup costs O(log n) comparisons of a block's bytes, however many blocks a crafted prompt has made
    follow one parent.
    """

    def __init__(self):
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}
        self._children: dict[BlockHash, list[tuple[bytes, int]]] = {}
        self._head_of: dict[int, tuple[BlockHash, bytes]] = {}
        self._unsalted_of: dict[int, BlockHash] = {}  # of the blocks under a salt
        self._num_salted: collections.Counter[BlockHash] = collections.Counter()

    def add(self, block_hash: BlockHash, block: int, unsalted: BlockHash | None = None) -> bool:
        """Make `block` findable; False, and nothing changes, when another block already stands for this hash.

        `unsalted`: the hash that the same tokens have without a salt, when they have one.
        """
        if block_hash in self._block_of:
            return False
        assert block not in self._hash_of, f"block {block} is already indexed under another hash"
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash
        if unsalted is not None:
            self._unsalted_of[block] = unsalted
            self._num_salted[unsalted] += 1
        return True

    def add_head(self, block: int, parent: BlockHash, tokens: bytes) -> None:
        """Let a findable block, whose content is complete, be found by the head of its tokens too."""
        assert block in self._hash_of and block not in self._head_of, f"block {block} has a head, or is not findable"
        children = self._children.get(parent)
        if children is None:
            self._children[parent] = [(tokens, block)]
        else:
            bisect.insort(children, (tokens, block))
        self._head_of[block] = parent, tokens

    def remove(self, block: int) -> BlockHash:
        """Forget a block; returns its hash."""
        block_hash = self._hash_of.pop(block)
        del self._block_of[block_hash]
        head = self._head_of.pop(block, None)
        if head is not None:
            parent, tokens = head
            children = self._children[parent]
            del children[bisect.bisect_left(children, (tokens, block))]
            if not children:
                del self._children[parent]
        unsalted = self._unsalted_of.pop(block, None)
        if unsalted is not None:
            self._num_salted[unsalted] -= 1
            if not self._num_salted[unsalted]:
                del self._num_salted[unsalted]
        return block_hash

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

    def match_head(self, parent: BlockHash, tokens: bytes) -> tuple[int, int] | None:
        """The block after `parent` whose head agrees longest with `tokens`, and the number of tokens that agree."""
        children = self._children.get(parent)
        if children is None:
            return None
        place = bisect.bisect_left(children, (tokens,))
        found = max((num_common(tokens, child), block) for child, block in children[max(0, place - 1) : place + 1])
        return (found[1], found[0]) if found[0] else None

    def ancestors(self, block_hash: BlockHash) -> tuple[list[int], BlockHash]:
        """Findable blocks, one after another, the last of this hash; and the hash that the first hangs on, a root unless
        the block of that hash is gone."""
        chain = []
        while (block := self._block_of.get(block_hash)) is not None:
            chain.append(block)
            block_hash = self._head_of[block][0]
        return chain[::-1], block_hash

    def descendants(self, root: BlockHash) -> Iterator[int]:
        """Blocks that hang on a root, parents first."""
        parents = collections.deque([root])
        while parents:
            for _, block in self._children.get(parents.popleft(), ()):
                yield block
                parents.append(self._hash_of[block])

    def has_head(self, block: int) -> bool:
        return block in self._head_of

    def is_under_another_salt(self, unsalted: BlockHash) -> bool:
        """Whether some block holds these tokens: for a hash that is not findable under its own salt."""
        return unsalted in self._block_of or unsalted in self._num_salted

    def __contains__(self, block: int) -> bool:
        return block in self._hash_of

    def __len__(self) -> int:
        return len(self._hash_of)

    def check(self) -> None:
        assert len(self._block_of) == len(self._hash_of), "hashes and blocks are not one to one"
        for block, block_hash in self._hash_of.items():
            assert self._block_of.get(block_hash) == block, f"block {block} is indexed under a hash that is not its own"
        heads = {(parent, *child) for parent, children in self._children.items() for child in children}
        assert heads == {(parent, tokens, block) for block, (parent, tokens) in self._head_of.items()}, "heads differ"
        assert all(children == sorted(children) for children in self._children.values()), "heads are out of order"
        assert self._head_of.keys() <= self._hash_of.keys(), "a head belongs to no findable block"
        assert self._num_salted == collections.Counter(self._unsalted_of.values()), "salted blocks are miscounted"
