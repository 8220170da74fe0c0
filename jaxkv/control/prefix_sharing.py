"""What a request finds in the cache when it is admitted, what it leaves there, and the counters of both.

    |<-- blocks shared whole -->|<- head copied ->|<------ computed ------>|
    0                    a multiple of P      num_tokens            len(token_ids)

The copied head is the part of one cached block that agrees with the prompt: it is copied into the request's own block
(copy-on-write), and computing goes on behind it. The last token is always computed: its logits are needed.

A block that a request does not fill, its tail, is findable too, by its head only, and so never shared whole: from the
prompt's last chunk on under the prompt's tokens there, from the request's end on under all that it holds. When it fills
it gets a full block's name.

A fork finds all but its last token in its parent's blocks, as long as the parent runs: whole ones are shared and the
last, partial one is copied, whether or not they can be found by hash. Later it looks up its tokens like any request.

Of unseen tokens (`core.unseen_tokens`) only whole blocks are found: by their names, and nothing is known of heads.

Inside a plan block copies run before prefill. So a block that is written in the plan under construction can be shared
whole by others of that plan, but copied from only in later ones; and a block that is copied from stays owned until the
plan is complete, or it might be the target of another copy.
"""

import dataclasses

from jaxkv.control.block_manager import NULL_BLOCK, BlockManager
from jaxkv.control.pinning import PinnedPrefixes
from jaxkv.control.prefix_index import BlockHash, chain_hashes, num_common, token_bytes
from jaxkv.control.request_state import RequestState, Status
from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.metrics import MissReason, PrefixCacheStats
from jaxkv.core.plan import BlockCopy
from jaxkv.core.retention import Retention

# Blocks of generated tokens are published so many at a time, the rest when the request lets go of them: one by one they
# cost the host nearly twice as much, felt at 256 rows. What others share of a running request is its prompt; a fork
# publishes what it hangs on.
PUBLISHED_AT_ONCE = 4


@dataclasses.dataclass(frozen=True, slots=True)
class PrefixHit:
    """The longest cached prefix of a request's known tokens, short of the last one.

    Attributes:
      blocks: shared whole, in order, the null block where none is needed (see retention); num_full_tokens: in them.
      source / num_head_tokens: block whose head is to be copied behind them, or None and 0.
      num_early_tokens: behind these, in a block that the plan under construction writes: to be copied in the next one.
      num_dropped_tokens: found, but there is no block to copy them to.
      is_complete: the last token was found too.
      num_unused_tokens: found, but computed all the same: prompt log-probabilities are wanted. Then nothing is shared.
    """

    blocks: tuple[int, ...] = ()
    num_full_tokens: int = 0
    source: int | None = None
    num_head_tokens: int = 0
    num_early_tokens: int = 0
    num_dropped_tokens: int = 0
    is_complete: bool = False
    num_unused_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_full_tokens + self.num_head_tokens

    @property
    def used_blocks(self) -> tuple[int, ...]:
        blocks = self.blocks
        if NULL_BLOCK in blocks:
            blocks = tuple([block for block in blocks if block != NULL_BLOCK])
        return blocks if self.source is None else (*blocks, self.source)

    def without_head(self) -> "PrefixHit":
        return dataclasses.replace(self, source=None, num_head_tokens=0, num_dropped_tokens=self.num_head_tokens)

    def unused(self) -> "PrefixHit":
        unused = self.num_tokens + self.num_early_tokens
        return PrefixHit(is_complete=self.is_complete, num_unused_tokens=unused)


def _running_parent(state: RequestState) -> RequestState | None:
    return state.parent if state.parent is not None and state.parent.status is Status.RUNNING else None


def _tail_names(state: RequestState, place: int, tokens: bytes) -> tuple[BlockHash, BlockHash | None]:
    """Hash of a tail's tokens, and what it would be without the salt that the request has."""
    (name,) = chain_hashes(state.parent_hash(place), [tokens])
    return name, chain_hashes(state.unsalted_parent_hash(place), [tokens])[0] if state.is_salted else None


class PrefixSharing:
    """The scheduler's way to the prefix index: `find`, `take`, `publish`, `give_back`, and once a plan `end_admissions`.

    Attributes:
      pins: prefixes that are kept whatever comes.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        stats: PrefixCacheStats,
        retention: Retention | None = None,
    ):
        self._is_enabled = config.enable_prefix_caching
        self._share_partial = config.share_partial_blocks
        self._blocks = blocks
        self._block_size = blocks.block_size
        self._stats = stats
        self._retention = retention
        self.pins = PinnedPrefixes(blocks, config.cache_root, config.max_pinned_blocks)
        self._copies: list[BlockCopy] = []  # of the plan under construction
        self._new_heads: dict[BlockHash, list[tuple[int, bytes]]] = {}  # of blocks that it writes, by the block before

    def find(self, state: RequestState) -> PrefixHit:
        """Changes nothing: `take` must follow before anything else is allocated."""
        parent = _running_parent(state)
        if parent is not None and (hit := self._find_in_parent(state, parent)) is not None:
            return hit
        if not self._is_enabled:
            return PrefixHit()
        size, num_known = self._block_size, len(state.token_ids)
        state.extend_hashes(size)
        index = self._blocks.index
        blocks = self._match(state.block_hashes[: num_known // size], num_known)
        num_full = len(blocks) * size
        source, num_head = None, 0
        if num_full == num_known:  # even the last token: the last block is not shared, but copied but for that token
            source, num_head = blocks[-1], size
            blocks, num_full = blocks[:-1], num_full - size
        elif self._share_partial and not state.is_unseen:
            tokens = token_bytes(state.token_ids[num_full : num_full + size])
            source, num_head = index.match_head(state.parent_hash(len(blocks)), tokens) or (None, 0)
        num_new = self._num_in_new_heads(state, len(blocks))
        is_complete = num_full + max(num_head, num_new) == num_known
        num_head, num_new = (min(num, num_known - 1 - num_full) for num in (num_head, num_new))
        if num_head == 0 or not self._share_partial or not index.has_head(source):
            source, num_head = None, 0
        if self._retention is not None:
            blocks = self._retention.seen_of(blocks)
        hit = PrefixHit(blocks, num_full, source, num_head, max(0, num_new - num_head), is_complete=is_complete)
        return hit.unused() if state.needs_prompt_logits else hit

    def _match(self, hashes: list[BlockHash], num_known: int) -> tuple[int, ...]:
        """The leading blocks of these names that need not be computed; null blocks where nothing looks any more."""
        if self._retention is None:
            return self._blocks.match(hashes).blocks
        found = [self._blocks.index.find(name) for name in hashes]
        return tuple([block or NULL_BLOCK for block in found[: self._retention.num_findable(found, num_known)]])

    def _find_in_parent(self, state: RequestState, parent: RequestState) -> PrefixHit | None:
        """A fork's known tokens are the first ones of its parent: all but the last are shared, published or not. None when
        the parent has gone on and given back what the fork needs."""
        num_shared = len(state.token_ids) - 1
        num_blocks, num_head = divmod(num_shared, self._block_size)
        blocks = tuple(parent.blocks[:num_blocks])
        if self._retention is not None:
            if parent.num_kept_from > self._retention.first_seen(num_blocks * self._block_size):
                return None
            blocks = self._retention.seen_of(blocks)
        source = parent.blocks[num_blocks] if num_head else None
        return PrefixHit(blocks, num_shared - num_head, source, num_head, is_complete=True)

    def _num_in_new_heads(self, state: RequestState, place: int) -> int:
        """Tokens from this block on that stand at the head of a block which this plan writes."""
        heads = self._new_heads and self._new_heads.get(state.parent_hash(place))
        if not heads or not self._share_partial or state.is_unseen:
            return 0
        start = place * self._block_size
        tokens = token_bytes(state.token_ids[start : start + self._block_size])
        return max(num_common(tokens, other) for _, other in heads)

    def take(self, state: RequestState, hit: PrefixHit, num_blocks: int) -> None:
        """Give the request its `num_blocks` blocks, those of the hit first, and count what was found."""
        if self._is_enabled or hit.is_complete:
            self._count(state, hit)
        if (parent := _running_parent(state)) is not None:  # or the blocks that follow would hang in the air
            self.publish(parent, hit.num_full_tokens, planned=False)
        self._blocks.share(hit.used_blocks)  # before allocating, which might evict them
        if self._retention is not None:
            state.num_kept_from = self._retention.kept_from(hit.blocks)
        num_hits = len(hit.blocks)
        # The copy of a whole block takes no findable block of that content: others may copy from it in this plan.
        is_copy = hit.is_complete and hit.source is not None
        own = self._blocks.allocate(num_blocks - num_hits, () if is_copy else state.block_hashes[num_hits:])
        state.blocks = [*hit.blocks, *own]
        state.num_computed = hit.num_tokens
        state.num_published_blocks = num_hits
        if hit.source is not None:
            self._copies.append(BlockCopy(hit.source, own[0], hit.num_head_tokens))

    def publish(self, state: RequestState, num_tokens: int, *, planned: bool, with_tail: bool = False) -> None:
        """Make the full blocks among the first `num_tokens`, all of them known, findable, and `with_tail` the rest too.

        `planned`: the plan under construction writes them, not an earlier one.
        """
        num_full, num_tail = divmod(num_tokens, self._block_size)
        if not (with_tail and self._share_partial) or state.is_unseen:
            num_tail = 0
        first = state.num_published_blocks
        is_longer_tail = num_full == first and num_tail > state.num_tail_tokens
        if not self._is_enabled or not (num_full > first or is_longer_tail):
            return
        if state.num_tail_tokens:
            self._blocks.unregister_tail(state.blocks[first])
            state.num_tail_tokens = 0
        state.extend_hashes(self._block_size)
        for place in range(first, num_full):
            unsalted = state.unsalted_hashes[place] if state.is_salted else None
            self._register(state, place, state.block_tokens[place], state.block_hashes[place], unsalted, planned, False)
        state.num_published_blocks = num_full
        if num_tail:
            tokens = token_bytes(state.token_ids[num_tokens - num_tail : num_tokens])
            names = _tail_names(state, num_full, tokens)
            _, num_found = self._blocks.index.match_head(state.parent_hash(num_full), tokens) or (None, 0)
            # Not if another block holds as much already.
            if num_found < num_tail and self._register(state, num_full, tokens, *names, planned, True):
                state.num_tail_tokens = num_tail

    def give_back(self, state: RequestState) -> None:
        """Free what no token that is still to be planned looks at."""
        start, end = state.num_kept_from, self._retention.first_seen(state.num_scheduled)
        if end <= start:
            return
        if end > state.num_published_blocks:  # under full names where the tokens are known
            self.publish(state, min(state.num_computed, end * self._block_size), planned=False)
            if start <= state.num_published_blocks < end:  # the tail goes too, under its name
                state.num_tail_tokens = 0
        self._blocks.free(state.blocks[start:end])
        state.blocks[start:end] = [NULL_BLOCK] * (end - start)
        state.num_kept_from = end

    def _register(
        self,
        state: RequestState,
        place: int,
        tokens: bytes,
        name: BlockHash,
        unsalted: BlockHash | None,
        planned: bool,
        is_tail: bool,
    ) -> bool:
        block, parent = state.blocks[place], state.parent_hash(place)
        if block == NULL_BLOCK:
            return False
        if not self._blocks.register(block, name, parent, unsalted, is_tail=is_tail):
            return False
        if not is_tail:
            self.pins.published(state.root, block)
        if planned:
            self._new_heads.setdefault(parent, []).append((block, tokens))
        else:
            self._blocks.index.add_head(block, parent, tokens)
        return True

    def end_admissions(self) -> tuple[BlockCopy, ...]:
        """The plan's block copies. What is allocated from here on may be their sources: it is written after them."""
        copies, self._copies = tuple(self._copies), []
        self._blocks.free([copy.src for copy in copies])
        for parent, heads in self._new_heads.items():
            for block, tokens in heads:
                self._blocks.index.add_head(block, parent, tokens)
        self._new_heads.clear()
        return copies

    def _count(self, state: RequestState, hit: PrefixHit) -> None:
        stats, num_known = self._stats, len(state.token_ids)
        if state.first_scheduled is not None:
            stats.queried += num_known - hit.num_tokens
            stats.missed[MissReason.RECOMPUTED] += num_known - hit.num_tokens
            return
        stats.queried += num_known
        stats.hit_full_block += hit.num_full_tokens
        stats.hit_partial_block += hit.num_head_tokens
        end = num_known
        if hit.is_complete:
            end -= 1
            stats.missed[MissReason.LAST_TOKEN] += 1
        stats.missed[MissReason.NEEDS_LOGITS] += hit.num_unused_tokens
        start = hit.num_tokens + hit.num_unused_tokens
        num_uncopied = hit.num_dropped_tokens + hit.num_early_tokens
        stats.missed[MissReason.SHORTER_THAN_BLOCK] += num_uncopied
        start += num_uncopied
        while start < end:
            place = start // self._block_size
            stop = min(end, (place + 1) * self._block_size)
            stats.missed[self._reason(state, hit, place)] += stop - start
            start = stop

    def _reason(self, state: RequestState, hit: PrefixHit, place: int) -> MissReason:
        index = self._blocks.index
        if hit.is_complete:
            return MissReason.SHORTER_THAN_BLOCK
        if place < len(state.block_hashes):
            name = state.block_hashes[place]
            unsalted = state.unsalted_hashes[place] if state.is_salted else None
        elif self._share_partial and not state.is_unseen:
            tokens = token_bytes(state.token_ids[place * self._block_size :])
            name, unsalted = _tail_names(state, place, tokens)
        else:
            return MissReason.SHORTER_THAN_BLOCK
        if self._blocks.was_evicted(name) or index.find(name) is not None:
            return MissReason.EVICTED
        return MissReason.SALT if index.is_under_another_salt(unsalted or name) else MissReason.FIRST_SEEN
