"""Which voice a client means, and POST /v1/audio/voices: a voice is made of a clip and kept under a name.

Stock clients know OpenAI's names only, so these mean something too."""

from __future__ import annotations

import re

import msgspec

from stretto.errors import Invalid
from stretto.family import ModelInfo
from stretto.prompt.jobs import Conversation
from stretto.server.body import Body
from stretto.server.exchange import Exchange, decode
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


async def read_voice(service: Service, body: Body, visit: Visit) -> VoiceRequest:
    return decode(bytes(body.spool.view()) if body.spool is not None else body.data, _decoder)


async def answer_voice(service: Service, request: VoiceRequest, exchange: Exchange) -> None:
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
        raise Invalid(_WHERE.sub("", str(e)) or "audio cannot be used", param) from None
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
