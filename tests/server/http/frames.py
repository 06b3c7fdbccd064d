"""Frames of WebSockets, as clients send them."""

from __future__ import annotations

TEXT, CONTINUED, PING = 1, 0, 9


def frame(kind: int, data: bytes, last: bool = True) -> bytes:
    if len(data) < 126:
        size = bytes([0x80 | len(data)])
    elif len(data) < 1 << 16:
        size = b"\xfe" + len(data).to_bytes(2, "big")
    else:
        size = b"\xff" + len(data).to_bytes(8, "big")
    return bytes([kind | (0x80 if last else 0)]) + size + bytes(4) + data
