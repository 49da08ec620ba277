"""Bounds the size and the time of a request's head, for which uvicorn has no limits with httptools."""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 64 * 2**10
HEAD_SECONDS = 20.0


class BoundedProtocol(HttpToolsProtocol):
    """`HttpToolsProtocol` with one change: it closes a connection whose head is too long or does not end in time.

    What stands between the parts of a body, and after it, counts as a head.
    """

    head_bytes = 0  # since the last part of a body
    deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_of_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self.head_bytes += len(data)
        super().data_received(data)
        if self.head_bytes > HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The head is longer than {HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        self._await_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._end_of_head()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self.head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.head_bytes = 0
        super().on_message_complete()

    def _await_head(self) -> None:
        self._end_of_head()
        self.deadline = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _end_of_head(self) -> None:
        self.head_bytes = 0
        if self.deadline is not None:
            self.deadline.cancel()
