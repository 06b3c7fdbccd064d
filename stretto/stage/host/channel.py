"""A host's end of the channel to the engine: messages in, reports out."""

from __future__ import annotations

import socket
import threading
from queue import SimpleQueue

from stretto.messages.requests import (
    PREFIX,
    Admit,
    Cancel,
    Features,
    FromHost,
    MediaData,
    ToHost,
    decode_to_host,
    encode,
    lengths,
)
from stretto.preprocess.packed_prompt import Bytes
from stretto.stage.host.feature_buffer import FeatureBuffer


class Channel:
    """The host's end of the control channel. Nothing here waits, and any thread may send.

    What the loop reports is collected (`post`) and handed to the socket several times a round
    (`push`), in one call; what the socket has no room for goes to a thread that waits for it, and
    all that follows goes behind it. What waits is bounded by what the requests here may make."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._posted: list[bytes] = []
        self._behind: SimpleQueue[bytes | None] = SimpleQueue()
        # something is in the thread's hands
        self._late = False
        self._features = FeatureBuffer()
        self._writer = threading.Thread(target=self._write, name="stretto-reports", daemon=True)
        self._writer.start()

    def post(self, message: FromHost, blob: bytes = b"") -> None:
        """Leaves with the next `push`."""
        with self._lock:
            self._posted.append(encode(message, blob))
            if blob:
                self._posted.append(blob)

    def push(self) -> None:
        if self._posted:
            with self._lock:
                parts = self._posted
                self._posted = []
                rest = b"".join(parts)
                if not self._late:
                    rest = rest[self._send_now(rest) :]
                if rest:
                    self._late = True
                    self._behind.put(rest)

    def send(self, message: FromHost, blob: bytes = b"") -> None:
        self.post(message, blob)
        self.push()

    def read(self) -> tuple[ToHost, Bytes] | None:
        """The next message; None when the engine has gone."""
        prefix = self._exactly(PREFIX.size)
        if prefix is None:
            return None
        header_size, blob_size = lengths(prefix)
        header, blob = self._exactly(header_size), self._exactly(blob_size)
        if header is None or blob is None:
            return None
        message = decode_to_host(header)
        if isinstance(message, Features):
            self._features.add(message, blob)
        elif isinstance(message, Cancel):
            self._features.drop(message.request)
        elif isinstance(message, Admit | MediaData) and not blob:
            return message, self._features.take(message.request)
        return message, blob

    def flush(self) -> None:
        """Send what is queued, and no more after that."""
        self.push()
        self._behind.put(None)
        self._writer.join(timeout=5.0)

    def _send_now(self, data: bytes) -> int:
        try:
            return self._sock.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            # the engine has gone: the reader sees it too, and ends the host
            return len(data)

    def _exactly(self, size: int) -> bytearray | None:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            try:
                n = self._sock.recv_into(view)
            except OSError:
                return None
            if n == 0:
                return None
            view = view[n:]
        return data

    def _write(self) -> None:
        while (data := self._behind.get()) is not None:
            try:
                self._sock.sendall(data)
            except OSError:
                return
            with self._lock:
                self._late = not self._behind.empty()
