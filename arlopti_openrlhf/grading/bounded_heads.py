"""Bounds what a client may send that is no body, in bytes and in seconds. uvicorn bounds neither."""

import asyncio

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

HEAD_BYTES = 2**16  # of a request's head, or of what follows its body
HEAD_SECONDS = 30.0  # from a connection, or from the first byte after an answer, to the end of a head


class BoundedHeads(HttpToolsProtocol):
    """`HttpToolsProtocol` that ends a connection whose request's head is too long (431) or takes too long (408)."""

    _unread = 0  # bytes since the last head or body
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_waiting()

    def data_received(self, data: bytes) -> None:
        self._unread += len(data)
        super().data_received(data)
        if self._unread > HEAD_BYTES:
            self._end(431)
        elif self.cycle is None or self.cycle.response_complete:
            self._wait_for_head()

    def on_headers_complete(self) -> None:
        self._unread = 0
        self._stop_waiting()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unread = 0
        super().on_message_complete()

    def _wait_for_head(self) -> None:
        if self._timer is None and not self.transport.is_closing():
            self._timer = self.loop.call_later(HEAD_SECONDS, self._end, 408)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self, status: int) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:  # else it would stand in the midst of an answer
            self.transport.write(STATUS_LINE[status] + b"content-length: 0\r\nconnection: close\r\n\r\n")
        self.transport.close()
