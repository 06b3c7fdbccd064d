"""Voices that clients made of clips, by the API key that sent them. One store per server, used on
the event loop and in memory alone: voices are lost when the server ends. A voice is opaque data
that the engine made (`enrol`) and takes back with a request; the client chose its name."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from stretto.errors import Invalid
from stretto.family import ModelInfo
from stretto.server.openai.error_body import Refused
from stretto.server.openai.schema import VoiceCard, VoiceList

PER_OWNER, IN_ALL = 64, 1024


@dataclass(frozen=True, slots=True, eq=False)
class StoredVoice:
    name: str
    data: bytes
    has_text: bool
    created: int

    @property
    def card(self) -> VoiceCard:
        return VoiceCard(self.name, self.created, self.has_text)


@dataclass(slots=True)
class VoiceStore:
    clock: Callable[[], float] = time.time
    # by owner, then by name in small letters
    _voices: dict[str, dict[str, StoredVoice]] = field(default_factory=dict)

    def check(self, owner: str, name: str, info: ModelInfo) -> None:
        """Refuses a name that is taken, and one voice too many."""
        own = self._voices.get(owner, {})
        if name.lower() in own or name.lower() in {v.lower() for v in info.voices}:
            raise Invalid(f"there is a voice {name!r} already", "name")
        if len(own) >= PER_OWNER or sum(map(len, self._voices.values())) >= IN_ALL:
            message = "no more voices can be kept; delete some first"
            raise Refused(
                429, message, kind="rate_limit_error", code="too_many_voices", param="name"
            )

    def add(self, owner: str, name: str, data: bytes, has_text: bool) -> VoiceCard:
        voice = StoredVoice(name, data, has_text, int(self.clock()))
        self._voices.setdefault(owner, {})[name.lower()] = voice
        return voice.card

    def find(self, owner: str, name: str) -> bytes | None:
        voice = self._voices.get(owner, {}).get(name.lower())
        return voice.data if voice is not None else None

    def names(self, owner: str) -> list[str]:
        return [v.name for v in self._voices.get(owner, {}).values()]

    def listed(self, owner: str, info: ModelInfo) -> VoiceList:
        return VoiceList(
            [
                *(VoiceCard(v) for v in info.voices),
                *(v.card for v in self._voices.get(owner, {}).values()),
            ]
        )

    def forget(self, owner: str, name: str) -> str:
        own = self._voices.get(owner, {})
        voice = own.pop(name.lower(), None)
        if voice is None:
            raise Refused(
                404,
                f"there is no voice {name[:64]!r} of yours",
                code="voice_not_found",
                param="name",
            )
        if not own:
            del self._voices[owner]
        return voice.name
