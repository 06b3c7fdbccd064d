"""Finds the voice that a request names, and answers POST /v1/audio/voices, which makes a voice of a
clip and stores it under a name. The clip comes in JSON, as base64, or as the file of a form.

Stock clients know OpenAI's names only, so these are aliases here."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from stretto._validation import wrong_field
from stretto.errors import Invalid
from stretto.family import ModelInfo
from stretto.preprocess.pool.jobs import ByteRange, Conversation
from stretto.preprocess.pool.memfile import MemFile
from stretto.server.http.body import Body
from stretto.server.http.exchange import Exchange, decode
from stretto.server.http.forms import Source, boundary, copy_part, in_thread, parse_form
from stretto.server.openai.schema import VoiceId, VoiceRequest
from stretto.server.origins import is_form
from stretto.server.request_log import RequestLog
from stretto.server.service import Service

_HIGH, _LOW = ("chelsie", "serena"), ("ethan", "aiden")
ALIASES = {
    **dict.fromkeys(("alloy", "coral", "fable", "marin", "nova", "sage", "shimmer"), _HIGH),
    **dict.fromkeys(("ash", "ballad", "cedar", "echo", "onyx", "verse"), _LOW),
}
MAX_CLIP = 12 << 20
"""Bytes of a request with a clip: half a minute as it comes from a studio fits, in base64."""
MAX_FILE = MAX_CLIP * 3 // 4
"""Bytes of a clip in a form: as many."""
FORM_FIELDS = {
    "file": "audio", "audio_sample": "audio", "name": "name", "transcript": "text", "text": "text",
    "format": "format", "model": "model",
}  # fmt: skip
"""Fields of a form, and what they are called in JSON. OpenAI calls the file `audio_sample`, and has
more:"""
IGNORED = ("consent",)
LONG = ("audio",)  # in JSON
MOST_SHORT = 64 << 10  # bytes of all other fields
PIECE = 3 << 16  # bytes of a file that become base64 in one call
_WHERE = re.compile(r"^messages\[0\]\.content(\[0\](\.input_audio)?)?(\.data|\.format)?:? ?")

_decoder = msgspec.json.Decoder(VoiceRequest)


def voice_name(voice: str | VoiceId | None) -> str | None:
    return voice.id if isinstance(voice, VoiceId) else voice


def find_voice(
    voice: str | VoiceId | None, info: ModelInfo, param: str, own: list[str] | None = None
) -> str | None:
    """The model's spelling of a voice; None is its default one. `own` are the client's, to be named
    in the error."""
    name = voice_name(voice)
    if not info.voices:
        check_unnamed(name, info, param, own or [])
        return None
    if name is None:
        return None
    known_as = {**info.voice_aliases, **{v.lower(): v for v in info.voices}}
    if name.lower() in known_as:
        return known_as[name.lower()]
    if name.lower() in ALIASES:
        return next(
            (known_as[v] for v in ALIASES[name.lower()] if v in known_as), info.default_voice
        )
    raise Invalid(f"there is no voice {name!r}; the model has {', '.join(info.voices)}", param)


def check_unnamed(name: str | None, info: ModelInfo, param: str, own: list[str]) -> None:
    """Refuse a voice's name where the model has none: it speaks with voices made of clips, or with
    one that instructions describe."""
    if info.cloning:
        raise Invalid(
            "this model speaks with voices made of clips, of which you have "
            f"{', '.join(own) or 'none yet'}",
            param,
        )
    if name is not None and name.lower() not in ALIASES:
        raise Invalid(
            f"there is no voice {name!r}; this model's is described by instructions", param
        )


@dataclass(frozen=True, slots=True)
class Clip:
    """A request to make a voice, and what its client calls its fields. Whoever has it closes it."""

    request: VoiceRequest
    message: MemFile  # a conversation of one message, which holds the sound
    names: Mapping[str, str] = field(default_factory=dict)  # where they are not ours

    def called(self, param: str) -> str:
        return self.names.get(param, param)

    def close(self) -> None:
        self.message.close_in_thread()


async def read_voice(service: Service, body: Body, request_log: RequestLog) -> Clip:
    if not service.engine().info.cloning:  # before a long clip is cut and copied for nothing
        raise Invalid("this model has no voices but its own", "model")
    source = body.data if body.memfile is None else body.memfile
    turn = partial(service.thread_turns.turn, request_log.client)
    if is_form(request_log.content_type):
        mark = boundary(request_log.content_type)
        async with turn():
            return await in_thread(source, lambda s: _of_form(s, mark), Clip.close)
    if isinstance(source, bytes):
        request = decode(source, _decoder)
        return _of_json(request, bytes(request.audio), (0, len(memoryview(request.audio))))
    outlined, file = await service.engine().outline(source, LONG, MOST_SHORT, request_log.client)
    async with file:
        request = decode(file.read(0, outlined.short), _decoder)
        span = outlined.long.get("audio", (0, 0))
        async with turn():
            return await in_thread(file, lambda s: _of_json(request, s, span), Clip.close)


def _of_json(request: VoiceRequest, source: Source, audio: ByteRange) -> Clip:
    """`audio`: where the sound stands, with its quotation marks."""
    start, stop = audio
    first = (
        source[start : start + 1]
        if isinstance(source, bytes)
        else source.read(start, min(start + 1, stop))
    )
    if first != b'"' or stop - start <= 2:
        raise Invalid("audio must be a sound file in base64", "audio")
    return Clip(request, _message(request, lambda to: copy_part(source, audio, to)))


def _of_form(source: Source, mark: bytes) -> Clip:
    """The fields of a form as ours."""
    form = parse_form(source, mark)
    names: dict[str, str] = {}
    values: dict[str, Any] = {}
    for name, value in form.fields.items():
        if name in IGNORED:
            continue
        ours = FORM_FIELDS.get(name)
        if ours is None or ours == "audio":
            raise Invalid(f"{name} must be a file" if ours else f"{name}: unknown field", name)
        if ours in values:
            raise Invalid(f"{name} and {names[ours]} are the same", name)
        values[ours] = value
        names[ours] = name
    files = {name: file for name, file in form.files.items() if FORM_FIELDS.get(name) == "audio"}
    if strange := set(form.files) - set(files):
        raise Invalid(f"{min(strange)} must not be a file", min(strange))
    name, (start, stop) = next(iter(files.items()), ("file", (0, 0)))
    if len(files) != 1 or start == stop:
        raise Invalid("file: send one sound as the form's field file", "file")
    if stop - start > MAX_FILE:
        raise Invalid(f"{name}: a clip has at most {MAX_FILE >> 20} MiB", name)
    names["audio"] = name
    try:
        request = msgspec.convert(values, VoiceRequest, strict=False)
    except msgspec.ValidationError as e:
        wrong = wrong_field(e)
        raise Invalid(str(wrong), names.get(wrong.param or "", wrong.param)) from None
    return Clip(request, _message(request, lambda to: _encode(source, (start, stop), to)), names)


def _encode(source: Source, part: ByteRange, to: MemFile) -> None:
    """Append a file as base64, in quotation marks."""
    to.append(b'"')
    for at in range(part[0], part[1], PIECE):
        stop = min(at + PIECE, part[1])
        to.append(
            b64encode(source[at:stop] if isinstance(source, bytes) else source.read(at, stop))
        )
    to.append(b'"')


def _message(request: VoiceRequest, write_sound: Callable[[MemFile], None]) -> MemFile:
    """The clip as a message of a conversation; `write_sound` appends its base64."""
    text = (request.text or "").strip()
    file = MemFile.new()
    try:
        file.append(b'[{"role":"user","content":[{"type":"input_audio","input_audio":{"data":')
        write_sound(file)
        file.append(b',"format":' + msgspec.json.encode(request.format or "wav") + b"}}")
        if text:
            file.append(b',{"type":"text","text":' + msgspec.json.encode(text) + b"}")
        file.append(b"]}]")
    except BaseException:
        file.close()
        raise
    return file


async def answer_voice(service: Service, clip: Clip, exchange: Exchange) -> None:
    try:
        await _answer(service, clip, exchange)
    finally:
        clip.close()


async def _answer(service: Service, clip: Clip, exchange: Exchange) -> None:
    request = clip.request
    file = clip.message
    engine = service.engine()
    owner = exchange.request_log.owner
    service.check_model(request.model, engine)
    service.voices.check(owner, request.name, engine.info)
    try:
        talk = Conversation(
            file, (0, file.size), client=exchange.request_log.client, close=clip.close
        )
        data = await engine.enrol(talk, owner=owner)
    except Invalid as e:
        param = e.param if e.param is not None and not e.param.startswith("messages") else "audio"
        raise Invalid(
            _WHERE.sub("", str(e)) or "the clip cannot be used", clip.called(param)
        ) from None
    # Another request may have taken the name meanwhile.
    service.voices.check(owner, request.name, engine.info)
    has_text = bool((request.text or "").strip())
    await exchange.reply(service.voices.add(owner, request.name, data, has_text))
