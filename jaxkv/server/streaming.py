"""Runs one API request on the engine: gathered into one response, or as server-sent events. A client that goes away
ends its request."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Sequence

import orjson
from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from jaxkv.async_engine import RequestStream, TokenDelta
from jaxkv.core.errors import RequestError
from jaxkv.server.errors import exception_body, json_response
from jaxkv.server.responses import Responses

_DONE = b"data: [DONE]\n\n"


def _event(body: dict) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


async def gathered(http: Request, stream: RequestStream, responses: Responses) -> Response:
    """Waits for all tokens. When the client disconnects first, the request is aborted and the answer goes nowhere."""

    async def gather() -> None:
        while deltas := await _taken(stream, responses):
            for delta in deltas:
                responses.add(delta)

    if not await _while_connected(http.receive, stream, gather()):
        return Response(status_code=499)
    if responses.body.num_prompt_logprobs() is None:
        return json_response(responses.whole())
    # In another thread: writing them takes some 3 us a token of a prompt, of which there may be millions.
    return await asyncio.to_thread(lambda: json_response(responses.whole()))


class EventStream(Response):
    """The request as server-sent events, one a token.

    All events that are ready go out in one write: a step may bring several tokens, and each write of its own costs as
    much as building five events. While the client does not read, events wait in the stream, which is bounded.
    """

    def __init__(self, stream: RequestStream, responses: Responses):
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._stream, self._responses = stream, responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_events() -> None:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async with contextlib.aclosing(_events(self._stream, self._responses)) as batches:
                async for events in batches:
                    await send({"type": "http.response.body", "body": events, "more_body": True})
            await send({"type": "http.response.body", "body": _DONE})

        await _while_connected(receive, self._stream, send_events())


async def _while_connected(receive: Receive, stream: RequestStream, work: Coroutine[None, None, None]) -> bool:
    """Does the work to its end, or until the client has gone: then the stream is cancelled, and the answer is False."""

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.create_task(work), asyncio.create_task(disconnect())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if done := tasks[0].done():
            tasks[0].result()
        return done
    finally:
        stream.cancel()
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


async def _taken(stream: RequestStream, responses: Responses) -> Sequence[TokenDelta]:
    try:
        return await stream.take()
    except RequestError as error:  # of a constraint that cannot go on
        raise responses.body.in_its_words(error) from error


async def _events(stream: RequestStream, responses: Responses) -> AsyncIterator[bytes]:
    """Events that go out together."""
    try:
        while deltas := await _taken(stream, responses):
            yield b"".join([_event(chunk) for delta in deltas for chunk in responses.chunks(delta)])
        if responses.body.include_usage:
            yield _event(responses.usage_chunk())
    except Exception as error:  # the 200 has gone out, so the client can only be told inside the stream
        yield _event(exception_body(error)[0])
