"""Cuts off HTTP clients that send slowly or too much, which would hold the reward server's memory or its end."""

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_SECONDS = 20  # from the first byte of a request, or from the connection, to the end of its headers
HEAD_BYTES = 2**16  # beyond what the first read brought
SHUTDOWN_SECONDS = 5  # for the rest of a body, once the server is to end


class LimitedProtocol(HttpToolsProtocol):
    """Bounds the time and the size of a request's head, and the time that an unfinished request delays the end.

    uvicorn has no limit for either. It also waits for a half body until its time for graceful shutdown is over.

    Args:
        on_left: called once for a client that leaves, or is cut off, before the answer to its request.
    """

    def __init__(self, *args: Any, on_left: Callable[[], None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.on_left = on_left
        self.head_timer: asyncio.TimerHandle | None = None  # runs while a head is awaited
        self.head_bytes: int | None = None  # read since the head began, or None before its first byte

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._stop_timer()
        self.head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)
        self.head_bytes = 0

    def data_received(self, data: bytes) -> None:
        is_first = self.head_bytes is None
        super().data_received(data)
        if self.head_bytes is None or is_first:
            return
        self.head_bytes += len(data)
        if self.head_bytes > HEAD_BYTES:
            self.transport.abort()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self.head_bytes = None
        super().on_headers_complete()

    def shutdown(self) -> None:
        super().shutdown()
        self.loop.call_later(SHUTDOWN_SECONDS, self._drop_unfinished)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self.head_bytes is not None or (self.cycle is not None and not self.cycle.response_complete):
            self.on_left()
        super().connection_lost(exc)

    def _drop_unfinished(self) -> None:
        if self.cycle is not None and self.cycle.more_body:
            self.transport.abort()

    def _stop_timer(self) -> None:
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None
