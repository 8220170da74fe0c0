"""uvicorn's HTTP protocol with a bound on the part before the body, in bytes and in time: it has none of its own. What is
no HTTP is answered as all other mistakes are."""

import asyncio
import http

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from jaxkv.server.errors import error_body

_MAX_HEAD_BYTES = 64 * 2**10
_HEAD_S = 30.0
_TOO_LARGE = f"The request's head is larger than {_MAX_HEAD_BYTES} bytes."


class BoundedHead(HttpToolsProtocol):
    """Request line and headers arrive within 30 s of a connection's or request's beginning, and are no longer than 64 KiB.

    A client that shuts down its writing side gets no answer: to the end of its sending (FIN) the connection is closed, as
    uvicorn does it. A client that is gone sends the same, and nothing tells the two apart until something is written to it.
    With half-closed connections kept open, a request whose client had closed ran to its end where it was not streamed (40 s
    of 40 s) and for three steps more where it was, instead of being aborted with the step at hand.
    """

    _head_timer: asyncio.TimerHandle | None = None
    _head_bytes: int | None = None
    """Received of a head that is not complete; None between heads."""
    _head_size = 0
    """Of the head that is being read, as far as it has been understood."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, error: Exception | None) -> None:
        self._head_timer.cancel()
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_bytes is not None:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(_TOO_LARGE)

    def on_message_begin(self) -> None:
        self._head_bytes = self._head_size = 0
        self._start_timer()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._head_size += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_size += len(name) + len(value) + 4  # ": " and the end of the line
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_bytes = None
        self._head_timer.cancel()
        if self._head_size > _MAX_HEAD_BYTES:  # it came all at once
            raise ValueError(_TOO_LARGE)  # answered by `send_400_response`
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._end_with(400, _TOO_LARGE if self._head_size > _MAX_HEAD_BYTES else msg)

    def _unsupported_upgrade_warning(self) -> None:
        """Answered as if it had not asked; two lines in the log for each would let anyone fill it."""

    def _start_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._head_timer = self.loop.call_later(_HEAD_S, self._give_up)

    def _give_up(self) -> None:
        if self._head_bytes and (self.cycle is None or self.cycle.response_complete):
            self._end_with(408, f"The request's head did not arrive within {_HEAD_S:g} s.")
        else:
            self.transport.abort()

    def _end_with(self, status: int, message: str) -> None:
        body = orjson.dumps(error_body(message, status))
        head = f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()
