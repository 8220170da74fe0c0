"""What stands between the network and the application, from the outside in, as plain ASGI:

    RequestIds   x-request-id comes back with the answer
    ApiKeys      401 without a key
    Bodies       413 and 408: the application gets whole bodies of bounded size
    Front        503 while the model loads and while the server drains

`guard` puts them together.
"""

import asyncio
import contextlib
import hashlib
import hmac
import re
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxkv.server.callers import KEY_NAME
from jaxkv.server.errors import error_response

MAX_BODY_BYTES = 4 * 2**20
"""Parsing JSON holds up everything else, the engine's thread too: for 0.12 s at this size, when it is all token ids."""
# Seconds for a body to arrive; seconds to go on reading one that was refused.
_BODY_S, _LINGER_S = 60.0, 5.0
# Paths that compute nothing and tell nothing of anybody's texts.
_OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics", "/load", "/dashboard", "/dashboard/data"})
_READINESS = frozenset({"/health", "/ping"})


class Front:
    """The application as far as it can be used now.

    Attributes:
      app: None while the model loads.
      draining: nothing new is begun.
      num_inside: requests that are being answered.
    """

    def __init__(self, app: ASGIApp | None = None):
        self.app = app
        self.draining = False
        self.num_inside = 0
        self._unanswered: set[asyncio.Timeout] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is None:
            await error_response("The model is still loading: try again later.", 503)(scope, receive, send)
        elif self.draining and (scope["method"] == "POST" or scope["path"] in _READINESS):
            message = "The server is shutting down: ask another one, or try again later."
            await error_response(message, 503, headers={"connection": "close"})(scope, receive, send)
        else:
            self.num_inside += 1
            try:
                await self._answer(self.app, scope, receive, send)
            finally:
                self.num_inside -= 1

    def give_up(self) -> None:
        """Answer all with a 503 that have had no part of an answer yet, whatever they wait for: a grammar may take half a
        minute."""
        for unanswered in self._unanswered:
            unanswered.reschedule(0)

    async def _answer(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_or_begin(message: Message) -> None:
            self._unanswered.discard(until)
            await send(message)

        try:
            async with asyncio.timeout(None) as until:
                self._unanswered.add(until)
                try:
                    await app(scope, receive, send_or_begin)
                finally:
                    self._unanswered.discard(until)
        except TimeoutError:
            if not until.expired():
                raise
            message = "The server was shut down before the request was answered: ask another one, or try again later."
            await error_response(message, 503, headers={"connection": "close"})(scope, receive, send)


class Bodies:
    """Reads a request's body whole before the application sees any of it, so that a body too large is refused however
    it is sent, and one that never ends is."""

    def __init__(self, app: ASGIApp, max_bytes: int):
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(_BODY_S):
                messages = await self._read(scope, receive)
        except TimeoutError:
            message = f"The request's body did not arrive within {_BODY_S:g} s."
            await error_response(message, 408, headers={"connection": "close"})(scope, receive, send)
            return
        if messages is None:
            await self._refuse(receive, send)
            return

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive) -> list[Message] | None:
        """The body as one message, or that the client has gone; None when the body is too large."""
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if int(declared) > self._max_bytes:
            return None
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return [message]
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_bytes:
                return None
            more = message.get("more_body", False)
        return [{"type": "http.request", "body": b"".join(parts), "more_body": False}]

    async def _refuse(self, receive: Receive, send: Send) -> None:
        message = f"The request's body is larger than {self._max_bytes} bytes, which is this server's max_body_bytes."
        response = error_response(message, 413, headers={"connection": "close"})
        await send({"type": "http.response.start", "status": 413, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        # Most clients look for an answer only when they have sent all: closing at once would reset their connection.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while (await receive()).get("more_body"):
                    pass
        await send({"type": "http.response.body"})


class ApiKeys:
    """Asks for `Authorization: Bearer KEY` wherever something can be computed, and tells the application the key's name."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], names: Sequence[str]):
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._names = list(names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = self._key(scope)
        if scope["path"] in _OPEN_PATHS or key is not None:
            name = self._names[key] if key is not None and self._names else None
            await self._app({**scope, KEY_NAME: name}, receive, send)
            return
        message = "A valid API key is needed: send the header 'Authorization: Bearer KEY'."
        headers = {"www-authenticate": "Bearer"}
        await error_response(message, 401, headers=headers)(scope, receive, send)

    def _key(self, scope: Scope) -> int | None:
        """Which of the keys was sent."""
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        # Constant time: the delay tells neither how much of a key was right, nor its length, nor which one it was.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return matches.index(True) if scheme.lower() == b"bearer" and any(matches) else None


class RequestIds:
    """Gives a client's x-request-id back, for its logs; requests are told apart by ids of our own."""

    _FIT = re.compile(rb"[\x21-\x7e]{1,256}")

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        if not self._FIT.fullmatch(given):
            await self._app(scope, receive, send)
            return

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", given)]
            await send(message)

        await self._app(scope, receive, send_with_id)


def guard(
    app: ASGIApp,
    *,
    api_keys: Sequence[str] = (),
    api_key_names: Sequence[str] = (),
    max_body_bytes: int = MAX_BODY_BYTES,
) -> ASGIApp:
    """The application behind all of the above but `Front`. Only for HTTP: no websockets, no lifespan.

    Args:
      api_keys: any one of them lets a client in; none lets everyone in.
      api_key_names: what to call the keys in statistics, one for each, or none.
    """
    app = Bodies(app, max_body_bytes)
    if api_keys:
        app = ApiKeys(app, api_keys, api_key_names)
    return RequestIds(app)
