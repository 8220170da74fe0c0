"""What the engine counts, and what each finished request's life took. Seconds are on the engine's clock."""

import collections
import dataclasses
import enum
import math
from collections.abc import Sequence

from jaxkv.core.request import FinishReason


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0..100), linear between the two nearest values; NaN of nothing."""
    if not 0 <= q <= 100:
        raise ValueError(f"Expected a percentile between 0 and 100, got {q=}")
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


class Samples:
    """Count and sum of all observations, and the latest ones for percentiles.

    Attributes:
      latest: the last `window` observations (None: all of them), oldest first.
    """

    def __init__(self, window: int | None = 4096):
        self.count = 0
        self.total = 0.0
        self.latest: collections.deque[float] = collections.deque(maxlen=window)

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.latest.append(value)

    def extend(self, values: Sequence[float]) -> None:
        self.count += len(values)
        self.total += sum(values)
        self.latest.extend(values)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan

    def percentile(self, q: float) -> float:
        return percentile(tuple(self.latest), q)


@dataclasses.dataclass(frozen=True)
class RequestMetrics:
    """One request from arrival to end.

    Attributes:
      first_scheduled: when a plan first held it; first_token / last_token: when tokens reached the host. None if it
        ended before.
      num_cached_tokens: prompt tokens found in the prefix cache, or shared with a fork's parent, when it was first
        admitted.
      num_generated_tokens: tokens delivered, the stop id included; of a fork, only its own.
    """

    request_id: str
    arrival: float
    finished: float
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_preemptions: int = 0
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    @property
    def e2e(self) -> float:
        return self.finished - self.arrival

    @property
    def ttft(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def queue_time(self) -> float | None:
        return None if self.first_scheduled is None else self.first_scheduled - self.arrival

    @property
    def prefill_time(self) -> float | None:
        """From the first plan to the first token."""
        return None if self.first_token is None else self.first_token - self.first_scheduled

    @property
    def decode_time(self) -> float | None:
        """From the first to the last token."""
        return None if self.first_token is None else self.last_token - self.first_token

    @property
    def tpot(self) -> float | None:
        """Mean time for each token after the first; None below two tokens."""
        return self.decode_time / (self.num_generated_tokens - 1) if self.num_generated_tokens > 1 else None


class MissReason(enum.Enum):
    """Why a prompt token had to be computed."""

    FIRST_SEEN = "first_seen"  # its block is not remembered
    EVICTED = "evicted"  # its block was cached and overwritten, or a block before it was
    SHORTER_THAN_BLOCK = "shorter_than_block"  # at the end of the prompt, in a block that it does not fill
    SALT = "salt"  # cached, but under another cache_salt
    NEEDS_LOGITS = "needs_logits"  # cached, but prompt log-probabilities are wanted
    LAST_TOKEN = "last_token"  # of a wholly cached prompt: the next token needs its logits
    RECOMPUTED = "recomputed"  # again, after a preemption


class PrefixCacheStats:
    """What requests found in the prefix cache, in tokens: hit + missed = queried.

    A prompt is queried once, when it is first admitted; what a fork shares with its parent is a hit. After a preemption
    only what must be computed again counts, as queried and as missed; what is found again is no hit, since the request
    put it there itself.

    Attributes:
      hit_full_block: in blocks shared whole; hit_partial_block: in the copied head of a block.
    """

    def __init__(self):
        self.queried = 0
        self.hit_full_block = 0
        self.hit_partial_block = 0
        self.missed: dict[MissReason, int] = dict.fromkeys(MissReason, 0)

    @property
    def hit(self) -> int:
        return self.hit_full_block + self.hit_partial_block

    @property
    def num_missed(self) -> int:
        return sum(self.missed.values())

    @property
    def hit_rate(self) -> float:
        """Share of queried tokens that were found; 0 before the first."""
        return self.hit / self.queried if self.queried else 0.0


class EngineStats:
    """Running totals since the start; the scheduler and the engine write them, anyone on their thread may read.

    Attributes:
      num_requests: accepted so far; num_finished: ended so far, by reason.
      prompt_tokens: of admitted requests, and what forks take over of their parents' output; cached_tokens: those of
        them that came from the prefix cache or a parent.
      computed_tokens: tokens run through prefill, those recomputed after a preemption included.
      generated_tokens: tokens delivered.
      preemptions: times a running request gave its blocks back.
      cascade_rows: rows times steps whose attention to a shared prefix was computed once for their group.
      steps: plans made. decode_calls: plans that decode. loop_steps: how many decode calls had each C.
      itl: time between two deliveries to one request (one call may deliver several tokens; TPOT is the mean a token).
      prefix_cache: what the prefix cache gave, and why not more; when it is off, of forks only.
      requests: the latest finished requests.
    """

    def __init__(self, window: int | None = 4096):
        """`window`: how many observations and finished requests are kept; None keeps all (for replays)."""
        self.num_requests = 0
        self.num_finished: collections.Counter[FinishReason] = collections.Counter()
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.computed_tokens = 0
        self.generated_tokens = 0
        self.preemptions = 0
        self.cascade_rows = 0
        self.steps = 0
        self.decode_calls = 0
        self.loop_steps: collections.Counter[int] = collections.Counter()
        self.prefix_cache = PrefixCacheStats()
        self.ttft = Samples(window)
        self.itl = Samples(window)
        self.e2e = Samples(window)
        self.queue_time = Samples(window)
        self.requests: collections.deque[RequestMetrics] = collections.deque(maxlen=window)

    @property
    def hit_rate(self) -> float:
        """Share of admitted prompt tokens that came from the prefix cache; 0 before the first."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def record_finished(self, metrics: RequestMetrics) -> None:
        self.num_finished[metrics.finish_reason] += 1
        self.e2e.add(metrics.e2e)
        self.requests.append(metrics)
