"""What a host reports, kept in place of its channel to the engine."""

from __future__ import annotations

from stretto.messages.requests import FromHost


class Reports:
    def __init__(self) -> None:
        self.posted: list[tuple[FromHost, bytes]] = []
        self.num_pushes = 0

    @property
    def messages(self) -> list[FromHost]:
        return [message for message, _ in self.posted]

    def post(self, message: FromHost, blob: bytes = b"") -> None:
        self.posted.append((message, blob))

    def push(self) -> None:
        self.num_pushes += 1

    def send(self, message: FromHost, blob: bytes = b"") -> None:
        self.post(message, blob)
        self.push()

    def clear(self) -> None:
        self.posted.clear()
