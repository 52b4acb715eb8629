"""HTTP over a connection: one whose client takes nothing of what was sent is cut."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

UNREAD_S = 60.0
"""Seconds that a client may take nothing of what was sent to it; then its connection is cut."""


class Connection(H11Protocol):
    """uvicorn's connection, which is cut when what was sent does not leave.

    Closing one waits until the last byte has left. A client that reads nothing could have it, its
    file descriptor and an end of the server wait for as long as it likes.
    """

    _watch: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to hear of every byte that waits, not of those beyond 64 KiB."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)

    def pause_writing(self) -> None:
        """Something waits to be read by the client."""
        super().pause_writing()
        self._expect_less_than(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """Nothing waits any more."""
        super().resume_writing()
        self._stop_watching()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        self._stop_watching()
        super().connection_lost(exc)

    def _expect_less_than(self, n_bytes: int) -> None:
        self._watch = self.loop.call_later(UNREAD_S, self._look, n_bytes)

    def _look(self, n_bytes: int) -> None:
        left = self.transport.get_write_buffer_size()
        if left < n_bytes:
            self._expect_less_than(left)
        else:
            self.transport.abort()

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
