"""Answers that later requests may refer to by an id in place of their text: {"role": "assistant",
"audio": {"id": ...}} in a chat, an item's id in a response.

One store per server, used on the event loop. It holds text, not sound, and is bounded in number,
size and time. An id is valid only for the API key whose request made the answer."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

MAX_CHARS = 64 << 20


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    owner: str
    transcript: str
    expires_at: float


@dataclass(slots=True)
class AnswerStore:
    max_answers: int
    lifetime: float
    clock: Callable[[], float] = time.time
    _answers: OrderedDict[str, StoredAnswer] = field(default_factory=OrderedDict)  # oldest first
    _chars: int = 0

    def add(self, answer_id: str, owner: str, transcript: str) -> int:
        """Remember an answer; the time until which it can be referred to."""
        expires = self.clock() + self.lifetime
        self._answers[answer_id] = StoredAnswer(owner, transcript, expires)
        self._chars += len(transcript)
        self._trim()
        return int(expires)

    def find(self, ids: Iterable[str], owner: str) -> dict[str, str]:
        """The words of those answers that this owner may refer to."""
        self._trim()
        found = {i: self._answers[i] for i in ids if i in self._answers}
        return {i: answer.transcript for i, answer in found.items() if answer.owner == owner}

    def _trim(self) -> None:
        now = self.clock()
        while self._answers:
            oldest = next(iter(self._answers.values()))
            crowded = len(self._answers) > self.max_answers or self._chars > MAX_CHARS
            if oldest.expires_at > now and not crowded:
                return
            self._chars -= len(self._answers.popitem(last=False)[1].transcript)
