"""The OpenAPI document of the server, at `/openapi.json`. It is made of the same structs that
decode requests and encode answers, so it cannot drift from them."""

from __future__ import annotations

from typing import Any

import msgspec

from stretto import __version__
from stretto.preprocess.messages import Tool
from stretto.server.openai import response_schema as r
from stretto.server.openai.error_body import Failure
from stretto.server.openai.schema import (
    ChatChunk,
    ChatRequest,
    ChatResponse,
    Health,
    ModelCard,
    ModelList,
    SpeechDelta,
    SpeechDone,
    SpeechRequest,
    Transcript,
    TranscriptDelta,
    TranscriptDone,
    TranscriptionRequest,
    TranscriptSegment,
    VerboseTranscript,
    Version,
    VoiceCard,
    VoiceDeleted,
    VoiceList,
    VoiceRequest,
)
from stretto.server.realtime.client_secret_route import ClientSecretAnswer, ClientSecretRequest

RESPONSE_EVENTS = (
    r.Created,
    r.InProgress,
    r.Completed,
    r.Incomplete,
    r.ResponseItemAdded,
    r.ResponseItemDone,
    r.OutputPartAdded,
    r.OutputPartDone,
    r.OutputTextDelta,
    r.OutputTextDone,
    r.CallArgumentsDelta,
    r.CallArgumentsDone,
)
_REF = "#/components/schemas/{name}"
_ERRORS = {
    400: "what is wrong, and in which field",
    401: "no API key, or a wrong one",
    403: "pages of this origin may not call",
    404: "no such model",
    408: "the request took too long to arrive",
    413: "the request is too large",
    415: "the body is not called application/json",
    421: "the server may not be called by this name",
    429: "too many requests at once; Retry-After says when to try again",
    500: "the server failed",
    502: "data was damaged on its way between stages",
    503: "loading, shutting down or failed",
}


def document() -> dict[str, Any]:
    types = [
        ChatRequest,
        Tool,
        ChatResponse,
        ChatChunk,
        r.ResponsesRequest,
        r.ResponseObject,
        *RESPONSE_EVENTS,
        SpeechRequest,
        SpeechDelta,
        SpeechDone,
        ModelCard,
        ModelList,
    ]
    types += [VoiceRequest, VoiceCard, VoiceList, VoiceDeleted]
    types += [TranscriptionRequest, Transcript, VerboseTranscript]
    types += [TranscriptDelta, TranscriptSegment, TranscriptDone]
    types += [ClientSecretRequest, ClientSecretAnswer]
    _, parts = msgspec.json.schema_components([*types, Health, Version, Failure], ref_template=_REF)
    parts["ChatRequest"]["properties"] |= _undecoded()
    parts["ChatRequest"]["required"] = ["messages"]
    parts["ResponsesRequest"]["properties"] |= _undecoded_response()
    parts["ResponsesRequest"]["required"] = ["input"]
    parts["VoiceRequest"]["properties"]["audio"] = {"type": "string", "contentEncoding": "base64"}
    parts["VoiceRequest"]["required"] = ["name", "audio"]
    parts["ClientSecretRequest"]["properties"]["session"] = {
        "anyOf": [{"type": "object"}, {"type": "null"}]
    }
    parts["TranscriptionForm"] = _form(parts.pop("TranscriptionRequest"))
    return {
        "openapi": "3.1.0",
        "info": {"title": "Stretto", "version": __version__},
        "security": [{}, {"key": []}],  # a key is needed if the server was started with any
        "paths": _paths(),
        "components": {
            "schemas": {**parts, **_messages()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }  # fmt: skip


def _paths() -> dict[str, Any]:
    audio: dict[str, Any] = {f"audio/{t}": {} for t in ("pcm", "wav", "mpeg", "flac", "ogg", "aac")}
    speech = {
        **audio,
        "text/event-stream": {"schema": _event("SpeechDelta", "SpeechDone", "Failure")},
    }
    chat = {
        **_as_json("ChatResponse"),
        "text/event-stream": {"schema": _event("ChatChunk", "Failure")},
    }
    response = {
        **_as_json("ResponseObject"),
        "text/event-stream": {
            "schema": _event(*(event.__name__ for event in RESPONSE_EVENTS), "Failure")
        },
    }
    either = {"anyOf": [{"$ref": _REF.format(name=n)} for n in ("Transcript", "VerboseTranscript")]}
    transcripts = {
        "application/json": {"schema": either},
        "text/plain": {"schema": {"type": "string"}},
        "text/vtt": {"schema": {"type": "string"}},
        "text/event-stream": {
            "schema": _event("TranscriptDelta", "TranscriptSegment", "TranscriptDone", "Failure")
        },
    }
    schema = {"$ref": _REF.format(name="TranscriptionForm")}
    form = {"required": True, "content": {"multipart/form-data": {"schema": schema}}}
    name = {
        "name": "model",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "minLength": 1},
    }
    voice = {**name, "name": "name"}
    plain = {"text/plain": {"schema": {"type": "string"}}}
    return {
        "/v1/chat/completions": {"post": _post("Answer a conversation", "ChatRequest", chat)},
        "/v1/responses": {"post": _post("Answer a conversation", "ResponsesRequest", response)},
        "/v1/audio/speech": {"post": _post("Read a text aloud", "SpeechRequest", speech)},
        "/v1/audio/voices": {
            "post": _voice_post(),
            "get": _get("The model's voices, and your own", _as_json("VoiceList"), 401, 403, 421,
            503),
        },
        "/v1/audio/voices/{name}": {
            "delete": {**_get("Forget one", _as_json("VoiceDeleted"), 401, 403, 404, 421),
            "parameters": [voice]}
        },
        "/v1/audio/transcriptions": {"post": {**_get("Write down speech", transcripts, *_ERRORS),
        "requestBody": form}},
        "/v1/audio/translations": {"post": {**_get("The same, in English", transcripts, *_ERRORS),
        "requestBody": form}},
        "/v1/realtime/client_secrets": {"post": _post("Make a key that a browser may hold",
        "ClientSecretRequest", _as_json("ClientSecretAnswer"))},
        "/v1/models": {"get": _get("The models", _as_json("ModelList"), 401, 403, 421, 503)},
        "/v1/models/{model}": {
            "get": {**_get("One", _as_json("ModelCard"), 401, 403, 404, 421, 503),
            "parameters": [name]}
        },
        "/health": {"get": {"summary": "Is it ready?", "responses": {
            "200": {"description": "ready", "content": _as_json("Health")},
            "503": {"description": "loading, draining or dead", "content": _as_json("Health")},
        }}},
        "/live": {"get": _get("Is the process alive?", {"application/json": {}})},
        "/version": {"get": _get("The version", _as_json("Version"))},
        "/metrics": {"get": _get("Numbers for Prometheus", plain)},
    }  # fmt: skip


def _post(summary: str, request: str, content: dict[str, Any]) -> dict[str, Any]:
    body = {"required": True, "content": _as_json(request)}
    return {**_get(summary, content, *_ERRORS), "requestBody": body}


def _voice_post() -> dict[str, Any]:
    """In JSON, or as a form with a file."""
    post = _post("Make a voice of a clip", "VoiceRequest", _as_json("VoiceCard"))
    texts = {name: {"type": "string"} for name in ("name", "transcript", "model")}
    file = {"type": "string", "contentMediaType": "application/octet-stream"}
    form = {"type": "object", "properties": {"file": file, **texts}, "required": ["file", "name"]}
    post["requestBody"]["content"]["multipart/form-data"] = {"schema": form}
    return post


def _get(summary: str, content: dict[str, Any], *errors: int) -> dict[str, Any]:
    failures = {str(e): {"description": _ERRORS[e], "content": _as_json("Failure")} for e in errors}
    return {
        "summary": summary,
        "responses": {"200": {"description": "fine", "content": content}, **failures},
    }


def _as_json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(name=name)}}}


def _event(*names: str) -> dict[str, Any]:
    """One server-sent event whose data is JSON; a chat's last one is the word [DONE]."""
    content = {"anyOf": [{"$ref": _REF.format(name=n)} for n in names]}
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": content}
    return {"type": "object", "required": ["data"], "properties": {"data": data}}


def _undecoded() -> dict[str, Any]:
    """Fields of a chat that the server passes on or skips without decoding them."""
    messages = {
        "type": "array",
        "minItems": 1,
        "maxItems": 4096,
        "items": {"$ref": _REF.format(name="ChatMessage")},
    }
    tools = {"type": "array", "maxItems": 256, "items": {"$ref": _REF.format(name="Tool")}}
    nothing = {"type": "null"}
    return {
        "messages": messages,
        "tools": {"anyOf": [tools, nothing]},
        "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required", None]}, _named_tool()]},
        "chat_template_kwargs": {"anyOf": [{"type": "object", "maxProperties": 16}, nothing]},
        "metadata": {"anyOf": [{"type": "object"}, nothing]},
    }


def _undecoded_response() -> dict[str, Any]:
    """The same of a response."""
    text = {"type": "string"}
    items = {"type": "array", "minItems": 1, "maxItems": 4096, "items": {"type": "object"}}
    function = {
        "type": "object",
        "required": ["type", "name"],
        "properties": {"type": {"const": "function"}, "name": text, "description": text,
                       "parameters": {"type": "object"}},
    }  # fmt: skip
    nothing = {"type": "null"}
    tools = {"type": "array", "maxItems": 256, "items": function}
    return {
        "input": {"anyOf": [text, items]},
        "instructions": {"anyOf": [text, nothing]},
        "tools": {"anyOf": [tools, nothing]},
        "tool_choice": {
            "anyOf": [{"enum": ["none", "auto", "required", None]}, {"type": "object"}]
        },
        "chat_template_kwargs": {"anyOf": [{"type": "object", "maxProperties": 16}, nothing]},
    }


def _named_tool() -> dict[str, Any]:
    name = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}
    return {
        "type": "object",
        "required": ["function"],
        "properties": {"type": {"const": "function"}, "function": name},
    }


def _form(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a transcription and its file."""
    sound = {"type": "string", "format": "binary"}
    return {**fields, "properties": {**fields["properties"], "file": sound}, "required": ["file"]}


def _messages() -> dict[str, Any]:
    """Messages are read by the prompt builder, part by part; this says what it takes."""
    text = {"type": "string"}
    url = {
        "type": "object",
        "required": ["url"],
        "properties": {
            "url": {"type": "string", "description": "a data URI, or an address of an allowed host"}
        },
    }
    sound = {
        "type": "object",
        "required": ["data"],
        "properties": {
            "data": {"type": "string", "contentEncoding": "base64"},
            "format": text,
            "sample_rate": {"type": "integer"},
        },
    }
    kinds = {
        "text": text,
        "input_audio": sound,
        "audio_url": url,
        "image_url": url,
        "video_url": url,
    }
    parts = [
        {"type": "object", "required": ["type", k], "properties": {"type": {"const": k}, k: v}}
        for k, v in kinds.items()
    ]
    call = {
        "type": "object",
        "properties": {
            "id": text,
            "type": {"const": "function"},
            "function": {"type": "object", "properties": {"name": text, "arguments": text}},
        },
    }
    earlier = {"type": "object", "required": ["id"], "properties": {"id": text}}
    message = {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
            "content": {
                "anyOf": [text, {"type": "array", "items": {"anyOf": parts}}, {"type": "null"}]
            },
            "audio": {"anyOf": [earlier, {"type": "null"}]},
            "tool_calls": {"type": "array", "items": call},
            "tool_call_id": text,
            "name": text,
        },
    }
    return {"ChatMessage": message}
