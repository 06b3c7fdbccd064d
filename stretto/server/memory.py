"""Answers that clients may refer to by id: {"role": "assistant", "audio": {"id": ...}} instead of the words.

One per server, used on the event loop only. Holds transcripts, not sound. Bounded in number, size and time; an id is
good only for the API key that got it."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stretto.errors import Invalid

MAX_CHARS = 64 << 20


@dataclass(frozen=True, slots=True)
class Kept:
    owner: str
    transcript: str
    expires_at: float


@dataclass(slots=True)
class AudioMemory:
    max_answers: int
    lifetime: float
    clock: Callable[[], float] = time.time
    _kept: OrderedDict[str, Kept] = field(default_factory=OrderedDict)  # oldest first
    _chars: int = 0

    def keep(self, audio_id: str, owner: str, transcript: str) -> int:
        """Remember an answer; the time until which it can be referred to."""
        expires = self.clock() + self.lifetime
        self._kept[audio_id] = Kept(owner, transcript, expires)
        self._chars += len(transcript)
        self._trim()
        return int(expires)

    def recall(self, messages: list[dict[str, Any]], owner: str) -> list[dict[str, Any]]:
        """The messages with every reference to an earlier answer replaced by its words."""
        self._trim()
        return [self._resolve(m, owner, f"messages[{i}].audio") for i, m in enumerate(messages)]

    def _resolve(self, message: dict[str, Any], owner: str, at: str) -> dict[str, Any]:
        if message.get("role") != "assistant" or message.get("audio") is None:
            return message
        reference = message["audio"]
        audio_id = reference.get("id") if isinstance(reference, Mapping) else None
        if not isinstance(audio_id, str):
            raise Invalid(f"{at} must be an object with the id of an earlier answer", at)
        kept = self._kept.get(audio_id)
        if kept is None or kept.owner != owner:
            raise Invalid(f"{at}.id: there is no answer {audio_id[:80]!r} (any more); send its words as content", at)
        rest = {k: v for k, v in message.items() if k != "audio"}
        return {**rest, "content": kept.transcript or rest.get("content") or ""}

    def _trim(self) -> None:
        now = self.clock()
        while self._kept:
            oldest = next(iter(self._kept.values()))
            crowded = len(self._kept) > self.max_answers or self._chars > MAX_CHARS
            if oldest.expires_at > now and not crowded:
                return
            self._chars -= len(self._kept.popitem(last=False)[1].transcript)
