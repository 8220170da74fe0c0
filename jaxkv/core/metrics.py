"""What the engine counts, and what each finished request's life took. Seconds are on the engine's clock."""

import collections
import dataclasses
import enum
from bisect import bisect_left
from collections.abc import Mapping
from typing import NamedTuple

from jaxkv.core.request import FinishReason
from jaxkv.core.samples import Histogram as Histogram
from jaxkv.core.samples import Samples as Samples
from jaxkv.core.samples import percentile as percentile

# Bounds of vLLM's histograms, so that its dashboards read ours. Seconds:
TTFT_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
               640, 2560)  # fmt: skip
ITL_BOUNDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
LATENCY_BOUNDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
# Tokens; of these vLLM has those up to max_model_len.
LENGTH_BOUNDS = tuple(digit * 10**power for power in range(8) for digit in (1, 2, 5))
STEP_TOKENS_BOUNDS = (1, *(2**power for power in range(3, 15)))
# Counts:
SEQUENCES_BOUNDS = (1, 2, 5, 10, 20)
PREEMPTIONS_BOUNDS = (1, 2, 3, 4, 5, 10, 20)
# Ours. Seconds that a block lies in the cache:
BLOCK_SECONDS_BOUNDS = (0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400)
# Tokens of a prompt, by which requests are told apart where a mean would hide what happens to the long ones:
PROMPT_LENGTH_BOUNDS = (128, 512, 2048, 8192, 32768)
PROMPT_LENGTHS = ("1-128", "129-512", "513-2048", "2049-8192", "8193-32768", "32769+")


def prompt_length_bucket(num_tokens: int) -> int:
    """Index in `PROMPT_LENGTHS`."""
    return bisect_left(PROMPT_LENGTH_BOUNDS, num_tokens)


class MissReason(enum.Enum):
    """Why a prompt token had to be computed."""

    FIRST_SEEN = "first_seen"  # its block is not remembered
    EVICTED = "evicted"  # its block was cached and overwritten, or a block before it was
    SHORTER_THAN_BLOCK = "shorter_than_block"  # in a block that could be neither shared whole nor copied from
    SALT = "salt"  # cached, but under another cache_salt
    NEEDS_LOGITS = "needs_logits"  # cached, but prompt log-probabilities are wanted
    LAST_TOKEN = "last_token"  # of a wholly cached prompt: the next token needs its logits
    RECOMPUTED = "recomputed"  # again, after a preemption


@dataclasses.dataclass(frozen=True)
class RequestMetrics:
    """One request from arrival to end.

    Attributes:
      first_scheduled: when a plan first held it; first_token / last_token: when tokens reached the host. None if it
        ended before.
      num_cached_tokens: prompt tokens found in the prefix cache, or shared with a fork's parent, when it was first
        admitted.
      num_generated_tokens: tokens delivered, the stop id included; of a fork, only its own.
      max_tokens: most that it could have generated.
      num_sequences: n of the request that it is a sequence of, told by the one that ends last; None by the others.
      most_generated_tokens: of any of these sequences; means something with num_sequences only.
      num_computed_tokens: run through prefill, again after preemptions included.
      missed: tokens that the first admission did not find, by why not; nothing where it did not look.
      longest_gap: between two deliveries; None below two.
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
    max_tokens: int = 0
    num_sequences: int | None = None
    most_generated_tokens: int = 0
    num_computed_tokens: int = 0
    missed: Mapping[MissReason, int] = dataclasses.field(default_factory=dict)
    longest_gap: float | None = None
    caller: str | None = None
    cache_salt: str | None = None

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
    def inference_time(self) -> float | None:
        """From the first plan to the last token."""
        return None if self.first_token is None else self.last_token - self.first_scheduled

    @property
    def tpot(self) -> float | None:
        """Mean time for each token after the first; None below two tokens."""
        return self.decode_time / (self.num_generated_tokens - 1) if self.num_generated_tokens > 1 else None


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


class LengthCounts(NamedTuple):
    """Finished requests with prompts of one bucket of lengths.

    Attributes:
      prompt_tokens: of them; cached_tokens: those found in the prefix cache.
      ttft: of those that had a token.
    """

    requests: int
    prompt_tokens: int
    cached_tokens: int
    ttft: Histogram


class _LengthStats:
    """Counts `LengthCounts`."""

    def __init__(self):
        self.requests = self.prompt_tokens = self.cached_tokens = 0
        self.ttft = Samples(0, TTFT_BOUNDS)

    def add(self, metrics: RequestMetrics) -> None:
        self.requests += 1
        self.prompt_tokens += metrics.num_prompt_tokens
        self.cached_tokens += metrics.num_cached_tokens
        if metrics.ttft is not None:
            self.ttft.add(metrics.ttft)

    def counts(self) -> LengthCounts:
        return LengthCounts(self.requests, self.prompt_tokens, self.cached_tokens, self.ttft.histogram())


class EngineSnapshot(NamedTuple):
    """Totals of `EngineStats` and the state of queue and pool at one moment, all of the same; nothing in it changes.

    Attributes:
      num_blocks: usable ones. num_owned_blocks: in use by requests or pins; num_cached_blocks: findable, and evicted
        when others run out.
      histograms: by the name of the attribute of `EngineStats`.
      by_prompt_length: in the order of `PROMPT_LENGTHS`.
    """

    num_finished: dict[FinishReason, int]
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    generated_tokens: int
    preemptions: int
    cascade_rows: int
    steps: int
    compiles: int
    loop_steps: dict[int, int]
    queried: int
    hit_full_block: int
    hit_partial_block: int
    missed: dict[MissReason, int]
    histograms: dict[str, Histogram]
    by_prompt_length: tuple[LengthCounts, ...]
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_owned_blocks: int = 0
    num_cached_blocks: int = 0
    num_evictions: int = 0

    @property
    def hit(self) -> int:
        return self.hit_full_block + self.hit_partial_block

    @property
    def kv_cache_usage(self) -> float:
        """Share of the pool's blocks that requests or pins own, 0 to 1."""
        return self.num_owned_blocks / self.num_blocks if self.num_blocks else 0.0


class EngineStats:
    """Running totals since the start; the scheduler and the engine write them, anyone on their thread may read. Other
    threads get a `snapshot`.

    Attributes:
      num_requests: accepted so far; num_finished: ended so far, by reason.
      prompt_tokens: of admitted requests, and what forks take over of their parents' output; cached_tokens: those of
        them that came from the prefix cache or a parent.
      computed_tokens: tokens run through prefill, those recomputed after a preemption included.
      generated_tokens: tokens delivered.
      preemptions: times a running request gave its blocks back.
      cascade_rows: rows times steps whose attention to a shared prefix was computed once for their group.
      steps: plans made. decode_calls: plans that decode. loop_steps: how many decode calls had each C.
      compiles: executables that steps waited for, after the warm-up.
      itl: time between two deliveries to one request (one call may deliver several tokens; TPOT is the mean a token).
      step_tokens: prompt tokens computed and tokens generated by each plan.
      block_age / block_idle: of full blocks that were evicted: since they were written, since their last user let go.
      block_reuse_gap: of cached blocks that a request found: since their last user let go.
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
        self.compiles = 0
        self.loop_steps: collections.Counter[int] = collections.Counter()
        self.prefix_cache = PrefixCacheStats()
        self.ttft = Samples(window, TTFT_BOUNDS)
        self.itl = Samples(window, ITL_BOUNDS)
        self.e2e = Samples(window, LATENCY_BOUNDS)
        self.queue_time = Samples(window, LATENCY_BOUNDS)
        self.step_tokens = Samples(0, STEP_TOKENS_BOUNDS)
        # Of finished requests, which are kept themselves:
        self.tpot = Samples(0, ITL_BOUNDS)
        self.inference_time = Samples(0, LATENCY_BOUNDS)
        self.prefill_time = Samples(0, LATENCY_BOUNDS)
        self.decode_time = Samples(0, LATENCY_BOUNDS)
        self.prompt_length = Samples(0, LENGTH_BOUNDS)
        self.computed_prompt_length = Samples(0, LENGTH_BOUNDS)
        self.generated_length = Samples(0, LENGTH_BOUNDS)
        self.longest_generated_length = Samples(0, LENGTH_BOUNDS)
        self.max_tokens = Samples(0, LENGTH_BOUNDS)
        self.num_sequences = Samples(0, SEQUENCES_BOUNDS)
        self.num_preemptions = Samples(0, PREEMPTIONS_BOUNDS)
        self.block_age = Samples(0, BLOCK_SECONDS_BOUNDS)
        self.block_idle = Samples(0, BLOCK_SECONDS_BOUNDS)
        self.block_reuse_gap = Samples(0, BLOCK_SECONDS_BOUNDS)
        self._samples = {name: value for name, value in vars(self).items() if isinstance(value, Samples)}
        self.requests: collections.deque[RequestMetrics] = collections.deque(maxlen=window)
        self._by_length = [_LengthStats() for _ in PROMPT_LENGTHS]
        self._length_counts: tuple[LengthCounts, ...] | None = None  # until the next request ends

    @property
    def hit_rate(self) -> float:
        """Share of admitted prompt tokens that came from the prefix cache; 0 before the first."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def record_finished(self, metrics: RequestMetrics) -> None:
        self.num_finished[metrics.finish_reason] += 1
        self.requests.append(metrics)
        self._by_length[prompt_length_bucket(metrics.num_prompt_tokens)].add(metrics)
        self._length_counts = None
        self.e2e.add(metrics.e2e)
        self.prompt_length.add(metrics.num_prompt_tokens)
        self.generated_length.add(metrics.num_generated_tokens)
        self.max_tokens.add(metrics.max_tokens)
        self.num_preemptions.add(metrics.num_preemptions)
        if metrics.num_sequences is not None:
            self.num_sequences.add(metrics.num_sequences)
            self.longest_generated_length.add(metrics.most_generated_tokens)
        if metrics.first_token is not None:
            self.prefill_time.add(metrics.prefill_time)
            self.decode_time.add(metrics.decode_time)
            self.inference_time.add(metrics.inference_time)
            self.computed_prompt_length.add(metrics.num_prompt_tokens - metrics.num_cached_tokens)
        if metrics.tpot is not None:
            self.tpot.add(metrics.tpot)

    def snapshot(self, **state: int) -> EngineSnapshot:
        """`state`: fields of EngineSnapshot that only the engine knows. Takes some 10 us, once a step."""
        cache = self.prefix_cache
        if self._length_counts is None:
            self._length_counts = tuple([stats.counts() for stats in self._by_length])
        return EngineSnapshot(
            num_finished=dict(self.num_finished),
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            computed_tokens=self.computed_tokens,
            generated_tokens=self.generated_tokens,
            preemptions=self.preemptions,
            cascade_rows=self.cascade_rows,
            steps=self.steps,
            compiles=self.compiles,
            loop_steps=dict(self.loop_steps),
            queried=cache.queried,
            hit_full_block=cache.hit_full_block,
            hit_partial_block=cache.hit_partial_block,
            missed=cache.missed.copy(),
            histograms={name: samples.histogram() for name, samples in self._samples.items()},
            by_prompt_length=self._length_counts,
            **state,
        )
