"""Writes the events of one response, in the order that clients expect: created; for each item its
beginning, its deltas and its end; done. `ResponseTask` calls it. Nothing here awaits, so no other
event can come between those of one call.

A message item is open from its first word or sound to the first function call or the end. Its entry
is part of the conversation from the event that adds it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stretto.engine.events import Usage as EngineUsage
from stretto.family import ModelInfo
from stretto.server.openai.generating_route import slices
from stretto.server.openai.tools import Call
from stretto.server.realtime import server_events as s
from stretto.server.realtime.audio_formats import AudioEncoder, Float
from stretto.server.realtime.items import Conversation, Entry, new_id, text_bytes
from stretto.server.realtime.options import Options, format_to_wire
from stretto.server.realtime.playback_estimate import Speech
from stretto.server.realtime.send_queue import SendQueue

FRAMES_A_SECOND = 12.5  # of speech; each counts as a token


@dataclass(slots=True)
class _OpenMessage:
    """The message item that is being written."""

    entry: Entry
    index: int
    encoder: AudioEncoder
    parts: list[str] = field(default_factory=list)
    samples: int = 0

    @property
    def text(self) -> str:
        return "".join(self.parts)


@dataclass(slots=True)
class ResponseWriter:
    options: Options
    info: ModelInfo
    send_queue: SendQueue
    conversation: Conversation | None  # None: the response is no part of the conversation
    conversation_id: str
    metadata: dict[str, str] | None = None
    id: str = field(default_factory=lambda: new_id("resp"))
    entries: list[Entry] = field(default_factory=list)
    _open: _OpenMessage | None = None

    # -- the response

    def begin(self) -> None:
        self.send_queue.put(s.ResponseCreated(response=self._to_wire("in_progress")))

    def finish(
        self,
        status: s.Status,
        usage: dict[str, Any],
        timings: s.Timings,
        *,
        reason: str | None = None,
        error: s.StatusError | None = None,
    ) -> None:
        """Ends what is open and says how the response ended. Nothing may follow."""
        self.close(status == "completed")
        response = self._to_wire(status)
        response.status_details = s.StatusDetails(status)
        if reason is not None:
            response.status_details.reason = reason
        if error is not None:
            response.status_details.error = error
        response.output = [e.item for e in self.entries]
        response.usage = usage
        response.stretto = timings
        self.send_queue.put(s.ResponseDone(response=response))

    def _to_wire(self, status: s.Status) -> s.Response:
        o = self.options
        return s.Response(
            id=self.id,
            status=status,
            output_modalities=list(o.output_modalities),
            audio={"output": {"format": format_to_wire(o.output_format), "voice": o.voice}},
            max_output_tokens=o.max_output_tokens,
            conversation_id=self.conversation_id if self.conversation is not None else None,
            metadata=self.metadata,
        )

    # -- its items

    def write_text(self, text: str) -> None:
        if not text:
            return
        message = self._message()
        message.parts.append(text)
        kind = s.TranscriptDelta if self.options.has_audio else s.TextDelta
        self.send_queue.put(kind(**self._location(message), delta=text))

    def write_audio(self, samples: Float) -> None:
        message = self._message()
        message.samples += len(samples)
        self._send_audio(message, message.encoder.feed(samples))

    @property
    def speaking(self) -> bool:
        """A message is open."""
        return self._open is not None

    def call(self, call: Call) -> None:
        self.close(True, whole=False)
        call_id = new_id("call")
        item = s.Item(
            new_id("item"),
            "function_call",
            status="in_progress",
            call_id=call_id,
            name=call.name,
            arguments="",
        )
        entry = self._add(item)
        location: dict[str, Any] = {
            "response_id": self.id,
            "item_id": item.id,
            "output_index": len(self.entries) - 1,
        }
        self.send_queue.put(s.ArgumentsDelta(**location, call_id=call_id, delta=call.arguments))
        item.arguments = call.arguments
        item.status = "completed" if call.complete else "incomplete"
        if call.complete:  # clients call the function when they see this
            self.send_queue.put(
                s.ArgumentsDone(
                    **location, call_id=call_id, name=call.name, arguments=call.arguments
                )
            )
        self._end(entry, len(self.entries) - 1)

    def _message(self) -> _OpenMessage:
        if self._open is None:
            item = s.Item(
                new_id("item"), "message", status="in_progress", role="assistant", content=[]
            )
            entry = self._add(item)
            self._open = _OpenMessage(
                entry,
                len(self.entries) - 1,
                AudioEncoder(self.options.output_format, self.info.sample_rate),
            )
            part = (
                s.Part("audio", transcript="")
                if self.options.has_audio
                else s.Part("text", text="")
            )
            self.send_queue.put(s.PartAdded(**self._location(self._open), part=part))
        return self._open

    def _add(self, item: s.Item) -> Entry:
        entry = Entry(item)
        self.entries.append(entry)
        self.send_queue.put(
            s.OutputItemAdded(response_id=self.id, output_index=len(self.entries) - 1, item=item)
        )
        if self.conversation is not None:
            previous = self.conversation.last_id
            self.conversation.append(entry)
            self.send_queue.put(s.ItemAdded(previous_item_id=previous, item=item))
        return entry

    def frames_of(self, num_samples: int) -> float:
        """The number of codec frames of these samples."""
        seconds = num_samples / self.info.sample_rate * self.options.speed
        return seconds * FRAMES_A_SECOND

    def close(self, completed: bool, whole: bool = True) -> None:
        """The end of the message that is open, if one is. `whole`: its sound is all that there
        would have been."""
        message = self._open
        self._open = None
        if message is None:
            return
        location = self._location(message)
        text = message.text
        if self.options.has_audio:
            self._send_audio(message, message.encoder.flush())
            self.send_queue.put(s.AudioDone(**location))
            self.send_queue.put(s.TranscriptDone(**location, transcript=text))
            part = s.Part("audio", transcript=text)
            stored = s.Part("output_audio", transcript=text)
            message.entry.speech = Speech(
                text,
                message.samples / self.info.sample_rate,
                completed and whole,
                self.options.speed,
            )
        else:
            self.send_queue.put(s.TextDone(**location, text=text))
            part = s.Part("text", text=text)
            stored = s.Part("output_text", text=text)
        self.send_queue.put(s.PartDone(**location, part=part))
        message.entry.item.content = [stored]
        message.entry.item.status = "completed" if completed else "incomplete"
        self._end(message.entry, message.index)

    def _end(self, entry: Entry, index: int) -> None:
        # it may have been deleted
        if self.conversation is not None and entry in self.conversation.entries:
            entry.text_size = text_bytes(entry.item)
            self.conversation.resize(entry, entry.text_size)
            self.send_queue.put(
                s.ItemDone(previous_item_id=self.conversation.before(entry), item=entry.item)
            )
        self.send_queue.put(
            s.OutputItemDone(response_id=self.id, output_index=index, item=entry.item)
        )

    def _send_audio(self, message: _OpenMessage, data: bytes) -> None:
        for piece in slices(data):
            self.send_queue.put(s.AudioDelta(**self._location(message), delta=piece))

    def _location(self, message: _OpenMessage) -> dict[str, Any]:
        return {
            "response_id": self.id,
            "item_id": message.entry.id,
            "output_index": message.index,
            "content_index": 0,
        }


def usage_to_wire(usage: EngineUsage) -> dict[str, Any]:
    media = usage.audio_prompt_tokens + usage.image_prompt_tokens
    text = usage.prompt_tokens - media
    # The engine counts cached tokens together. Prompts begin with text, so that is what they most
    # likely are.
    cached_text = min(usage.cached_tokens, text)
    cached_audio = min(usage.cached_tokens - cached_text, usage.audio_prompt_tokens)
    cached_images = usage.cached_tokens - cached_text - cached_audio
    output = usage.text_tokens + usage.frames
    return {
        "total_tokens": usage.prompt_tokens + output,
        "input_tokens": usage.prompt_tokens,
        "output_tokens": output,
        "input_token_details": {
            "text_tokens": text,
            "audio_tokens": usage.audio_prompt_tokens,
            "image_tokens": usage.image_prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "cached_tokens_details": {
                "text_tokens": cached_text,
                "audio_tokens": cached_audio,
                "image_tokens": cached_images,
            },
        },
        "output_token_details": {"text_tokens": usage.text_tokens, "audio_tokens": usage.frames},
    }
