"""A policy that evicts the block least likely to be asked for soon, by a model of how conversations return and end.

A conversation comes back at a rate of its own, until after some turn it never does: what marketing knows as customers
who buy at random times until they leave unnoticed. From a block's number of returns x, the time t_x from its first to
its last use and the time T since its first, the MBG/NBD model (Batislam, Denizel and Filiztekin, International Journal
of Research in Marketing 2007; after Fader, Hardie and Lee, Marketing Science 2005) gives in closed form

    P(alive) = 1 / (1 + a / (b + x) * ((alpha + T) / (alpha + t_x)) ** (r + x))
    rate     = P(alive) * (r + x) / (alpha + T)

so a block that was used often and lately stays, one that is overdue by its own rhythm goes, and a new one waits about
as long as returns take here. Around the formula:

  * alpha, the only parameter with a unit, is the geometric mean of the gaps after which blocks did return;
  * a block's history outlives its eviction in a bounded ghost list, as in ARC (Megiddo and Modha, FAST 2003);
  * the other parameters are chosen among a few sets, of which plain LRU is one: each runs a miniature cache on a sample
    of the blocks, and the one that hits most is in force (Waldspurger et al., USENIX ATC 2017);
  * a block stays as long as one that continues it: a long conversation's head can look overdue before its newest turn
    does, and without the head the rest can't be found (3 % of all blocks asked for, on traces of agents).

Time is counted in released blocks. The miniature caches ignore the chains that blocks form.
"""

import collections
import heapq
import math
import zlib
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from jaxkv.control.prefix_index import BlockHash

GHOSTS = 8  # pools' worth of histories kept of evicted blocks
SAMPLE = 8  # one block in so many is seen by the miniature caches
KEPT_SCORE = 0.9  # of the past hits, each time that a pool's worth of blocks was released
LEAD = 1.02  # other parameters take over when they hit so much more
GAP_MEMORY = 20  # pools' worth of returns after which the older ones weigh half

Key = TypeVar("Key", int, BlockHash)


class History(NamedTuple):
    """Uses of a block so far; times of its first insertion and last release (of its last use, while it is owned)."""

    num_uses: int
    first: int
    last: int


class Parameters(NamedTuple):
    """Of the population: r, a, b as in the formula, and alpha in mean gaps."""

    r: float
    alpha: float
    a: float
    b: float


# None is LRU, in force at first. The second expects few returns and long silences, as small pools must; the third is
# nearer to recency, as large pools want it.
CANDIDATES = (None, Parameters(0.3, 1.0, 2.0, 1.0), Parameters(0.5, 0.5, 4.0, 2.0))


def return_rate(parameters: Parameters | None, history: History, now: int, mean_gap: float) -> float:
    """Expected returns a unit of time; with no parameters a value that orders blocks by their last use."""
    if parameters is None:
        return history.last - now
    r, alpha, a, b = parameters
    alpha *= mean_gap
    returns = history.num_uses - 1
    seen, age = history.last - history.first, now - history.first
    log_odds = math.log(a / (b + returns)) + (r + returns) * math.log((alpha + age) / (alpha + seen))
    return (r + returns) / (alpha + age) / (1 + math.exp(min(log_odds, 500.0)))  # exp overflows at 709


class ReturnRate:
    """Least return rate first.

    Attributes:
      parameters: those of `CANDIDATES` in force; None is LRU.
      mean_gap: geometric mean of the time from a block's release to its next use.
    """

    def __init__(self, num_blocks: int):
        self._num_blocks = num_blocks
        self._time = 0
        self._identity: dict[int, tuple[BlockHash, BlockHash]] = {}  # own hash, parent's
        self._block_of: dict[BlockHash, int] = {}
        self._num_children: collections.Counter[BlockHash] = collections.Counter()
        self._history: dict[int, History] = {}
        self._ghosts: collections.OrderedDict[BlockHash, History] = collections.OrderedDict()
        self._sum_log_gaps, self._num_gaps = math.log(num_blocks), 1.0
        self._order: _Order[int] = _Order()
        self._inner: dict[int, None] = {}  # evictable, but blocks that continue them are still there
        self._miniatures = [_Miniature(max(1, num_blocks // SAMPLE), candidate) for candidate in CANDIDATES]
        self._next_choice = num_blocks
        self.parameters = CANDIDATES[0]

    @property
    def mean_gap(self) -> float:
        return math.exp(self._sum_log_gaps / self._num_gaps)

    def insert(self, block: int, block_hash: BlockHash, parent: BlockHash) -> None:
        self._identity[block] = block_hash, parent
        self._block_of[block_hash] = block
        self._num_children[parent] += 1
        history = self._ghosts.pop(block_hash, None)
        if history is None:
            self._history[block] = History(1, self._time, self._time)
        else:
            self._returns(block, history)

    def use(self, block: int) -> None:
        self._order.discard(block)
        self._inner.pop(block, None)
        self._returns(block, self._history[block])

    def release(self, block: int) -> None:
        self._time += 1
        history = self._history[block] = self._history[block]._replace(last=self._time)
        self._order.add(block, history)
        block_hash = self._identity[block][0]
        if zlib.crc32(block_hash) % SAMPLE == 0:
            for miniature in self._miniatures:
                miniature.access(block_hash, history, self._time, self.mean_gap)
        if self._time >= self._next_choice:
            self._choose()

    def evict(self) -> int:
        while self._order:
            block = self._order.pop(self._rate)
            if not self._num_children[self._identity[block][0]]:
                return self._take(block)
            self._inner[block] = None
        # Only where the children of all of them are in use: of two equal blocks the one in use is not the one found.
        if not self._inner:
            raise KeyError("no block can be evicted")
        return self._take(self._inner.popitem()[0])

    def _take(self, block: int) -> int:
        block_hash, parent = self._identity.pop(block)
        del self._block_of[block_hash]
        self._num_children[parent] -= 1
        if not self._num_children[parent]:
            del self._num_children[parent]
            above = self._block_of.get(parent)
            if above in self._inner:
                del self._inner[above]
                self._order.add(above, self._history[above], first=True)
        self._ghosts[block_hash] = self._history.pop(block)
        if len(self._ghosts) > GHOSTS * self._num_blocks:
            self._ghosts.popitem(last=False)
        return block

    def __len__(self) -> int:
        return len(self._order) + len(self._inner)

    def __contains__(self, block: int) -> bool:
        return block in self._order or block in self._inner

    def _rate(self, history: History) -> float:
        return return_rate(self.parameters, history, self._time, self.mean_gap)

    def _returns(self, block: int, history: History) -> None:
        self._history[block] = History(history.num_uses + 1, history.first, self._time)
        if self._time > history.last:
            self._sum_log_gaps += math.log(self._time - history.last)
            self._num_gaps += 1
            if self._num_gaps > GAP_MEMORY * self._num_blocks:
                self._sum_log_gaps /= 2
                self._num_gaps /= 2

    def _choose(self) -> None:
        self._next_choice += self._num_blocks
        in_force = self._miniatures[CANDIDATES.index(self.parameters)]
        best = max(self._miniatures, key=lambda miniature: miniature.score)
        if best.score > LEAD * in_force.score:
            self.parameters = best.parameters
        for miniature in self._miniatures:
            miniature.score *= KEPT_SCORE


class _Order(Generic[Key]):
    """Histories of evictable blocks, in classes of nearly equal ones, each class in order of release.

    Rates change with time, but within a class they keep their order: the one released first has the least. So only the
    heads of the classes (some hundred at most) are compared, and only once for all blocks that are evicted in a row.
    """

    def __init__(self):
        self._classes: dict[tuple[int, int], collections.OrderedDict[Key, History]] = {}
        self._class_of: dict[Key, tuple[int, int]] = {}
        self._heads: list[tuple[float, int, Key]] | None = None  # a heap by rate, then release; None: outdated

    def add(self, key: Key, history: History, *, first: bool = False) -> None:
        """`key` is not there yet, and was released after all that are, or before them (`first`)."""
        half_octaves = int(2 * math.log2(1 + history.last - history.first))
        name = self._class_of[key] = min(history.num_uses, 16), half_octaves
        self._classes.setdefault(name, collections.OrderedDict())[key] = history
        if first:
            self._classes[name].move_to_end(key, last=False)
        self._heads = None

    def discard(self, key: Key) -> None:
        name = self._class_of.pop(key, None)
        if name is not None:
            members = self._classes[name]
            del members[key]
            if not members:
                del self._classes[name]
            self._heads = None

    def pop(self, rate: Callable[[History], float]) -> Key:
        """Take out the one of least rate; of equals the one released first. Raises KeyError when there is none."""
        if not self._class_of:
            raise KeyError("no block can be evicted")
        heads = self._heads
        if heads is None:
            heads = [self._head(members, rate) for members in self._classes.values()]
            heapq.heapify(heads)
        key = heads[0][2]
        name = self._class_of[key]
        self.discard(key)
        if name in self._classes:
            heapq.heapreplace(heads, self._head(self._classes[name], rate))
        else:
            heapq.heappop(heads)
        self._heads = heads
        return key

    @staticmethod
    def _head(members: collections.OrderedDict[Key, History], rate: Callable[[History], float]) -> tuple:
        key, history = next(iter(members.items()))
        return rate(history), history.last, key

    def __len__(self) -> int:
        return len(self._class_of)

    def __contains__(self, key: Key) -> bool:
        return key in self._class_of


class _Miniature:
    """A cache of a few sampled blocks under one set of parameters; counts its hits in `score`."""

    def __init__(self, capacity: int, parameters: Parameters | None):
        self.score = 0.0
        self.parameters = parameters
        self._capacity = capacity
        self._order: _Order[BlockHash] = _Order()

    def access(self, block_hash: BlockHash, history: History, now: int, mean_gap: float) -> None:
        self.score += block_hash in self._order
        self._order.discard(block_hash)
        self._order.add(block_hash, history)
        # A sixteenth at once, since each first eviction after an access compares all classes.
        if len(self._order) > self._capacity + self._capacity // 16:
            while len(self._order) > self._capacity:
                self._order.pop(lambda history: return_rate(self.parameters, history, now, mean_gap))
