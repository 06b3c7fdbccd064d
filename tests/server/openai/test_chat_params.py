"""Sampling parameters of requests, over the defaults of the model."""

from __future__ import annotations

from stretto.params import Params
from tests.server.conftest import Running, serve
from tests.server.scripted_engine import ScriptedEngine


def test_speech_sampling_of_the_request_or_else_of_the_model() -> None:
    engine = ScriptedEngine(defaults=Params(temperature=0.6, speech_top_k=9))
    with serve(engine) as running:
        check_fields(running, engine)


def check_fields(running: Running, engine: ScriptedEngine) -> None:
    ask = {
        "messages": [{"role": "user", "content": "hi"}],
        "speech_temperature": 0.3,
        "max_tokens": 5,
    }
    assert running.ask("/v1/chat/completions", ask).status == 200
    p = engine.calls[-1]["params"]
    assert (p.temperature, p.speech_temperature, p.speech_top_k, p.max_text_tokens) == (
        0.6,
        0.3,
        9,
        5,
    )
    read = {"input": "hi", "voice": "ethan", "speech_top_p": 0.7, "response_format": "wav"}
    assert running.ask("/v1/audio/speech", read).status == 200
    assert (engine.calls[-1]["params"].speech_top_p, engine.calls[-1]["params"].speech_top_k) == (
        0.7,
        9,
    )
    defaults = running.ask("/v1/models").json["data"][0]["defaults"]
    assert (defaults["temperature"], defaults["speech_top_k"], defaults["max_tokens"]) == (
        0.6,
        9,
        1024,
    )
