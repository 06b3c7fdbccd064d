"""A conversation in the terminal: reads lines, asks, shows the words as they come, plays or saves
the speech.

What it reads from, writes to and asks are arguments, so that a test can be a person."""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from stretto.errors import Invalid
from stretto.loadtest.http import ListedModel
from stretto.loadtest.sse import PCM_RATE, Piece, RequestFailed, Sound, Words, save_answer, wav_file
from stretto.loadtest.workload import read_sound
from stretto.talk.sound import MICROPHONE_RATE, NoSound, SoundDevice, Speaker

LEAVE = ("/quit", "/exit", "/q", "quit", "exit")
HELP = """Type a question, or press Enter on an empty line to speak one.
/voice [NAME]  choose a voice, or list them     /image FILE  show it an image with the next question
/file SOUND    ask with a sound file            /new         forget the conversation
/quit          leave (also exit, Ctrl-D); Ctrl-C stops an answer"""


@dataclass(slots=True)
class Talk:
    ask: Callable[[Mapping[str, Any]], Iterator[Piece]]
    model: ListedModel
    out: TextIO
    read: Callable[[str], str]  # a prompt in, a line out; EOFError at the end
    sound: SoundDevice | NoSound
    voice: str | None = None
    system: str | None = None
    max_tokens: int | None = None
    speak: bool = True
    save: Path | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    images: list[dict[str, Any]] = field(default_factory=list)  # go with the next question
    num_saved: int = 0

    def run(self) -> int:
        """Read and answer lines until the user leaves."""
        self.greet()
        while True:
            try:
                line = self.read("you> ").strip()
            except EOFError:
                self.say("")
                return 0
            except KeyboardInterrupt:
                self.say("")
                continue
            try:
                if line.lower() in LEAVE:
                    return 0
                self.handle(line)
            except (Invalid, RequestFailed) as e:
                self.say(f"! {e}")

    def once(self, text: str | None, file: Path | None) -> int:
        """One question. What fails is raised."""
        self.warn_silent()
        self.answer(self.parts(text, file))
        return 0

    def greet(self) -> None:
        self.say(f"{self.model.name}. {HELP}")
        self.warn_silent()

    def warn_silent(self) -> None:
        if self.speak and isinstance(self.sound, NoSound) and self.save is None:
            self.say(f"Answers come as text only: {self.sound.why}. Or give --save DIR.")

    def handle(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        match command:
            case "":
                self.answer(self.record_question())
            case "/help":
                self.say(HELP)
            case "/voice":
                self.choose_voice(rest.strip())
            case "/image":
                self.images.append(read_image(Path(rest.strip()).expanduser()))
                self.say("It goes with your next question.")
            case "/file":
                self.answer(self.parts(None, Path(rest.strip()).expanduser()))
            case "/new":
                self.messages = []
                self.images = []
                self.say("A new conversation.")
            case _ if command.startswith("/"):
                self.say(f"There is no {command}.\n{HELP}")
            case _:
                self.answer(self.parts(line, None))

    def choose_voice(self, name: str) -> None:
        known = {voice.lower(): voice for voice in self.model.voices}
        if not name:
            self.say("Voices: " + (", ".join(self.model.voices) or "the server lists none"))
        elif known and name.lower() not in known:
            raise Invalid(f"no voice {name!r}; there are {', '.join(self.model.voices)}", "voice")
        else:
            self.voice = known.get(name.lower(), name)
            self.say(f"Now {self.voice} speaks.")

    # --- a question

    def parts(self, text: str | None, file: Path | None) -> list[dict[str, Any]]:
        parts = []
        if file is not None:
            data, kind = read_sound(file)
            parts.append({"type": "input_audio", "input_audio": {"data": data, "format": kind}})
        if text:
            parts.append({"type": "text", "text": text})
        return parts

    def record_question(self) -> list[dict[str, Any]]:
        if isinstance(self.sound, NoSound):
            raise Invalid(f"there is no microphone to record with: {self.sound.why}")
        pieces: list[bytes] = []
        microphone = self.sound.listen(MICROPHONE_RATE, pieces.append)
        try:
            self.read("listening, press Enter to send> ")
        finally:
            microphone.close()
        data = base64.b64encode(wav_file(MICROPHONE_RATE, b"".join(pieces))).decode()
        return [{"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}]

    # --- an answer

    def answer(self, parts: list[dict[str, Any]]) -> None:
        """Ask, and show and play what comes. The conversation grows only by questions that were
        answered."""
        question = {"role": "user", "content": [*self.images, *parts]}
        aloud = self.speak and not (isinstance(self.sound, NoSound) and self.save is None)
        speaker: Speaker | None = None
        words: list[str] = []
        pcm_chunks: list[bytes] = []
        rate = PCM_RATE
        try:
            for piece in self.ask(self.body(question, aloud)):
                if isinstance(piece, Words):
                    words.append(piece.text)
                    self.out.write(piece.text)
                    self.out.flush()
                elif isinstance(piece, Sound):
                    rate, pcm = piece.pcm()
                    pcm_chunks.append(pcm)
                    if not isinstance(self.sound, NoSound):
                        speaker = speaker or self.sound.speaker(rate)
                        speaker.write(pcm)
            self.say("")
            if speaker is not None:
                speaker.wait()
        except KeyboardInterrupt:
            if speaker is not None:
                speaker.close()
            self.say(" (stopped)")
        except RequestFailed:
            if speaker is not None:
                speaker.close()
            if words:
                self.say("")
            raise
        self.images = []
        if words:
            self.messages += [question, {"role": "assistant", "content": "".join(words)}]
        if pcm_chunks and self.save is not None:
            self.save_speech(rate, b"".join(pcm_chunks))

    def body(self, question: dict[str, Any], aloud: bool) -> dict[str, Any]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        body: dict[str, Any] = {
            "model": self.model.name,
            "messages": [*system, *self.messages, question],
            "stream": True,
            "modalities": ["text", "audio"] if aloud else ["text"],
        }
        if aloud:
            body["audio"] = {"format": "pcm16"} | ({"voice": self.voice} if self.voice else {})
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        return body

    def save_speech(self, rate: int, pcm: bytes) -> None:
        assert self.save is not None
        self.num_saved, path = save_answer(self.save, self.num_saved + 1, rate, pcm)
        self.say(f"({len(pcm) / 2 / rate:.2f} s of speech in {path})")

    def say(self, text: str) -> None:
        self.out.write(text + "\n")
        self.out.flush()


def read_image(path: Path) -> dict[str, Any]:
    """An image file as a part of a message."""
    kind = mimetypes.guess_type(path.name)[0]
    if kind is None or not kind.startswith("image/"):
        raise Invalid(f"{path}: not an image", "image")
    try:
        raw = path.read_bytes()
    except OSError as e:
        raise Invalid(f"{path}: {e.strerror}", "image") from None
    url = f"data:{kind};base64,{base64.b64encode(raw).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}
