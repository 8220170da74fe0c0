"""AsyncEngine: the engine in its own thread, with a stream of tokens and text for each caller on an event loop.

    event loop   submit -> | inbox |                  <- one call_soon_threadsafe a step, with all news
    engine thread          drain inbox, engine.step(), text and stop strings, post news

Nothing else touches the engine, so it needs no locks, and no caller can hold it up.
"""

import asyncio
import collections
import concurrent.futures
import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from jaxkv.core.errors import RequestError
from jaxkv.core.metrics import EngineSnapshot
from jaxkv.core.request import FinishReason, Request, RequestOutput, TokenLogprobs
from jaxkv.tokenization.output_text import OutputText
from jaxkv.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class EngineFailedError(Exception):
    """The engine can serve nothing any more; the message says why."""


class SyncEngine(Protocol):
    """What is used of `jaxkv.control.engine.Engine`. `add` begins all of `Request.sequences`."""

    failed: str | None

    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> object: ...
    def finish(self, request_id: str) -> object: ...
    def step(self) -> list[RequestOutput]: ...
    def has_work(self) -> bool: ...
    def snapshot(self) -> EngineSnapshot: ...
    def reset_prefix_cache(self, preempt_running: bool = False) -> bool: ...


@dataclasses.dataclass(frozen=True)
class TokenDelta:
    """One token of one sequence, and the text that became certain with it.

    Attributes:
      index: which of the sequences submitted together, all those of one request before the next one's.
      token_ids: one token, or none when only the end is told.
      text: may be empty: a part of a character, or the beginning of a possible stop string.
      prompt_logprobs: with the first token, if asked for: one entry a prompt token, None for the first.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


class RequestStream:
    """Async iterator over the deltas of sequences submitted together, in order within each of them.

    Ends after every sequence has finished. Leave it with `cancel`, which aborts what still runs.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, num_sequences: int, cancel: Callable[[], None]):
        self.loop = loop
        self._cancel = cancel
        self._news: asyncio.Queue[TokenDelta | Exception] = asyncio.Queue()
        self._unfinished = num_sequences

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> TokenDelta:
        """Raises EngineFailedError when the engine fails, RequestError when it ends the request with an error."""
        if self._unfinished == 0:
            raise StopAsyncIteration
        item = await self._news.get()
        if isinstance(item, Exception):
            self._unfinished = 0
            raise item
        self._unfinished -= item.finish_reason is not None
        return item

    def cancel(self) -> None:
        """Abort the requests that have not finished. May be called at any time, more than once."""
        if self._unfinished:
            self._unfinished = 0
            self._cancel()

    def put(self, item: TokenDelta | Exception) -> None:
        """For the event loop's thread only."""
        self._news.put_nowait(item)


@dataclasses.dataclass
class _Running:
    request: Request
    index: int
    text: OutputText
    stream: RequestStream


_STOP = object()
_News = dict[asyncio.AbstractEventLoop, list[tuple[RequestStream, TokenDelta | Exception]]]


class AsyncEngine:
    """Owns an engine and its thread.

    Attributes:
      failed: why the engine can serve nothing any more, or None.
      on_failure: called once, in the engine's thread, when it fails.
      snapshot: the engine's counters as of its last step; replaced as a whole after each, before anyone hears of the
        step's tokens. So any thread may read it at any moment, an engine that hangs or has failed included.
    """

    def __init__(self, engine: SyncEngine, tokenizer: Tokenizer):
        self.failed: str | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self.snapshot = engine.snapshot()
        self._engine = engine
        self._tokenizer = tokenizer
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()
        self._inbox_lock = threading.Lock()
        self._running: dict[str, _Running] = {}
        self._news: _News = collections.defaultdict(list)
        self._thread = threading.Thread(target=self._run, name="jaxkv-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Fail what still runs as soon as the present step ends, and serve no more; does not wait."""
        self._inbox.put(_STOP)

    def shutdown(self, timeout: float = 60.0) -> None:
        """Fail what still runs and wait for the thread to end after its present step.

        Raises:
          TimeoutError: the step takes longer than `timeout` seconds.
        """
        self.stop()
        if self._thread.is_alive():
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise TimeoutError(f"the engine's thread did not end within {timeout} s")

    @property
    def num_running(self) -> int:
        """Sequences that have been accepted and not finished."""
        return len(self._running)

    async def submit(self, requests: Sequence[Request]) -> RequestStream:
        """Hand requests to the engine, each for `sampling.n` sequences: all are accepted, or none.

        Raises:
          RequestError: one of them can never be served. EngineFailedError: none can.
        """
        loop = asyncio.get_running_loop()
        ids = [sequence.request_id for request in requests for sequence in request.sequences()]
        stream = RequestStream(loop, len(ids), lambda: self._inbox.put(lambda: self._abort(ids)))
        accepted: concurrent.futures.Future[None] = concurrent.futures.Future()
        with self._inbox_lock:  # else the thread could end between the look and the put
            if self.failed is not None:
                raise EngineFailedError(self.failed)
            self._inbox.put(lambda: self._accept(requests, stream, accepted))
        try:
            await asyncio.wrap_future(accepted)
        except asyncio.CancelledError:
            stream.cancel()
            raise
        return stream

    async def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """See `Scheduler.reset_prefix_cache`. Raises EngineFailedError when the engine has failed or been shut down."""
        done: concurrent.futures.Future[bool] = concurrent.futures.Future()
        with self._inbox_lock:
            if self.failed is not None:
                raise EngineFailedError(self.failed)
            self._inbox.put(lambda: self._reset_prefix_cache(preempt_running, done))
        return await asyncio.wrap_future(done)

    # What follows runs in the engine's thread.

    def _run(self) -> None:
        failure = None
        try:
            while failure is None and self._drain_inbox():
                self._deliver(self._engine.step())
                failure = self._engine.failed
        except Exception as error:  # whatever broke it, no caller may be left waiting
            logger.exception("the engine's thread failed")
            failure = f"{type(error).__name__}: {error}"
        self._close(failure or "the engine has been shut down")
        if failure is not None:
            self.on_failure()

    def _drain_inbox(self) -> bool:
        """Do what callers asked for; wait for it when there is nothing else to do. False: stop."""
        idle = not self._engine.has_work()
        while idle or not self._inbox.empty():
            item = self._inbox.get()
            if item is _STOP:
                return False
            item()
            idle = idle and not self._engine.has_work()
        return True

    def _accept(self, requests: Sequence[Request], stream: RequestStream, accepted: concurrent.futures.Future) -> None:
        if not accepted.set_running_or_notify_cancel():
            return
        if self.failed is not None:
            accepted.set_exception(EngineFailedError(self.failed))
            return
        added: list[str] = []
        try:
            for request in requests:
                self._engine.add(request)
                for sequence in request.sequences():
                    text = OutputText(self._tokenizer, sequence.sampling, sequence.prompt_token_ids)
                    self._running[sequence.request_id] = _Running(sequence, len(added), text, stream)
                    added.append(sequence.request_id)
        except RequestError as error:
            self._abort(added)
            accepted.set_exception(error)
        except Exception as error:
            accepted.set_exception(EngineFailedError(f"{type(error).__name__}: {error}"))
            raise
        else:
            accepted.set_result(None)

    def _reset_prefix_cache(self, preempt_running: bool, done: concurrent.futures.Future) -> None:
        if not done.set_running_or_notify_cancel():
            return
        if self.failed is not None:
            done.set_exception(EngineFailedError(self.failed))
            return
        try:
            is_empty = self._engine.reset_prefix_cache(preempt_running)
            self.snapshot = self._engine.snapshot()
        except Exception as error:
            done.set_exception(EngineFailedError(f"{type(error).__name__}: {error}"))
            raise
        done.set_result(is_empty)

    def _abort(self, ids: Sequence[str]) -> None:
        for request_id in ids:
            if self._running.pop(request_id, None) is not None:
                self._engine.abort(request_id)

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            running = self._running.get(output.request_id)
            if running is not None:  # else it was aborted, or its text has reached a stop string
                self._deliver_one(running, output)
        self.snapshot = self._engine.snapshot()
        self._post()

    def _deliver_one(self, running: _Running, output: RequestOutput) -> None:
        if output.finish_reason is FinishReason.ERROR:
            del self._running[output.request_id]
            self._tell(running, EngineFailedError(output.error or "the engine failed"))
            return
        # A step brings several tokens; each goes out alone, so that streams tell every token's own time and text.
        tokens = [output.token_ids[i : i + 1] for i in range(len(output.token_ids))]
        if not tokens and output.finish_reason is not None:
            tokens = [()]
        for i, token_ids in enumerate(tokens):
            last = i == len(tokens) - 1
            delta = running.text.feed(
                token_ids,
                output.finish_reason if last else None,
                output.stop_token_id if last else None,
            )
            self._tell(
                running,
                TokenDelta(
                    index=running.index,
                    token_ids=token_ids,
                    text=delta.text,
                    logprobs=output.logprobs[i] if output.logprobs and token_ids else None,
                    finish_reason=delta.finish_reason,
                    stop_reason=delta.stop_reason,
                    num_prompt_tokens=output.num_prompt_tokens,
                    num_cached_tokens=output.num_cached_tokens,
                    prompt_logprobs=output.prompt_logprobs if i == 0 else None,
                ),
            )
            if delta.finish_reason is not None:
                del self._running[output.request_id]
                if not (last and output.finish_reason):  # the engine does not know of the stop string
                    self._engine.finish(output.request_id)
                return

    def _tell(self, running: _Running, item: TokenDelta | Exception) -> None:
        self._news[running.stream.loop].append((running.stream, item))

    def _post(self) -> None:
        for loop, news in self._news.items():
            try:
                loop.call_soon_threadsafe(_put_all, news)
            except RuntimeError:  # the loop has closed: nobody reads these any more
                logger.warning("dropped %d deltas for a closed event loop", len(news))
        self._news = collections.defaultdict(list)

    def _close(self, reason: str) -> None:
        """End every request, those in the inbox too; none comes in afterwards."""
        with self._inbox_lock:
            self.failed = reason
        error = EngineFailedError(reason)
        for running in self._running.values():
            self._tell(running, error)
        self._running.clear()
        self._post()
        while not self._inbox.empty():
            item = self._inbox.get()
            if item is not _STOP:
                item()


def _put_all(news: Sequence[tuple[RequestStream, TokenDelta | Exception]]) -> None:
    for stream, item in news:
        stream.put(item)
