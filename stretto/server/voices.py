"""Which voice a client means, and POST /v1/audio/voices: a voice is made of a clip and kept under a name. The clip
comes in JSON, as base64, or as the file of a form.

Stock clients know OpenAI's names only, so these mean something too."""

from __future__ import annotations

import asyncio
import re
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from stretto.errors import Invalid
from stretto.family import ModelInfo
from stretto.fields import wrong_field
from stretto.prompt.jobs import Conversation
from stretto.server.body import Body
from stretto.server.exchange import Exchange, decode
from stretto.server.forms import boundary, parse_form
from stretto.server.origins import is_form
from stretto.server.schema import VoiceId, VoiceRequest
from stretto.server.service import Service
from stretto.server.visit import Visit

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
"""Fields of a form, and what they are called in JSON. OpenAI calls the file `audio_sample`, and has more:"""
IGNORED = ("consent",)
_WHERE = re.compile(r"^messages\[0\]\.content(\[0\](\.input_audio)?)?(\.data|\.format)?:? ?")

_decoder = msgspec.json.Decoder(VoiceRequest)


def voice_name(asked: str | VoiceId | None) -> str | None:
    return asked.id if isinstance(asked, VoiceId) else asked


def find_voice(asked: str | VoiceId | None, info: ModelInfo, param: str, own: list[str] | None = None) -> str | None:
    """The model's spelling of a voice; None is its default one. `own` are the client's, to be named in the error."""
    name = voice_name(asked)
    if not info.voices:
        if info.cloning:
            known = ", ".join(own or ()) or "none yet"
            raise Invalid(f"this model speaks with voices made of clips, of which you have {known}", param)
        if name is None or name.lower() in ALIASES:
            return None  # it is described in words
        raise Invalid(f"there is no voice {name!r}; this model's is described by instructions", param)
    if name is None:
        return None
    known_as = {v.lower(): v for v in info.voices}
    if name.lower() in known_as:
        return known_as[name.lower()]
    if name.lower() in ALIASES:
        return next((known_as[v] for v in ALIASES[name.lower()] if v in known_as), info.default_voice)
    raise Invalid(f"there is no voice {name!r}; the model has {', '.join(info.voices)}", param)


@dataclass(frozen=True, slots=True)
class Clip:
    """A request to make a voice, and what its sender calls its fields."""

    request: VoiceRequest
    names: Mapping[str, str] = field(default_factory=dict)  # where they are not ours

    def called(self, param: str) -> str:
        return self.names.get(param, param)


async def read_voice(service: Service, body: Body, visit: Visit) -> Clip:
    data = bytes(body.spool.view()) if body.spool is not None else body.data
    if not is_form(visit.content_type):
        return Clip(decode(data, _decoder))
    return await asyncio.to_thread(_of_form, data, boundary(visit.content_type))


def _of_form(data: bytes, mark: bytes) -> Clip:
    """The fields of a form as ours. Called on a worker thread: the file may be large."""
    form = parse_form(data, mark)
    names: dict[str, str] = {}
    given: dict[str, Any] = {}
    for name, value in form.fields.items():
        if name in IGNORED:
            continue
        ours = FORM_FIELDS.get(name)
        if ours is None or ours == "audio":
            raise Invalid(f"{name} must be a file" if ours else f"{name}: unknown field", name)
        if ours in given:
            raise Invalid(f"{name} and {names[ours]} are the same", name)
        given[ours], names[ours] = value, name
    files = {name: file for name, file in form.files.items() if FORM_FIELDS.get(name) == "audio"}
    if strange := set(form.files) - set(files):
        raise Invalid(f"{min(strange)} must not be a file", min(strange))
    name, file = next(iter(files.items()), ("file", memoryview(b"")))
    if len(files) != 1 or not len(file):
        raise Invalid("file: send one sound as the form's field file", "file")
    if len(file) > MAX_FILE:
        raise Invalid(f"{name}: a clip has at most {MAX_FILE >> 20} MiB", name)
    names["audio"] = name
    try:
        request = msgspec.convert(given, VoiceRequest, strict=False)
    except msgspec.ValidationError as e:
        wrong = wrong_field(e)
        raise Invalid(str(wrong), names.get(wrong.param or "", wrong.param)) from None
    return Clip(msgspec.structs.replace(request, audio=msgspec.Raw(b'"' + b64encode(file) + b'"')), names)


async def answer_voice(service: Service, clip: Clip, exchange: Exchange) -> None:
    request = clip.request
    engine, owner = service.engine(), exchange.visit.owner
    service.check_model(request.model, engine)
    if not engine.info.cloning:
        raise Invalid("this model has no voices but its own", "model")
    service.voices.check(owner, request.name, engine.info)
    audio = bytes(request.audio)
    if not audio.startswith(b'"') or len(audio) <= 2:
        raise Invalid("audio must be a sound file in base64", "audio")
    text = (request.text or "").strip()
    try:
        data = await engine.enrol(_message(audio, request.format, text, exchange.visit.sender), owner=owner)
    except Invalid as e:
        param = e.param if e.param is not None and not e.param.startswith("messages") else "audio"
        raise Invalid(_WHERE.sub("", str(e)) or "the clip cannot be used", clip.called(param)) from None
    service.voices.check(owner, request.name, engine.info)  # another request may have taken the name meanwhile
    await exchange.reply(service.voices.keep(owner, request.name, data, bool(text)))


def _message(audio: bytes, format: str | None, text: str, sender: str) -> Conversation:
    """The clip as a message of a conversation, its base64 as it came."""
    kind = msgspec.json.encode(format or "wav")
    words = [b',{"type":"text","text":', msgspec.json.encode(text), b"}"] if text else []
    parts = (
        b'[{"role":"user","content":[{"type":"input_audio","input_audio":{"data":',
        audio,
        b',"format":',
        kind,
        b"}}",
    )
    return Conversation.of(b"".join((*parts, *words, b"]}]")), sender=sender)
