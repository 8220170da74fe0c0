"""What a running engine's latest requests were like: told of each one's end by the engine's thread, asked by others."""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable

from jaxkv.control.engine import Engine
from jaxkv.control.request_state import RequestState
from jaxkv.core.clock import Clock, MonotonicClock
from jaxkv.core.metrics import RequestMetrics
from jaxkv.core.request_record import RequestRecord
from jaxkv.insight.hit_rates import (
    Group,
    HiddenTail,
    TimeBin,
    by_time,
    groups,
    hidden_tails,
    split_by_caller,
    split_by_prompt_length,
)
from jaxkv.insight.request_log import RequestLog

# The window: requests that ended within so many seconds, and the latest so many of them.
WINDOW_SECONDS, WINDOW_REQUESTS = 900.0, 4096
WINDOWS = {"1m": 60.0, "5m": 300.0, "15m": 900.0}
MOST_CALLERS = 10
_MOST_BINS, _BIN_SECONDS = 60, (1, 2, 5, 10, 15)


@dataclasses.dataclass(frozen=True)
class TrafficReport:
    """The window's requests as of `now` (Unix time).

    Attributes:
      windows: by name in `WINDOWS`.
      by_caller: as in `split_by_caller`; none if callers are not to be named.
    """

    now: float
    whole: Group
    windows: dict[str, Group]
    by_prompt_length: tuple[Group, ...]
    by_caller: tuple[Group, ...]
    by_time: tuple[TimeBin, ...]
    tails_by_prompt_length: tuple[HiddenTail, ...]
    tails_by_caller: tuple[HiddenTail, ...]


class Traffic:
    """A sliding window of the requests that ended last, and the log of all of them, if there is one."""

    def __init__(
        self,
        log: RequestLog | None = None,
        *,
        names_callers: bool = True,
        max_age: float = 1.0,
        clock: Clock | None = None,
        unix_time: Callable[[], float] = time.time,
    ):
        """
        Args:
          names_callers: whether reports tell who sent what.
          max_age: seconds that a report is given out again; making one takes tens of milliseconds.
          clock: the engine's. unix_time: a simulation's clock, where times are to stay as simulated.
        """
        self.log = log
        self._names_callers, self._max_age = names_callers, max_age
        self._clock, self._unix_time = MonotonicClock() if clock is None else clock, unix_time
        self._block_size = 0
        self._lock = threading.Lock()  # of the records
        self._records: collections.deque[RequestRecord] = collections.deque(maxlen=WINDOW_REQUESTS)
        self._report_lock = threading.Lock()
        self._report: TrafficReport | None = None

    def attach(self, engine: Engine) -> None:
        """Watch this engine, whose thread must not have begun."""
        self._clock, self._block_size = engine.clock, engine.executor.limits.block_size
        engine.on_end = self.ended

    def ended(self, state: RequestState, metrics: RequestMetrics) -> None:
        """Takes some 5 us of the engine's thread."""
        record = RequestRecord.of(metrics, self._unix_time() - self._clock.now())
        with self._lock:
            self._records.append(record)
        if self.log is not None:
            self.log.put(record, state, self._block_size)

    def records(self, since: float) -> list[RequestRecord]:
        """Those of the window that ended since then (Unix time), oldest end first."""
        with self._lock:
            records = list(self._records)
        return _since(records, since)

    def report(self) -> TrafficReport:
        """As of now, or a moment ago."""
        with self._report_lock:  # of those who ask at once one works
            now = self._unix_time()
            if self._report is None or not 0 <= now - self._report.now < self._max_age:
                self._report = self._made(now)
            return self._report

    def _made(self, now: float) -> TrafficReport:
        records = self.records(now - WINDOW_SECONDS)
        by_length = split_by_prompt_length(records)
        by_caller = split_by_caller(records, MOST_CALLERS) if self._names_callers else {}
        return TrafficReport(
            now=now,
            whole=Group.of("all", records),
            windows={name: Group.of(name, _since(records, now - seconds)) for name, seconds in WINDOWS.items()},
            by_prompt_length=groups(by_length),
            by_caller=groups(by_caller),
            by_time=_time_bins(records, now),
            tails_by_prompt_length=hidden_tails(by_length),
            tails_by_caller=hidden_tails(by_caller),
        )


def _since(records: list[RequestRecord], start: float) -> list[RequestRecord]:
    return [record for record in records if record.ended >= start]


def _time_bins(records: list[RequestRecord], now: float) -> tuple[TimeBin, ...]:
    """Up to the whole second that has ended, as far back as the records reach; edges lie at multiples of a bin, so that
    a chart of them moves but does not flicker."""
    if not records:
        return ()
    span = now - min(record.ended for record in records)
    width = next((width for width in _BIN_SECONDS if span <= width * (_MOST_BINS - 1)), _BIN_SECONDS[-1])
    end = (now // width + 1) * width
    return by_time(records, end - _MOST_BINS * width, width, _MOST_BINS)
