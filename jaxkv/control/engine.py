"""The engine's loop: requests in, plans to the executor, tokens out.

With two steps in flight the next one is planned and submitted while the device still works on the last:

    host    plan 1 | plan 2 | read 1, plan 3 | read 2, plan 4 | ...
    device           step 1 |        step 2 |        step 3 | ...
"""

import collections
import logging
from collections.abc import Callable

from jaxkv.control.executor import Executor, StepHandle
from jaxkv.control.pinning import PinnedPrefixes
from jaxkv.control.prefix_sharing import PrefixExplanation
from jaxkv.control.request_state import RequestState
from jaxkv.control.scheduler import Scheduler
from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.clock import Clock, MonotonicClock
from jaxkv.core.errors import RequestError
from jaxkv.core.metrics import EngineSnapshot, EngineStats, RequestMetrics
from jaxkv.core.request import FinishReason, Request, RequestOutput, SamplingParams

logger = logging.getLogger(__name__)


class Engine:
    """Runs requests on an executor.

    Not thread-safe: one thread owns the engine and makes every call. An exception inside `step` is fatal, since the
    executor's donated cache may be gone: every live request ends with ERROR, and new ones are refused.

    Attributes:
      scheduler: for inspection and tests.
      stats: running totals.
      failed: what broke the engine, or None.
    """

    def __init__(
        self,
        executor: Executor,
        config: SchedulerConfig = SchedulerConfig(),
        *,
        clock: Clock | None = None,
        max_in_flight: int = 2,
        stats: EngineStats | None = None,
    ):
        """`max_in_flight`: steps submitted but not read: 2 overlaps host and device, 1 does not.

        `clock` must be the one that the executor stamps its results with.
        """
        if max_in_flight < 1:
            raise ValueError(f"Expected at least one step in flight, got {max_in_flight=}")
        self.executor = executor
        self.clock = MonotonicClock() if clock is None else clock
        self.stats = EngineStats() if stats is None else stats
        self.scheduler = Scheduler(executor.limits, config, stats=self.stats)
        self.failed: str | None = None
        self._max_in_flight = max_in_flight
        self._handles: collections.deque[StepHandle] = collections.deque()
        self._news: list[RequestOutput] = []

    @property
    def on_end(self) -> Callable[[RequestState, RequestMetrics], None] | None:
        """See `Scheduler.on_end`; called by `step` and `abort`, and must be quick."""
        return self.scheduler.on_end

    @on_end.setter
    def on_end(self, observer: Callable[[RequestState, RequestMetrics], None] | None) -> None:
        self.scheduler.on_end = observer

    def add(self, request: Request) -> None:
        """Queue a request; its outputs come from `step`, those of n > 1 sequences under the ids of
        `Request.sequences`. Raises RequestError when it can't be served; no value of any field harms the others."""
        self._check_alive()
        self.scheduler.add(request, self.clock.now())

    def fork(self, parent_id: str, request_id: str, sampling: SamplingParams) -> tuple[int, ...]:
        """Queue a request that goes on from a live one's tokens: its prompt and all that has been read of its output.

        The two share the blocks of these tokens; of the one that the fork writes to it has a copy, and of the tokens it
        computes only the last again. If the parent has ended when the fork's turn comes, the fork finds in the prefix
        cache what is there and computes the rest: the tokens are the same.

        Cache salt and priority are the parent's; the prompt too, so that the parent's output counts in the fork's
        max_tokens and min_tokens. It is not delivered again.

        Args:
          sampling: the fork's own (its `n` means nothing); without a seed it draws one.

        Returns:
          The parent's output so far, which the fork's own continues.

        Raises:
          RequestError: the parent isn't live (404), or the fork can't be served.
        """
        self._check_alive()
        return self.scheduler.fork(parent_id, request_id, sampling, self.clock.now())

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request wherever it is; the next `step` returns its last output. False if it has already ended."""
        output = self.scheduler.finish(request_id, reason, self.clock.now())
        if output is not None:
            self._news.append(output)
        return output is not None

    def finish(self, request_id: str) -> bool:
        """End a request whose text reached a stop string, with STOP; otherwise like `abort`."""
        return self.abort(request_id, FinishReason.STOP)

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """See `Scheduler.reset_prefix_cache`."""
        return self.scheduler.reset_prefix_cache(preempt_running)

    def explain_prefix(self, request: Request) -> PrefixExplanation:
        """See `Scheduler.explain_prefix`."""
        self._check_alive()
        return self.scheduler.explain_prefix(request)

    def has_work(self) -> bool:
        """Whether `step` has anything to do or to tell."""
        return self.scheduler.has_requests or bool(self._handles) or bool(self._news)

    def step(self) -> list[RequestOutput]:
        """Submit what can be submitted, then wait for the oldest step; returns all news, in order."""
        news, self._news = self._news, []
        if self.failed is not None:
            return news
        try:
            while len(self._handles) < self._max_in_flight:
                plan = self.scheduler.schedule(self.clock.now())
                if plan is None:
                    break
                self._handles.append(self.executor.submit(plan))
            if self._handles:
                news += self.scheduler.update(self._handles.popleft().result())
            elif self.scheduler.has_requests:
                raise RuntimeError("requests wait, nothing is in flight, and yet nothing can be planned")
        except Exception as error:  # whatever it is, no request may be left without an end
            logger.exception("the engine failed")
            news += self._fail(error)
        return news

    @property
    def pins(self) -> PinnedPrefixes:
        """Prefixes to keep in the cache whatever comes."""
        return self.scheduler.prefixes.pins

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def kv_cache_usage(self) -> float:
        """Share of the pool's blocks that requests own (0 to 1); cached blocks count as free."""
        blocks = self.scheduler.blocks
        return 1 - blocks.num_free / blocks.num_usable

    def snapshot(self) -> EngineSnapshot:
        """All that is counted, as of now, for other threads."""
        blocks = self.scheduler.blocks
        return self.stats.snapshot(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_blocks=blocks.num_usable,
            num_owned_blocks=blocks.num_usable - blocks.num_free,
            num_cached_blocks=blocks.num_cached,
            num_evictions=blocks.num_evictions,
        )

    def _check_alive(self) -> None:
        if self.failed is not None:
            raise RequestError(f"the engine has failed and must be restarted: {self.failed}", status=503)

    def _fail(self, error: Exception) -> list[RequestOutput]:
        self.failed = f"{type(error).__name__}: {error}"
        self._handles.clear()
        outputs = self.scheduler.abandon(FinishReason.ERROR, self.clock.now())
        return [output._replace(error=self.failed) for output in outputs]
