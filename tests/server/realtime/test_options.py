"""A session's settings and what an update makes of them."""

import asyncio
from typing import Any, TypeVar

import msgspec
import pytest

from stretto.errors import Invalid
from stretto.family import ModelInfo
from stretto.params import ChunkSizes, Params
from stretto.server.loop_time import LoopTurns
from stretto.server.realtime import client_events as c
from stretto.server.realtime.options import MAX_TEXT_BYTES, Options, SessionState
from stretto.server.realtime.tools import ToolReader

F = TypeVar("F", bound=c.Common)
INFO = ModelInfo("m", ("Ethan", "Chelsie"), "Ethan", 24_000, 32768)


def state() -> SessionState:
    return SessionState("sess_1", "m", 99, Options("Ethan"))


def update(to: SessionState, **session: Any) -> SessionState:
    changes = fields(c.SessionFields, **session)
    return to.updated(changes, INFO, asyncio.run(ToolReader(LoopTurns()).read(changes)))


def fields(kind: type[F], **values: Any) -> F:
    return msgspec.json.decode(msgspec.json.encode(values), type=kind)


def test_defaults_are_told_in_full() -> None:
    assert state().to_wire() == {
        "type": "realtime",
        "object": "realtime.session",
        "id": "sess_1",
        "model": "m",
        "expires_at": 99,
        "output_modalities": ["audio"],
        "instructions": "",
        "tools": [],
        "tool_choice": "auto",
        "max_output_tokens": "inf",
        "tracing": None,
        "truncation": "auto",
        "prompt": None,
        "include": None,
        "audio": {
            "input": {
                "format": {"type": "audio/pcm", "rate": 24000},
                "transcription": None,
                "noise_reduction": None,
                "turn_detection": {
                    "type": "server_vad",
                    "threshold": 0.5,
                    "prefix_padding_ms": 300,
                    "silence_duration_ms": 500,
                    "idle_timeout_ms": None,
                    "create_response": True,
                    "interrupt_response": True,
                },
            },
            "output": {
                "format": {"type": "audio/pcm", "rate": 24000},
                "voice": "Ethan",
                "speed": 1.0,
            },
        },
    }


def test_only_what_is_named_changes_and_objects_merge() -> None:
    one = update(
        state(), instructions="Be kind.", audio={"input": {"turn_detection": {"threshold": 0.7}}}
    )
    two = update(one, audio={"input": {"transcription": {"model": "gpt-4o-mini-transcribe"}}})
    wire = two.to_wire()
    assert wire["instructions"] == "Be kind."
    assert wire["audio"]["input"]["turn_detection"]["threshold"] == 0.7
    assert wire["audio"]["input"]["turn_detection"]["silence_duration_ms"] == 500
    assert wire["audio"]["input"]["transcription"] == {"model": "gpt-4o-mini-transcribe"}


def test_null_clears() -> None:
    audio = {
        "input": {"transcription": {"language": "de"}, "noise_reduction": {"type": "near_field"}}
    }
    one = update(state(), instructions="x", tools=[{"type": "function", "name": "f"}], audio=audio)
    assert one.to_wire()["audio"]["input"]["transcription"] == {"model": "m", "language": "de"}
    assert one.to_wire()["audio"]["input"]["noise_reduction"] == {"type": "near_field"}
    cleared = {"turn_detection": None, "transcription": None, "noise_reduction": None}
    two = update(one, instructions="", tools=[], audio={"input": cleared})
    assert two.to_wire()["audio"]["input"] == {
        "format": {"type": "audio/pcm", "rate": 24000},
        **cleared,
    }
    assert (two.to_wire()["instructions"], two.to_wire()["tools"]) == ("", [])
    back = update(two, audio={"input": {"turn_detection": {"type": "server_vad"}}})
    assert back.to_wire()["audio"]["input"]["turn_detection"]["silence_duration_ms"] == 500


def test_another_type_of_detection_replaces_the_object() -> None:
    one = update(
        state(),
        audio={"input": {"turn_detection": {"type": "server_vad", "create_response": False}}},
    )
    two = update(
        one, audio={"input": {"turn_detection": {"type": "semantic_vad", "eagerness": "high"}}}
    )
    assert two.to_wire()["audio"]["input"]["turn_detection"] == {
        "type": "semantic_vad", "eagerness": "high", "create_response": True,
        "interrupt_response": True,
    }  # fmt: skip
    three = update(two, audio={"input": {"turn_detection": {"interrupt_response": False}}})
    assert three.turns is not None
    assert (three.turns.type, three.turns.eagerness, three.turns.interrupt_response) == (
        "semantic_vad",
        "high",
        False,
    )


def test_what_stock_clients_send_unasked_is_taken() -> None:
    livekit = {
        "type": "realtime", "model": "gpt-realtime", "tracing": None, "max_output_tokens": "inf",
        "tool_choice": "auto",
        "prompt": {"id": "p"}, "include": [], "truncation": {"type": "auto"},
        "reasoning": {"effort": "low"},
        "audio": {"output": {"voice": "marin", "speed": 1.0, "format": {"type": "audio/pcm",
        "rate": 24000}},
                  "input": {"noise_reduction": None, "turn_detection": {"type": "semantic_vad"}}},
    }  # fmt: skip
    wire = update(state(), **livekit).to_wire()
    assert wire["model"] == "m"
    assert wire["audio"]["output"]["voice"] == "Chelsie"
    assert update(state(), audio={"output": {"voice": "nobody"}}).answers.voice == "Ethan"
    assert update(state(), audio={"output": {"voice": {"id": "ash"}}}).answers.voice == "Ethan"


@pytest.mark.parametrize(
    "session",
    [
        {"output_modalities": ["video"]},
        {"output_modalities": []},
        {"audio": {"input": {"format": {"type": "audio/opus"}}}},
        {"audio": {"input": {"format": {"type": "audio/pcm", "rate": 16000}}}},
        {"audio": {"input": {"turn_detection": {"type": "psychic"}}}},
        {"audio": {"input": {"turn_detection": {"threshold": 2}}}},
        {"instructions": 5},
        {"tools": [{"type": "function"}]},
        {"tools": "all"},
        {"tool_choice": "perhaps"},
        {"max_output_tokens": 0},
        {"type": "translation"},
    ],
)
def test_wrong_values_are_refused(session: dict[str, Any]) -> None:
    with pytest.raises((Invalid, msgspec.ValidationError)):
        update(state(), **session)


def test_tools_become_the_model_s() -> None:
    tools = [
        {"type": "function", "name": "a", "description": "A", "parameters": {"type": "object"}},
        {"type": "mcp", "server_label": "x"},
        {"type": "function", "name": "b"},
    ]
    options = update(state(), tools=tools).answers
    assert [t["function"]["name"] for t in options.chat_tools() or ()] == ["a", "b"]
    only = options.updated(c.ResponseFields(tool_choice=c.NamedTool("b")), INFO)
    assert [t["function"]["name"] for t in only.chat_tools() or ()] == ["b"]
    assert only.tool_choice == "required"  # strict clients want a word
    assert options.updated(c.ResponseFields(tool_choice="none"), INFO).chat_tools() is None


def test_null_in_a_response_is_what_the_session_has() -> None:
    """LiveKit and others write out every field of a response."""
    tools = [{"type": "function", "name": "a"}, {"type": "function", "name": "b"}]
    options = update(
        state(), instructions="Be brief.", tools=tools, tool_choice={"type": "function",
        "name": "b"}, seed=3,
        max_output_tokens=20, output_modalities=["text"],
        audio={"output": {"voice": "Chelsie", "format": {"type": "audio/pcmu"}}},
    ).answers  # fmt: skip
    names = (
        "instructions",
        "tools",
        "tool_choice",
        "seed",
        "max_output_tokens",
        "output_modalities",
    )
    audio = {"output": {"voice": None, "format": None}}
    null = fields(c.ResponseFields, **dict.fromkeys(names), audio=audio)
    assert options.updated(null, INFO) == options
    assert options.updated(msgspec.convert({"audio": None}, c.ResponseFields), INFO) == options
    assert (
        options.updated(msgspec.convert({"instructions": ""}, c.ResponseFields), INFO).instructions
        == ""
    )


def test_sampling() -> None:
    options = update(
        state(), seed=3, temperature=0.5, max_output_tokens=20, max_audio_frames=9
    ).answers
    params = options.params(ChunkSizes(), Params())
    assert (params.seed, params.temperature, params.max_text_tokens, params.max_frames) == (
        3,
        0.5,
        20,
        9,
    )
    own = Params(temperature=0.6, max_text_tokens=300, speech_top_k=7)  # what the checkpoint says
    params = options.updated(c.ResponseFields(max_output_tokens="inf"), INFO).params(
        ChunkSizes(), own
    )
    assert (params.temperature, params.max_text_tokens, params.speech_top_k) == (0.5, 300, 7)


def test_both_modalities_mean_speech() -> None:
    assert update(state(), output_modalities=["text", "audio"]).to_wire()["output_modalities"] == [
        "audio"
    ]
    assert not update(state(), output_modalities=["text"]).answers.has_audio


def test_a_session_fits_in_a_message() -> None:
    tools = [{"type": "function", "name": f"f{i}", "description": "x" * 10_000} for i in range(100)]
    with pytest.raises(Invalid, match="more than"):
        update(state(), tools=tools)
    assert (
        len(msgspec.json.encode(update(state(), instructions="\x01" * 120_000).to_wire()))
        < MAX_TEXT_BYTES + 4096
    )
    with pytest.raises(Invalid, match="instructions and tools have"):
        update(state(), instructions="\x01" * 120_000, tools=tools[:10])


def test_speed_of_a_session_and_of_one_response() -> None:
    session = update(state(), audio={"output": {"speed": 1.5}})
    assert session.to_wire()["audio"]["output"]["speed"] == 1.5
    assert session.answers.params(ChunkSizes(), Params()).speed == 1.5

    def response(**output: Any) -> float:
        changes = fields(c.ResponseFields, audio={"output": output})
        return session.answers.updated(changes, INFO).speed

    assert (response(), response(speed=None), response(speed=0.5)) == (1.5, 1.5, 0.5)
    assert update(session, audio={"output": {"speed": None}}).answers.speed == 1.0
