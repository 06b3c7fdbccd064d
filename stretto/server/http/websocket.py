"""uvicorn's WebSocket protocol with limits to what a client may hold or delay. `run.py` passes it
to uvicorn, and everything runs on the event loop. The differences:

- A text message comes as bytes, so that a large one is not decoded on the event loop.
- A connection that is closing and whose client reads nothing is cut; uvicorn would wait for ever.
- Large reads are parsed in short turns, of which all connections together have one in each pass of
  the event loop.
- One read may bring 40,000 tiny frames. Clients that send such floods share a small part of the
  loop's time, a message has a bounded number of fragments, and a client that reads no pongs is cut.
- Data that the app has not received yet counts as memory of the client's sessions, so that a
  message that is never finished costs other clients nothing."""

from __future__ import annotations

import asyncio
import time
from asyncio import BaseTransport, TimerHandle
from collections.abc import Generator
from functools import partial
from typing import Any, cast

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame
from websockets.http11 import Request
from websockets.streams import StreamReader

from stretto.server.http.flow_throttle import TurnQueue
from stretto.server.loop_time import HEAVY
from stretto.server.shares import Holding, Shares, client_of_address

CUT_S = 5.0  # for a client to take the close frame and what lies before it
SLICE_BYTES = 512  # parsed at once: 85 frames at most
TURN_S = 0.001  # of parsing, then others have their turn
# a turn that brought so many frames, of fewer bytes on average, is part of a flood
MANY_FRAMES = 64
TINY_BYTES = 64
MAX_FRAGMENTS = 16_384  # of a message
FREE_BYTES = 1 << 20  # in one pass of the event loop
SMALL_BYTES = 64 << 10  # of a connection, which is never cut for holding these
INCOMING = "stretto.incoming"  # where an ASGI scope has what was received and is not taken in
# that a client may leave in the transport; the app itself waits at a small part of that
MAX_UNREAD_BYTES = 4 << 20


class LargeReader(StreamReader):
    """Hands the payload of a large frame over as it lies here, where the parent copies it."""

    missing = 0  # bytes of a large payload

    def read_exact(self, n: int) -> Generator[None, None, bytearray]:
        if n <= SMALL_BYTES:
            return (yield from super().read_exact(n))
        while len(self.buffer) < n:
            if self.eof:
                raise EOFError(f"stream ends after {len(self.buffer)} bytes, expected {n} bytes")
            self.missing = n - len(self.buffer)
            yield
        self.missing = 0
        payload = self.buffer
        self.buffer = payload[n:]
        del payload[n:]
        return payload


class Socket(WebSocketsSansIOProtocol):
    def __init__(
        self, floods: TurnQueue, large_reads: TurnQueue, memory: Shares, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.frame_reader = LargeReader()
        self.conn.reader = self.frame_reader
        self.conn.parser = self.conn.parse()  # the one before has begun with the reader before
        next(self.conn.parser)
        self.floods = floods
        self.large_reads = large_reads
        self.incoming = Holding(memory, "")
        self.message_bytes = 0  # bytes of a message's fragments so far
        self.queued_bytes = 0  # of messages that are whole, up to the one that the app has now
        self.current_bytes = 0  # of that one
        self.cut: TimerHandle | None = None
        self.unparsed = b""  # read and not parsed
        # it waits for its turn to parse that, and nothing more is read until then
        self.parse_pending = False
        self.num_parsed = 0  # frames, in this turn

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)
        self.incoming.belong_to(client_of_address(self.client[0] if self.client else ""))

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if self.response.status_code == 101:
            cast(dict[str, Any], self.scope)[INCOMING] = self.incoming  # the app begins after this

    def data_received(self, data: bytes) -> None:
        if self.parse_pending:  # a transport may have had more in its hands
            self.unparsed += data
        elif len(data) <= HEAVY:
            self._parse(data)
        else:
            self._wait(data, self.large_reads)
        self._count()

    def handle_events(self) -> None:
        self.num_parsed += len(self.conn.events)
        super().handle_events()

    def _parse(self, data: bytes) -> None:
        began = time.perf_counter()
        at = 0
        self.num_parsed = 0
        while at < len(data) and not self.transport.is_closing():
            # within a large payload there are no frames
            size = max(SLICE_BYTES, self.frame_reader.missing)
            super().data_received(data[at : at + size])
            at += size
            if self.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
                self.transport.abort()
            elif at < len(data) and time.perf_counter() - began >= TURN_S:
                break
        flood = self.num_parsed >= MANY_FRAMES and self.num_parsed * TINY_BYTES > min(at, len(data))
        if not self.transport.is_closing() and (flood or at < len(data)):
            self._wait(data[at:], self.floods if flood else self.large_reads)

    def _wait(self, rest: bytes, line: TurnQueue) -> None:
        """For a turn to parse the rest; nothing more is read until then."""
        self.unparsed = rest
        self.parse_pending = True
        self.transport.pause_reading()
        line.wait(self.loop, self._parse_rest)

    def _count(self) -> None:
        """Count the data that lies here as the client's."""
        size = (
            len(self.unparsed)
            + len(self.conn.reader.buffer)
            + self.message_bytes
            + self.queued_bytes
        )
        full = size > max(SMALL_BYTES, self.incoming.size) and not self.incoming.fits(size)
        self.incoming.resize(size)
        if full and not self.close_sent:
            self.conn.send_close(
                CloseCode.TRY_AGAIN_LATER, "too much of your messages lies here unfinished"
            )
            self.handle_parser_exception()
            self._drop()

    def _drop(self) -> None:
        self.unparsed = b""
        self._free(self.frames)
        self.frames = []
        self.message_bytes = 0
        self.queued_bytes = 0
        self.current_bytes = 0
        self.conn.reader.discard()
        self.incoming.close()

    def _free(self, parts: list[bytes]) -> None:
        """Free some of a message's parts now and the others in later passes of the event loop: for
        20 MiB it takes some milliseconds, and many connections may end at once."""
        size = 0
        while parts and size < FREE_BYTES:
            size += len(parts.pop())
        if parts:
            self.large_reads.wait(self.loop, partial(self._free, parts))

    def _parse_rest(self) -> None:
        rest = self.unparsed
        self.unparsed = b""
        self.parse_pending = False
        self._parse(rest)
        self._count()
        if not self.parse_pending and not self.read_paused:
            self.transport.resume_reading()

    async def receive(self) -> Any:
        self.queued_bytes -= self.current_bytes  # the app is done with the one before
        self.current_bytes = 0
        self._count()
        message: Any = await super().receive()  # which resumes the reading
        self.current_bytes = min(len(message.get("bytes", b"")), self.queued_bytes)
        if self.parse_pending:
            self.transport.pause_reading()
        return message

    def handle_text(self, event: Frame) -> None:
        self.message_bytes = len(event.data)
        super().handle_text(event)
        event.data = b""  # the parser keeps the frame until the next one has come

    def handle_bytes(self, event: Frame) -> None:
        self.message_bytes = len(event.data)
        super().handle_bytes(event)
        event.data = b""

    def handle_cont(self, event: Frame) -> None:
        self.message_bytes += len(event.data)
        if len(self.frames) < MAX_FRAGMENTS:
            super().handle_cont(event)
            event.data = b""
        elif not self.close_sent:
            self.conn.send_close(CloseCode.MESSAGE_TOO_BIG, "a message of too many fragments")
            self.handle_parser_exception()

    def send_receive_event_to_app(self) -> None:
        self.curr_msg_data_type = "bytes"
        if not self.close_sent:  # else it is thrown away
            self.queued_bytes += self.message_bytes
        self.message_bytes = 0
        super().send_receive_event_to_app()

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        super().on_task_complete(task)
        if not self.disconnected:
            self.cut = self.loop.call_later(CUT_S, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.cut is not None:
            self.cut.cancel()
        super().connection_lost(exc)
        self._drop()
