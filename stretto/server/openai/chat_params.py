"""The fields of a chat request, besides its messages, as the engine's parameters; fields that this
server cannot honour are refused. Pure functions, called on the event loop by the routes of chat,
responses and speech."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
from msgspec import Raw

from stretto._validation import NOT_JSON, not_json
from stretto.errors import Invalid
from stretto.params import MAX_GRAMMAR, ChunkSizes, Params
from stretto.preprocess.template import check_variables
from stretto.server.openai import codecs
from stretto.server.openai.generating_route import drop_none
from stretto.server.openai.schema import ABSENT, ChatRequest, SpeechFields

NONE, _AUTO, _EMPTY = Raw(b'"none"'), Raw(b'"auto"'), Raw(b"[]")
MAX_SCHEMA = MAX_GRAMMAR
"""Bytes of a schema, or of the tools where a call is required: they become part of a grammar."""
LONGEST = {
    "chat_template_kwargs": 16 << 10,
    "tool_choice": 4 << 10,
    "logit_bias": 64 << 10,
    "response_format": MAX_SCHEMA + (16 << 10),
}
"""Bytes of fields that are decoded on the event loop: far more than the other limits of these
fields leave room for."""
# Python's own reading of numbers: it takes 1 us where msgspec takes 8.
_values = msgspec.json.Decoder(float_hook=float)


def refuse_unsupported(request: ChatRequest) -> None:
    """Refuse fields that we know and cannot honour, rather than ignore them."""
    r = request
    several_spoken = (r.n or 1) > 1 and "audio" in (r.modalities or ())
    top_alone = r.top_logprobs is not None and not r.logprobs
    options_alone = bool(r.stream_options) and not r.stream
    refused = {
        "n": (several_spoken, "one answer is spoken per request"),
        "top_logprobs": (top_alone, "only allowed when logprobs is true"),
        "functions": (r.functions not in (ABSENT, _EMPTY), "use tools"),
        "function_call": (r.function_call not in (ABSENT, NONE, _AUTO), "use tools"),
        "prediction": (r.prediction != ABSENT, "predicted output is not supported"),
        "web_search_options": (r.web_search_options != ABSENT, "there is no web search"),
        "moderation": (r.moderation != ABSENT, "there is no moderation"),
        "stream_options": (options_alone, "only allowed when stream is true"),
    }
    for name, (is_refused, why) in refused.items():
        if is_refused:
            raise Invalid(f"{name}: {why}", name)


def check_schema_size(size: int, at: str) -> None:
    if size > MAX_SCHEMA:
        raise Invalid(
            f"{at} has {size:,} bytes, more than the {MAX_SCHEMA:,} that an answer can follow", at
        )


def variables(raw: Raw) -> dict[str, Any]:
    """Read the variables of the chat template."""
    if raw == ABSENT:
        return {}
    try:
        return check_variables(_values.decode(raw))
    except NOT_JSON as e:
        raise Invalid(f"chat_template_kwargs: {not_json(e)}", "chat_template_kwargs") from None


def audio_format(request: ChatRequest, stream: bool) -> str:
    format = (request.audio.format if request.audio else None) or ("pcm16" if stream else "wav")
    codecs.check(format, "audio.format")
    if stream and format != "pcm16":
        raise Invalid(f"audio.format: a stream carries pcm16 only, not {format}", "audio.format")
    return format


def to_params(
    request: ChatRequest, defaults: Params, packets: ChunkSizes, grammar: str = ""
) -> Params:
    r = request
    longest = r.max_completion_tokens if r.max_completion_tokens is not None else r.max_tokens
    stop = (r.stop,) if isinstance(r.stop, str) else tuple(r.stop or ())
    overrides = {
        "temperature": r.temperature,
        "top_p": r.top_p,
        "top_k": or_off(r.top_k),
        "repetition_penalty": r.repetition_penalty,
        "min_p": r.min_p,
        "frequency_penalty": r.frequency_penalty,
        "presence_penalty": r.presence_penalty,
        "seed": r.seed,
        **speech_fields(r),
        "max_text_tokens": longest,
        "max_frames": r.max_audio_frames,
        "stop": stop,
        "logit_bias": token_bias(r.logit_bias),
        "ignore_eos": r.ignore_eos,
        "min_text_tokens": r.min_tokens,
        "min_frames": r.min_audio_frames,
        "logprobs": (r.top_logprobs or 0) if r.logprobs else None,
    }
    check_lengths(r.min_tokens, longest or defaults.max_text_tokens, "min_tokens")
    check_lengths(r.min_audio_frames, r.max_audio_frames or defaults.max_frames, "min_audio_frames")
    return replace(defaults, **drop_none(overrides), packets=packets, grammar=grammar)


def speech_fields(r: ChatRequest | SpeechFields) -> dict[str, Any]:
    """How speech is drawn, as far as a request says it."""
    return {
        "greedy_speech": r.greedy_speech,
        "speech_temperature": r.speech_temperature,
        "speech_top_p": r.speech_top_p,
        "speech_top_k": or_off(r.speech_top_k),
        "speech_repetition_penalty": r.speech_repetition_penalty,
    }


def or_off(top_k: int | None) -> int | None:
    """Other servers write -1 for off."""
    return None if top_k is None else max(0, top_k)


def check_lengths(least: int | None, most: int, param: str) -> None:
    if least is not None and least > most:
        raise Invalid(f"{param} is {least}, more than the {most} that are allowed at most", param)


def token_bias(bias: dict[str, float] | None) -> dict[int, float]:
    for key in bias or {}:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise Invalid(f"logit_bias: {key[:40]!r} is not the id of a token", "logit_bias")
    return {int(k): b for k, b in (bias or {}).items()}
