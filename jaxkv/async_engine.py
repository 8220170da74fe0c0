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
from typing import Any, NamedTuple, Protocol

from jaxkv.control.prefix_sharing import PrefixExplanation
from jaxkv.core.errors import RequestError
from jaxkv.core.metrics import EngineSnapshot
from jaxkv.core.request import FinishReason, Request, RequestOutput, TokenLogprobs
from jaxkv.tokenization.output_text import OutputText
from jaxkv.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Deltas, of 400 bytes and more, that may wait for a reader. Two steps of all sequences can be more than the first.
_MAX_UNREAD, _MAX_UNREAD_EACH = 16_384, 64


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
    def explain_prefix(self, request: Request) -> PrefixExplanation: ...


class TokenDelta(NamedTuple):
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
    """The deltas of sequences submitted together, in order within each of them: one at a time as an async iterator, or all
    that have come with `take`.

    Ends after every sequence has finished. Leave it with `cancel`, which aborts what still runs. For the event loop's
    thread only.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, num_sequences: int, abort: Callable[[], None]):
        self.loop = loop
        self._abort = abort
        self._unread: collections.deque[TokenDelta] = collections.deque()
        self._max_unread = max(_MAX_UNREAD, _MAX_UNREAD_EACH * num_sequences)
        self._unfinished = num_sequences
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> TokenDelta:
        """Raises EngineFailedError when the engine fails, RequestError when the request is ended with an error."""
        await self._wait()
        if not self._unread:
            raise StopAsyncIteration
        return self._unread.popleft()

    async def take(self) -> Sequence[TokenDelta]:
        """Waits for deltas and returns all that have come; none after the end. Raises what `__anext__` raises."""
        await self._wait()
        deltas, self._unread = self._unread, collections.deque()
        return deltas

    async def _wait(self) -> None:
        while not self._unread and self._unfinished:
            self._reader = self.loop.create_future()
            await self._reader
        if not self._unread and self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """Abort the sequences that have not finished, and forget what is unread. May be called at any time, more than
        once."""
        if self._unfinished:
            self._abort()
        self._unread.clear()
        self._end()

    def fail(self, error: Exception) -> None:
        """Abort the sequences that have not finished; the reader gets `error` after what has come by now."""
        if self._unfinished:
            self._abort()
            self._end(error)

    def fail_after(self, seconds: float, error: Exception) -> None:
        self._timer = self.loop.call_later(seconds, self.fail, error)

    def put(self, item: TokenDelta | Exception) -> None:
        """What the engine's thread tells."""
        if not self._unfinished:
            return  # cancelled, and the engine has not heard yet
        if isinstance(item, Exception):
            self._end(item)
            return
        self._unread.append(item)
        if item.finish_reason is not None:
            self._unfinished -= 1
            if not self._unfinished:
                self._end()
        elif len(self._unread) > self._max_unread:
            self.fail(RequestError(f"{len(self._unread)} tokens wait to be read: read faster", status=408))
        self._wake()

    def _end(self, error: Exception | None = None) -> None:
        self._unfinished, self._error = 0, error
        if self._timer is not None:
            self._timer.cancel()
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


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
      num_refused: requests that found the queue full.
    """

    def __init__(
        self,
        engine: SyncEngine,
        tokenizer: Tokenizer,
        *,
        max_num_queued_reqs: int | None = None,
        request_timeout: float | None = None,
    ):
        """`max_num_queued_reqs`: most sequences that run and wait together. `request_timeout`: seconds that a request may
        take, its wait included. None: no limit."""
        self.failed: str | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self.snapshot = engine.snapshot()
        self.num_refused = 0
        self._max_num_queued_reqs, self._request_timeout = max_num_queued_reqs, request_timeout
        # Sequences submitted, and those of them that have ended: each is written by one side only.
        self._num_submitted = self._num_ended = 0
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

    def check_room(self, num_sequences: int = 1) -> None:
        """Raises EngineFailedError when nothing can be served any more, RequestError when so many sequences have no place
        in the queue: 429 now, 400 ever."""
        if self.failed is not None:
            raise EngineFailedError(self.failed)
        limit, queued = self._max_num_queued_reqs, self._num_submitted - self._num_ended
        if limit is not None and num_sequences > limit:
            raise RequestError(
                f"the request asks for {num_sequences} sequences, and max_num_queued_reqs, the most that this server takes at "
                f"once, is {limit}: lower n or send fewer prompts at a time",
                param="n",
            )
        if limit is not None and queued + num_sequences > limit:
            self.num_refused += 1
            raise RequestError(
                f"{queued} requests run or wait already, and max_num_queued_reqs is {limit}: try again later",
                status=429,
            )

    async def submit(self, requests: Sequence[Request]) -> RequestStream:
        """Hand requests to the engine, each for `sampling.n` sequences: all are accepted, or none.

        Raises:
          RequestError: one of them can never be served, or none now (429). EngineFailedError: none ever.
        """
        loop = asyncio.get_running_loop()
        ids = [sequence.request_id for request in requests for sequence in request.sequences()]
        stream = RequestStream(loop, len(ids), lambda: self._inbox.put(lambda: self._abort(ids)))
        accepted: concurrent.futures.Future[None] = concurrent.futures.Future()
        with self._inbox_lock:  # else the thread could end between the look and the put
            self.check_room(len(ids))
            self._num_submitted += len(ids)
            self._inbox.put(lambda: self._accept(requests, ids, stream, accepted))
        if self._request_timeout is not None:
            error = RequestError(
                f"the request took longer than request_timeout = {self._request_timeout:g} s", status=408
            )
            stream.fail_after(self._request_timeout, error)
        try:
            await asyncio.wrap_future(accepted)
        except asyncio.CancelledError:
            stream.cancel()
            raise
        except Exception as error:
            stream.put(error)
            raise
        return stream

    async def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """See `Scheduler.reset_prefix_cache`. Raises EngineFailedError when the engine has failed or been shut down."""
        return await self._in_thread(lambda: self._engine.reset_prefix_cache(preempt_running))

    async def explain_prefix(self, request: Request) -> PrefixExplanation:
        """See `Scheduler.explain_prefix`. Raises EngineFailedError when the engine has failed or been shut down."""
        return await self._in_thread(lambda: self._engine.explain_prefix(request))

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        """What `call` returns, or the RequestError it raises, in the engine's thread between two steps."""
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._inbox_lock:
            if self.failed is not None:
                raise EngineFailedError(self.failed)
            self._inbox.put(lambda: self._answer(call, done))
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

    def _accept(
        self,
        requests: Sequence[Request],
        ids: Sequence[str],
        stream: RequestStream,
        accepted: concurrent.futures.Future,
    ) -> None:
        added: list[str] = []
        try:
            if not accepted.set_running_or_notify_cancel():
                return
            if self.failed is not None:
                raise EngineFailedError(self.failed)
            for request in requests:
                self._engine.add(request)
                for sequence in request.sequences():
                    text = OutputText(self._tokenizer, sequence.sampling, sequence.prompt_token_ids)
                    self._running[sequence.request_id] = _Running(sequence, len(added), text, stream)
                    added.append(sequence.request_id)
        except (RequestError, EngineFailedError) as error:
            self._abort(added)
            accepted.set_exception(error)
        except Exception as error:
            accepted.set_exception(EngineFailedError(f"{type(error).__name__}: {error}"))
            raise
        else:
            accepted.set_result(None)
        finally:
            self._num_ended += len(ids) - len(added)  # these have left; those that are added leave later

    def _leave(self, request_id: str) -> bool:
        """The end of a sequence; False if it had ended already."""
        left = self._running.pop(request_id, None) is not None
        self._num_ended += left
        return left

    def _answer(self, call: Callable[[], Any], done: concurrent.futures.Future) -> None:
        if not done.set_running_or_notify_cancel():
            return
        if self.failed is not None:
            done.set_exception(EngineFailedError(self.failed))
            return
        try:
            result = call()
            self.snapshot = self._engine.snapshot()
        except RequestError as error:
            done.set_exception(error)
            return
        except Exception as error:
            done.set_exception(EngineFailedError(f"{type(error).__name__}: {error}"))
            raise
        done.set_result(result)

    def _abort(self, ids: Sequence[str]) -> None:
        for request_id in ids:
            if self._leave(request_id):
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
            self._leave(output.request_id)
            if self._engine.failed is None:  # its constraint has
                self._tell(running, RequestError(output.error, param="structured_outputs"))
            else:
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
                self._leave(output.request_id)
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
        self._num_ended += len(self._running)
        self._running.clear()
        self._post()
        while not self._inbox.empty():
            item = self._inbox.get()
            if item is not _STOP:
                item()


def _put_all(news: Sequence[tuple[RequestStream, TokenDelta | Exception]]) -> None:
    for stream, item in news:
        stream.put(item)
