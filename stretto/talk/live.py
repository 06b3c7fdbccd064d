"""`stretto talk --live`: an open microphone in the terminal, over the server's realtime WebSocket.

The server finds turns and is interrupted by speech; this sends what the microphone hears, plays
what comes, and falls silent at once when it is spoken to. The device's thread fills a queue, a
thread of ours sends it, the caller's thread reads. Socket, sound and output are arguments, so
that a test can be a person."""

from __future__ import annotations

import base64
import itertools
import json
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO
from urllib.parse import urlsplit, urlunsplit

from stretto.loadtest.sse import RequestFailed, save_answer
from stretto.talk.sound import MICROPHONE_RATE, Speaker

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

PIECE_S = 0.04
HARMLESS = ("response_cancel_not_active",)


class FileMicrophone:
    """A recording in place of a microphone: sent in real time, then silence."""

    def __init__(self, pcm: bytes, rate: int, take: Callable[[bytes], None]) -> None:
        self._pcm = pcm
        self._size = int(PIECE_S * rate) * 2
        self._take = take
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        began = time.monotonic()
        for number in itertools.count():
            piece = self._pcm[number * self._size : (number + 1) * self._size]
            self._take(piece or bytes(self._size))
            if self._ended.wait(max(0.0, began + (number + 1) * PIECE_S - time.monotonic())):
                return

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


Listen = Callable[[int, Callable[[bytes], None]], Any]
"""Opens a microphone at a rate, until what is returned is closed; what it hears is handed over on a
thread of its own."""


@dataclass(slots=True)
class LiveAnswer:
    id: str
    item: str | None = None
    speaker: Speaker | None = None
    pcm: list[bytes] = field(default_factory=list)
    silenced: bool = False

    @property
    def size(self) -> int:
        return sum(map(len, self.pcm))


@dataclass(slots=True)
class LiveTalk:
    socket: ClientConnection
    out: TextIO
    listen: Listen
    speaker: Callable[[int], Speaker] | None  # None: nothing is played
    voice: str | None = None
    system: str | None = None
    max_tokens: int | None = None
    save: Path | None = None
    max_answers: int | None = None  # then it leaves
    num_answers: int = 0
    num_saved: int = 0
    _answer: LiveAnswer | None = None
    _microphone_pcm: queue.SimpleQueue[bytes | None] = field(default_factory=queue.SimpleQueue)

    def run(self) -> int:
        """Talk until the user leaves (Ctrl-C), the server closes, or `max_answers` have come."""
        self._send("session.update", session=self.session())
        sender = threading.Thread(target=self._speak, name="microphone", daemon=True)
        sender.start()
        microphone = self.listen(MICROPHONE_RATE, self._microphone_pcm.put)
        self.say("Listening. Speak when you like; Ctrl-C ends.")
        try:
            while self.max_answers is None or self.num_answers < self.max_answers:
                self.handle(json.loads(self.socket.recv()))
        except KeyboardInterrupt:
            self.silence()
            self.say("")
        finally:
            microphone.close()
            self._microphone_pcm.put(None)
            sender.join()
        if self._answer is not None and self._answer.speaker is not None:
            self._answer.speaker.wait()
        return 0

    def session(self) -> dict[str, Any]:
        audio: dict[str, Any] = {
            "input": {"transcription": {}, "turn_detection": {"type": "server_vad"}}
        }
        if self.voice:
            audio["output"] = {"voice": self.voice}
        session: dict[str, Any] = {
            "type": "realtime",
            "audio": audio,
            "instructions": self.system or "",
        }
        return session | ({"max_output_tokens": self.max_tokens} if self.max_tokens else {})

    def _speak(self) -> None:
        while (data := self._microphone_pcm.get()) is not None:
            try:
                self._send("input_audio_buffer.append", audio=base64.b64encode(data).decode())
            except OSError:
                return  # the reader says why

    def _send(self, type: str, **fields: Any) -> None:
        self.socket.send(json.dumps({"type": type, **fields}))

    def handle(self, event: dict[str, Any]) -> None:
        answer = self._answer
        ours = answer is not None and answer.id == event.get("response_id")
        match event["type"]:
            case "input_audio_buffer.speech_started":
                self.silence()
            case "conversation.item.input_audio_transcription.completed":
                self.say(f"\nyou> {event['transcript'].strip()}")
            case "response.created":
                self._answer = LiveAnswer(event["response"]["id"])
            case "response.output_item.added" if (
                answer is not None and ours and event["item"]["type"] == "message"
            ):
                answer.item = event["item"]["id"]
            case "response.output_audio_transcript.delta" if ours:
                self.out.write(event["delta"])
                self.out.flush()
            case "response.output_audio.delta" if (
                answer is not None and ours and not answer.silenced
            ):
                self.play(answer, base64.b64decode(event["delta"]))
            case "response.done" if answer is not None and answer.id == event["response"]["id"]:
                self.finish(answer, event["response"])
            case "error" if event["error"].get("code") not in HARMLESS:
                raise RequestFailed("error", event["error"]["message"])

    def play(self, answer: LiveAnswer, pcm: bytes) -> None:
        answer.pcm.append(pcm)
        if self.speaker is not None:
            answer.speaker = answer.speaker or self.speaker(MICROPHONE_RATE)
            answer.speaker.write(pcm)

    def silence(self) -> None:
        """The user speaks: stop playing, and report to the server how much was played."""
        answer = self._answer
        if (
            answer is None
            or answer.silenced
            or answer.speaker is None
            or not answer.speaker.pending
        ):
            return
        played = answer.size - answer.speaker.pending
        answer.silenced = True
        answer.speaker.close()
        answer.speaker = None
        if answer.item is not None:
            played_ms = played * 1000 // (2 * MICROPHONE_RATE)
            self._send(
                "conversation.item.truncate",
                item_id=answer.item,
                content_index=0,
                audio_end_ms=played_ms,
            )

    def finish(self, answer: LiveAnswer, response: dict[str, Any]) -> None:
        self.num_answers += 1
        if response["status"] == "failed":
            self.say(f"! {response['status_details']['error']['message']}")
            return
        ends = {"cancelled": " (interrupted)", "incomplete": " (cut at its limit)"}
        note = ends.get(response["status"], "")
        first = (response.get("stretto") or {}).get("speech_to_audio_s")
        if first is not None:
            note += f" ({first * 1000:.0f} ms from the end of speech to the first sound)"
        self.say(note)
        if self.save is not None and answer.pcm:
            self.num_saved, _ = save_answer(
                self.save, self.num_saved + 1, MICROPHONE_RATE, b"".join(answer.pcm)
            )

    def say(self, text: str) -> None:
        self.out.write(text + "\n")
        self.out.flush()


def realtime_url(api_root: str) -> str:
    """The WebSocket beside an API's other routes: `http://host/v1/` becomes
    `ws://host/v1/realtime`."""
    parts = urlsplit(api_root)
    scheme = {"http": "ws", "https": "wss"}[parts.scheme]
    return urlunsplit((scheme, parts.netloc, parts.path.rstrip("/") + "/realtime", "", ""))
