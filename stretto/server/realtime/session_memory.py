"""How many bytes one realtime session holds, and whether it may hold more. Each part of a session
reports here what it holds; on the event loop."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.server.realtime.audio_input import AudioInput
from stretto.server.realtime.client_events import EventError
from stretto.server.realtime.items import Conversation
from stretto.server.shares import Holding


@dataclass(slots=True, eq=False)
class SessionMemory:
    """Events that wait to be sent are not counted here: `SendQueue` has a holding of its own."""

    holding: Holding  # of the memory of all sessions
    limit: int  # bytes that one session may hold
    conversation: Conversation
    audio_input: AudioInput
    settings_bytes: int  # of the session's instructions and tools
    _task_bytes: int = 0  # of the inputs of responses and transcriptions under way
    _closed: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes that the session holds, about."""
        stored = self.conversation.size + self.audio_input.held_bytes
        return stored + self.settings_bytes + self._task_bytes

    def reserve(self, more: int, code: str, param: str) -> None:
        """Make room for so many bytes more, within what one session and the sessions of its client
        may hold. Raises `EventError` with this code."""
        size = self.num_bytes + more
        if size > self.limit:
            raise EventError(code, f"a session holds at most {self.limit >> 20} MiB", param)
        if not self.holding.fits(size):
            raise EventError(
                code,
                "your sessions hold all that they may of the server's memory for sessions",
                param,
            )
        self.holding.resize(size)

    def resize_settings(self, num_bytes: int) -> None:
        self.reserve(max(0, num_bytes - self.settings_bytes), "session_full", "session")
        self.settings_bytes = num_bytes

    def add_task(self, num_bytes: int) -> None:
        """A response or a transcription was started whose input has so many bytes."""
        self._task_bytes += num_bytes

    def remove_task(self, num_bytes: int) -> None:
        """The response or transcription is over, and its result is stored."""
        self._task_bytes -= num_bytes
        self.recount()

    def recount(self) -> None:
        if not self._closed:
            self.holding.resize(self.num_bytes)

    def close(self) -> None:
        """The session holds nothing, whatever tasks end after this."""
        self._closed = True
        self.holding.close()
