"""Warm-up: before the engine is ready, it sends a few ordinary requests through each pipeline.

What is made on first use is made then: kernels that a device loads when they are first launched,
library handles and pools that belong to a thread, pinned memory, buffers of links. The requests
follow from what the model takes in and puts out; a family adds nothing. They pass what a client's
requests pass from the prompt on, but for admission, access logs and the engine's counts. What
stages count of them stays counted, and what their caches keep is found by no owner. Called by the
engine on the event loop; imports no torch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from stretto.engine.events import Event
from stretto.engine.tts import TextToSpeech
from stretto.errors import StrettoError
from stretto.family import Model
from stretto.params import Capability, Params, RequestOptions, SpeechStyle
from stretto.preprocess.build import picture_part, sound_part
from stretto.preprocess.pool.jobs import Conversation

log = logging.getLogger(__name__)

LIMIT_S = 60.0
"""The limit of one request. The engine gets ready without one that takes longer."""
OWNER = "warm-up"
TEXT = "Good morning to all."
SOUNDS_S = (1.0, 0.1)
"""The second one is shorter than what an encoder takes at least."""
CLIP_S = 1.0
"""The length of the clip that a voice is made of, if the model can make voices."""


@dataclass(frozen=True, slots=True)
class WarmUp:
    """The warm-up of one pipeline."""

    model: Model
    pipeline: str
    tts: TextToSpeech
    gpu: bool

    async def run(self) -> int:
        """Send the requests; returns how many succeeded. A failed one does not fail the start."""
        good = 0
        try:
            async with asyncio.timeout(LIMIT_S):
                style = await self._style()
        except (StrettoError, TimeoutError) as e:
            log.warning("no voice was made in warm-up: %s", _reason(e))
            return good
        for events in self._requests(style):
            try:
                async with asyncio.timeout(LIMIT_S):
                    async for _ in events:
                        pass
                good += 1
            except (StrettoError, TimeoutError) as e:
                log.warning("a warm-up request failed: %s", _reason(e))
        log.info("served %d warm-up requests", good)
        return good

    async def _style(self) -> SpeechStyle:
        if not self.model.info.cloning:
            return SpeechStyle()
        clip = user_message(sound_part(CLIP_S), text())
        options = RequestOptions("enrolment", pipeline=self.pipeline, owner=OWNER)
        return SpeechStyle(voice=await self.tts.enrol(clip, options))

    def _requests(self, style: SpeechStyle) -> Iterator[AsyncIterator[Event]]:
        """On a GPU questions come twice, since what is kept of a prompt the first time is put to
        use the second time, and then without media. So do texts in a voice that was made."""
        paths = self.model.pipeline.paths
        if "text" in paths:
            for parts in [self._media, self._media, []] if self.gpu else [self._media]:
                yield self._answer([text(), *parts])
        elif "tts" in paths:
            for _ in range(2 if style.voice else 1):
                yield self.tts.speak(TEXT, self._options(style))

    @property
    def _media(self) -> list[dict[str, Any]]:
        takes = self.model.info.input_modalities
        sounds = [sound_part(seconds) for seconds in SOUNDS_S] if "audio" in takes else []
        return [*sounds, picture_part()] if "image" in takes else sounds

    def _answer(self, parts: list[dict[str, Any]]) -> AsyncIterator[Event]:
        async def build() -> Any:
            return await self.tts.prompts.build(user_message(*parts))

        return self.tts.requests.run(build, self._options(SpeechStyle()))

    def _options(self, style: SpeechStyle) -> RequestOptions:
        """A short answer. On a GPU three packets, and steps of which two are in flight; on a CPU
        each frame is time that the start takes."""
        frames = 4 if self.gpu else 2
        params = Params(
            max_text_tokens=frames, ignore_eos=True, max_frames=frames, min_frames=frames, seed=0
        )
        paths = self.model.pipeline.paths
        offered: tuple[Capability, ...] = ("speech", "text", "tts")
        capability = next(c for c in offered if c in paths)
        return RequestOptions(
            capability, params, style=style, pipeline=self.pipeline, owner=OWNER, client=OWNER
        )


def _reason(error: Exception) -> str:
    return str(error) or f"it was not over in {LIMIT_S:.0f} s"


def text() -> dict[str, Any]:
    return {"type": "text", "text": TEXT}


def user_message(*parts: dict[str, Any]) -> Conversation:
    """A user's message. Text alone is sent as most clients do."""
    content = TEXT if parts == (text(),) else list(parts)
    return Conversation.of(msgspec.json.encode([{"role": "user", "content": content}]))
