"""uvicorn's HTTP protocol with a bound on the part before the body, in bytes and in time: it has none of its own."""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_MAX_HEAD_BYTES = 64 * 2**10
_HEAD_S = 30.0


class BoundedHead(HttpToolsProtocol):
    """Request line and headers arrive within 30 s of a connection's or request's beginning, and are no longer than 64 KiB."""

    _head_timer: asyncio.TimerHandle | None = None
    _head_bytes: int | None = None
    """Received of a head that is not complete; None between heads."""

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
                self.send_400_response(f"The request's head is larger than {_MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        self._start_timer()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_bytes = None
        self._head_timer.cancel()
        super().on_headers_complete()

    def _start_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._head_timer = self.loop.call_later(_HEAD_S, self.transport.abort)
