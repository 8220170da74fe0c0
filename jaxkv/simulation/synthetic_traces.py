"""Made-up traces of the shapes that traffic has, for comparing eviction policies where no recorded trace is at hand.

Each is a deterministic function of its seed. One request a second; only the order matters to a serial replay.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Iterator

from jaxkv.simulation.traces import Trace, TraceRequest

BLOCK_SIZE = 16
Chain = tuple[int, ...]


class _Ids:
    """Fresh block ids."""

    def __init__(self):
        self._next = itertools.count()

    def take(self, count: int) -> Chain:
        return tuple(itertools.islice(self._next, count))


def _conversations(rng: random.Random, ids: _Ids, *, end: float = 0.35, think: float = 60.0) -> Iterator[Chain]:
    """One system prompt; a new talk or the next turn of one, which ends with a chance of `end` at each turn."""
    system = ids.take(2)
    due: list[tuple[float, int, Chain]] = []
    for now in itertools.count():
        if due and due[0][0] <= now:
            talk = heapq.heappop(due)[2]
        else:
            talk = system
        talk += ids.take(rng.randint(2, 30))
        yield talk
        if rng.random() > end:
            heapq.heappush(due, (now + think * rng.lognormvariate(0, 1), now, talk))


def _agents(rng: random.Random, ids: _Ids) -> Iterator[Chain]:
    """Twenty kinds of agent with long instructions; each run takes many steps in quick succession, then ends."""
    kinds = [ids.take(rng.randint(40, 120)) for _ in range(20)]
    runs: list[list[int]] = []
    while True:
        if len(runs) < 12:
            runs.append(list(rng.choice(kinds)))
        run = rng.choice(runs)
        run += ids.take(rng.randint(1, 12))
        yield tuple(run)
        if rng.random() < 0.05:
            runs.remove(run)


def _shared_prompts(rng: random.Random, ids: _Ids) -> Iterator[Chain]:
    """200 system prompts of unequal popularity (Zipf), each time with a question of its own."""
    prompts = [ids.take(rng.randint(10, 60)) for _ in range(200)]
    weights = [1 / place for place in range(1, len(prompts) + 1)]
    while True:
        yield rng.choices(prompts, weights)[0] + ids.take(rng.randint(1, 8))


def _scans(rng: random.Random, ids: _Ids) -> Iterator[Chain]:
    """Conversations, and every now and then a batch job over documents that are read once."""
    talks = _conversations(rng, ids)
    while True:
        yield from itertools.islice(talks, 200)
        for _ in range(40):
            yield ids.take(100)


def _loop(rng: random.Random, ids: _Ids) -> Iterator[Chain]:
    """100 documents, asked about one after another, again and again."""
    documents = [ids.take(rng.randint(20, 60)) for _ in range(100)]
    for document in itertools.cycle(documents):
        yield document + ids.take(1)


def _drift(rng: random.Random, ids: _Ids) -> Iterator[Chain]:
    """Documents that many ask about for a while: each is soon replaced by a new one, so that old counts mislead."""
    documents = [ids.take(rng.randint(20, 60)) for _ in range(60)]
    while True:
        if rng.random() < 0.1:
            documents[rng.randrange(len(documents))] = ids.take(rng.randint(20, 60))
        yield rng.choice(documents) + ids.take(rng.randint(1, 4))


def _unique(rng: random.Random, ids: _Ids) -> Iterator[Chain]:
    """Nothing is ever asked again but a system prompt."""
    system = ids.take(20)
    while True:
        yield system + ids.take(rng.randint(1, 60))


_SHAPES: dict[str, Callable[[random.Random, _Ids], Iterator[Chain]]] = {
    "conversations": _conversations,
    "agents": _agents,
    "shared_prompts": _shared_prompts,
    "scans": _scans,
    "loop": _loop,
    "drift": _drift,
    "unique": _unique,
}
SYNTHETIC_SHAPES = tuple(_SHAPES)


def synthetic_trace(shape: str, num_requests: int, seed: int = 0) -> Trace:
    """A trace of one of `SYNTHETIC_SHAPES`, in full blocks of 16 tokens."""
    chains = _SHAPES[shape](random.Random(seed), _Ids())
    requests = [
        TraceRequest(float(number), len(chain) * BLOCK_SIZE, 64, chain)
        for number, chain in enumerate(itertools.islice(chains, num_requests))
    ]
    return Trace(shape, tuple(requests), BLOCK_SIZE)
