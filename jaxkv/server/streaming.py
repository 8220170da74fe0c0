"""Runs one API request on the engine: gathered into one response, or as server-sent events. A client that goes away
ends its request."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import orjson
from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from jaxkv.async_engine import RequestStream
from jaxkv.server.errors import exception_body, json_response
from jaxkv.server.responses import Responses

_DONE = b"data: [DONE]\n\n"


def _event(body: dict) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


async def gathered(http: Request, stream: RequestStream, responses: Responses) -> Response:
    """Waits for all tokens. When the client disconnects first, the request is aborted and the answer goes nowhere."""

    async def gather() -> None:
        async for delta in stream:
            responses.add(delta)

    async def disconnect() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.create_task(gather()), asyncio.create_task(disconnect())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            return Response(status_code=499)
        tasks[0].result()
        if responses.body.num_prompt_logprobs() is None:
            return json_response(responses.whole())
        # In another thread: writing them takes some 3 us a token of a prompt, of which there may be millions.
        return await asyncio.to_thread(lambda: json_response(responses.whole()))
    finally:
        stream.cancel()
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


class EventStream(StreamingResponse):
    """The request as server-sent events, one a token."""

    def __init__(self, stream: RequestStream, responses: Responses):
        self._stream = stream
        super().__init__(
            _events(stream, responses), media_type="text/event-stream", headers={"cache-control": "no-cache"}
        )

    async def __call__(self, scope, receive, send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:  # also when the client has gone
            self._stream.cancel()


async def _events(stream: RequestStream, responses: Responses) -> AsyncIterator[bytes]:
    body = responses.body
    try:
        async for delta in stream:
            for chunk in responses.chunks(delta):
                yield _event(chunk)
        if body.include_usage:
            yield _event(responses.usage_chunk())
    except Exception as error:  # the 200 has gone out, so the client can only be told inside the stream
        yield _event(exception_body(error)[0])
    yield _DONE
