"""Turns that the client ends itself: order of events, memory, items, errors."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from stretto.engine.events import TextDelta, TimelineSpan
from stretto.errors import Busy
from stretto.server.realtime.audio_formats import decode_g711, encode_g711
from stretto.server.realtime.response_manager import MAX_OUT_OF_BAND
from tests.server.conftest import Running
from tests.server.realtime.client import (
    ONE_S,
    add_text,
    answer,
    hold,
    speak,
    talk,
    types,
)
from tests.server.realtime.sounds import b64, speech
from tests.server.scripted_engine import ScriptedEngine
from tests.server.scripted_session import Ask, say

DELTAS = {
    "response.output_audio_transcript.delta",
    "response.output_audio.delta",
    "response.output_text.delta",
}


def test_voice_turn_in_order(running: Running, engine: ScriptedEngine) -> None:
    with talk(running) as c:
        c.manual()
        c.append(ONE_S)
        c.send("input_audio_buffer.commit")
        committed = c.collect("conversation.item.done")
        assert types(committed) == [
            "input_audio_buffer.committed", "conversation.item.added", "conversation.item.done",
        ]  # fmt: skip
        assert len({e.get("item_id") or e["item"]["id"] for e in committed}) == 1
        events = answer(c, metadata={"client_event_id": "x1"})
    assert [k for k in types(events) if k not in DELTAS] == [
        "response.created", "response.output_item.added", "conversation.item.added",
        "response.content_part.added",
        "response.output_audio.done", "response.output_audio_transcript.done",
        "response.content_part.done",
        "conversation.item.done", "response.output_item.done", "response.done",
    ]  # fmt: skip
    first, done = events[0]["response"], events[-1]["response"]
    assert first["metadata"] == done["metadata"] == {"client_event_id": "x1"}
    assert (first["status"], done["status"]) == ("in_progress", "completed")
    text = "".join(
        e["delta"] for e in events if e["type"] == "response.output_audio_transcript.delta"
    )
    assert text == done["output"][0]["content"][0]["transcript"] == "I know 1 messages so far."
    assert {e["part"]["type"] for e in events if "part" in e} == {"audio"}
    assert events[1]["item"]["role"] == "assistant"
    assert events[2]["previous_item_id"] == committed[0]["item_id"]
    sound = b"".join(
        base64.b64decode(e["delta"]) for e in events if e["type"] == "response.output_audio.delta"
    )
    assert len(sound) == 2 * 24_000
    assert done["usage"] == {
        "total_tokens": 28, "input_tokens": 10, "output_tokens": 18,
        "input_token_details": {"text_tokens": 7, "audio_tokens": 3, "image_tokens": 0,
        "cached_tokens": 4,
                                "cached_tokens_details": {"text_tokens": 4, "audio_tokens": 0,
                                "image_tokens": 0}},
        "output_token_details": {"text_tokens": 6, "audio_tokens": 12},
    }  # fmt: skip
    assert done["stretto"]["seed"] == 7
    assert done["stretto"]["speech_to_audio_s"] > 0
    assert engine.asks[0].texts == ["user: [1.00 s]"]


def test_nothing_null_where_some_clients_refuse_null(running: Running) -> None:
    with talk(running) as c:
        c.manual()
        speak(c)
        events = answer(c)
    for e in events:
        for item in (e.get("item"), *e.get("response", {}).get("output", ())):
            absent = ("arguments", "call_id", "name", "role", "status", "content")
            assert item is None or not [k for k in absent if k in item and item[k] is None]
        if "part" in e:
            assert None not in e["part"].values()


def test_memory_of_two_turns(running: Running, engine: ScriptedEngine) -> None:
    with talk(running) as c:
        c.manual(instructions="Be brief.")
        speak(c)
        answer(c)
        speak(c, ONE_S[: len(ONE_S) // 2])
        answer(c)
    assert engine.asks[1].texts == [
        "system: Be brief.", "user: [1.00 s]", "assistant: I know 2 messages so far.",
        "user: [0.50 s]",
    ]  # fmt: skip
    assert not engine.ledger.running
    options = engine.asks[0].given  # sound was read ahead behind the same words
    assert engine.sessions[-1].expected == {
        k: options[k] for k in ("modalities", "instructions", "tools")
    }


def test_text_alone(running: Running, engine: ScriptedEngine) -> None:
    with talk(running) as c:
        c.manual(output_modalities=["text"])
        add_text(c, "Hello")
        events = answer(c)
    assert [k for k in types(events) if k not in DELTAS][-5:] == [
        "response.output_text.done", "response.content_part.done", "conversation.item.done",
        "response.output_item.done", "response.done",
    ]  # fmt: skip
    assert events[-1]["response"]["output"][0]["content"] == [
        {"type": "output_text", "text": "I know 1 messages so far."}
    ]
    assert engine.asks[0].given["modalities"] == ("text",)
    assert {e["part"]["type"] for e in events if "part" in e} == {"text"}


def test_items_are_put_where_they_belong(running: Running, engine: ScriptedEngine) -> None:
    with talk(running) as c:
        c.manual(output_modalities=["text"])
        second = add_text(c, "second")
        assert second["previous_item_id"] is None
        first = add_text(c, "first", previous_item_id="root")
        third = add_text(c, "third", role="assistant")
        assert third["previous_item_id"] == second["item"]["id"]
        between = add_text(c, "between", previous_item_id=first["item"]["id"])
        assert between["previous_item_id"] == first["item"]["id"]
        c.send("conversation.item.delete", item_id=second["item"]["id"])
        assert c.until("conversation.item.deleted")["item_id"] == second["item"]["id"]
        c.send("conversation.item.retrieve", item_id=third["item"]["id"])
        assert c.until("conversation.item.retrieved")["item"]["content"][0]["text"] == "third"
        add_text(c, "")  # says nothing to the model
        add_text(c, "last")
        answer(c)
    assert engine.asks[0].texts == [
        "user: first",
        "user: between",
        "assistant: third",
        "user: last",
    ]


def test_an_item_that_is_refused_is_not_there(running: Running, engine: ScriptedEngine) -> None:
    picture = {"type": "input_image", "image_url": "http://127.0.0.1/a.png"}
    with talk(running) as c:
        c.manual(output_modalities=["text"])
        add_text(c, "before")
        item = {"id": "mine", "type": "message", "role": "user", "content": [picture]}
        event_id = c.send("conversation.item.create", item=item)
        error = c.until("error")["error"]
        assert (error["code"], error["event_id"]) == ("invalid_value", event_id)
        assert error["param"] == "item.content[0].image_url.url"
        assert error["message"].startswith(error["param"])
        c.send("conversation.item.retrieve", item_id="mine")
        assert c.until("error")["error"]["code"] == "item_retrieve_invalid_item_id"
        c.send("response.create", response={"conversation": "none", "input": [item]})
        assert c.until("error")["error"]["param"] == "response.input[0].content[0].image_url.url"
        c.send(
            "conversation.item.create",
            item={**item, "content": [{"type": "input_text", "text": "after"}]},
        )
        c.until("conversation.item.done")
        answer(c)
    assert engine.asks[0].texts == ["user: before", "user: after"]


def test_nothing_is_called_as_the_front_is(running: Running) -> None:
    with talk(running) as c:
        text = [{"type": "input_text", "text": "x"}]
        item = {"id": "root", "type": "message", "role": "user", "content": text}
        c.send("conversation.item.create", item=item)
        assert c.until("error")["error"]["code"] == "item_create_duplicate_item_id"


@pytest.mark.parametrize(
    ("role", "kind", "wire"),
    [
        ("assistant", "input_text", "output_text"),
        ("assistant", "text", "output_text"),
        ("assistant", "input_audio", "output_audio"),
        ("user", "output_text", "input_text"),
        ("system", "output_audio", "input_text"),
    ],
)
def test_parts_are_called_as_strict_clients_have_it(
    running: Running, engine: ScriptedEngine, role: str, kind: str, wire: str
) -> None:
    """The client of these tests refuses an event that OpenAI's types do not describe."""
    part = {"type": kind, "transcript" if kind.endswith("audio") else "text": "words"}
    with talk(running) as c:
        c.manual(output_modalities=["text"])
        c.send(
            "conversation.item.create", item={"type": "message", "role": role, "content": [part]}
        )
        assert [p["type"] for p in c.until("conversation.item.added")["item"]["content"]] == [wire]
        c.until("conversation.item.done")
        answer(c)
        picture = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
        c.send(
            "conversation.item.create", item={"type": "message", "role": role, "content": [picture]}
        )
        assert c.until("conversation.item.done", "error")["type"].endswith(
            "done" if role == "user" else "error"
        )
    assert engine.asks[0].texts == [f"{role}: words"]


def test_items_that_the_engine_has_forgotten(running: Running, engine: ScriptedEngine) -> None:
    """A full context makes it forget the oldest turns by itself; clients may still speak of
    them."""
    with talk(running) as c:
        c.manual()
        first = add_text(c, "first")["item"]["id"]
        spoken = answer(c)[-1]["response"]["output"][0]["id"]
        add_text(c, "second")
        session = engine.sessions[0]
        for item in session.items[:2]:
            running.do(session.remove(item.id))
        c.send("conversation.item.truncate", item_id=spoken, content_index=0, audio_end_ms=300)
        c.until("conversation.item.truncated")
        c.send("conversation.item.delete", item_id=first)
        c.until("conversation.item.deleted")
        add_text(c, "between", previous_item_id=spoken)
        answer(c)
    assert engine.asks[-1].texts == ["user: between", "user: second"]


def test_errors_have_their_codes_and_the_session_lives(running: Running) -> None:
    with talk(running) as c:
        c.manual()
        item = {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "x"}],
            "id": "same",
        }
        c.send("conversation.item.create", item=item)
        c.until("conversation.item.done")
        events = [
            ("response_cancel_not_active", c.send("response.cancel")),
            ("input_audio_buffer_commit_empty", c.send("input_audio_buffer.commit")),
            ("item_retrieve_invalid_item_id", c.send("conversation.item.retrieve", item_id="no")),
            ("item_delete_invalid_item_id", c.send("conversation.item.delete", item_id="no")),
            ("item_truncate_invalid_item_id",
             c.send("conversation.item.truncate", item_id="no", content_index=0, audio_end_ms=1)),
            ("item_create_duplicate_item_id", c.send("conversation.item.create", item=item)),
            ("item_create_invalid_previous_item_id",
             c.send("conversation.item.create", item={**item, "id": "other"},
             previous_item_id="no")),
            ("invalid_value", c.send("conversation.item.create", item={"type": "message"})),
            ("invalid_value", c.send("session.update", session={"output_modalities": ["smell"]})),
            ("invalid_value", c.send("session.update",
            session={"audio": {"input": {"format": {"type": "audio/pcm",
                                                                                              "rate": 8000}}}})),  # noqa: E501
            ("invalid_event", c.send("session.destroy")),
            ("input_audio_buffer_commit_empty", c.send("input_audio_buffer.commit")),
        ]  # fmt: skip
        for code, event_id in events:
            error = c.until("error")["error"]
            assert (error["code"], error["event_id"]) == (code, event_id)
            if code == "response_cancel_not_active":
                assert error["message"].startswith("Cancellation failed")
        c.socket.send("not json")
        assert c.until("error")["error"]["code"] == "invalid_json"
        c.socket.send(b"\xff\xfe")
        assert c.until("error")["error"]["code"] == "invalid_json"
        assert answer(c)[-1]["response"]["status"] == "completed"


def test_a_second_response_at_once_is_refused(running: Running, engine: ScriptedEngine) -> None:
    with talk(running) as c:
        c.manual()
        c.update(instructions="x")
        gate = hold(running, engine)
        c.send("response.create")
        c.until("response.created")
        event_id = c.send("response.create")
        error = c.until("error")["error"]
        assert (error["code"], error["event_id"]) == (
            "conversation_already_has_active_response",
            event_id,
        )
        gate()
        assert c.until("response.done")["response"]["status"] == "completed"


def test_the_buffer_can_be_cleared(running: Running, engine: ScriptedEngine) -> None:
    with talk(running) as c:
        c.manual()
        c.append(ONE_S)
        c.send("input_audio_buffer.clear")
        c.until("input_audio_buffer.cleared")
        speak(c, ONE_S[:24_000])
        answer(c)
    assert engine.asks[0].texts == ["user: [0.50 s]"]


def test_telephones(running: Running, engine: ScriptedEngine) -> None:
    with talk(running) as c:
        wire = c.manual(
            audio={
                "input": {"format": {"type": "audio/pcmu"}},
                "output": {"format": {"type": "audio/pcma"}},
            }
        )
        assert wire["audio"]["input"]["format"] == {"type": "audio/pcmu"}
        sound = (speech(1.0, 8000) * 32767).astype(np.int16)
        speak(c, encode_g711(sound, "mu"))
        events = answer(c)
    samples = engine.asks[0].messages[0]["content"][0]["data"]
    assert len(samples) == 16_000
    assert 0.02 < np.abs(samples).mean() < 0.3
    data = b"".join(
        base64.b64decode(e["delta"]) for e in events if e["type"] == "response.output_audio.delta"
    )
    assert len(data) == 8000
    assert np.abs(decode_g711(data, "a").astype(int)).mean() > 100


def test_voice_stays_once_it_was_heard(running: Running) -> None:
    with talk(running) as c:
        assert (
            c.manual(audio={"output": {"voice": "chelsie"}})["audio"]["output"]["voice"]
            == "Chelsie"
        )
        speak(c)
        answer(c)
        assert (
            c.update(audio={"output": {"voice": "ethan"}})["audio"]["output"]["voice"] == "Chelsie"
        )


def test_limits_of_length_are_told(running: Running, engine: ScriptedEngine) -> None:
    engine.script = lambda ask: say("a b c d", 0.2)
    with talk(running) as c:
        c.manual()
        add_text(c, "x")
        done = answer(c, max_output_tokens=4)[-1]["response"]
    assert done["status"] == "incomplete"
    assert done["status_details"] == {"type": "incomplete", "reason": "max_output_tokens"}
    assert done["max_output_tokens"] == 4


def test_a_failure_is_the_response_s_own(running: Running, engine: ScriptedEngine) -> None:
    engine.fail_at, engine.error = 3, Busy("all rows are taken")
    with talk(running) as c:
        c.manual()
        add_text(c, "x")
        done = answer(c)[-1]["response"]
        assert done["status"] == "failed"
        assert done["status_details"]["error"]["code"] == "server_busy"
        assert done["usage"]["output_tokens"] > 0
        engine.fail_at = None
        assert answer(c)[-1]["response"]["status"] == "completed"


def test_beside_the_conversation(running: Running, engine: ScriptedEngine) -> None:
    with talk(running) as c:
        c.manual(output_modalities=["text"])
        item = add_text(c, "in the conversation")["item"]
        items = [
            {"type": "item_reference", "id": item["id"]},
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "aside"}],
            },
        ]
        events = answer(
            c, conversation="none", input=items, instructions="Judge.", metadata={"topic": "side"}
        )
        assert "conversation.item.added" not in types(events)
        assert events[-1]["response"]["conversation_id"] is None
        answer(c)
    assert engine.asks[0].texts == ["system: Judge.", "user: in the conversation", "user: aside"]
    assert engine.asks[1].texts == ["user: in the conversation"]


def test_answers_beside_the_conversation_leave_its_own_alone(
    running: Running, engine: ScriptedEngine
) -> None:
    with talk(running) as c:
        c.manual(output_modalities=["text"])
        add_text(c, "x")
        go_on = hold(running, engine)
        for _ in range(MAX_OUT_OF_BAND):
            c.send("response.create", response={"conversation": "none"})
            c.until("response.created")
        event_id = c.send("response.create", response={"conversation": "none"})
        error = c.until("error")["error"]
        assert (error["code"], error["event_id"]) == ("rate_limit_exceeded", event_id)
        c.send("response.create")
        assert c.until("response.created")["response"]["conversation_id"] is not None
        go_on()
        for _ in range(MAX_OUT_OF_BAND + 1):
            assert c.until("response.done")["response"]["status"] == "completed"


def test_several_functions_in_one_response(running: Running, engine: ScriptedEngine) -> None:
    call = '<tool_call>\n{"name": "%s", "arguments": {"city": "%s"}}\n</tool_call>'
    text = "Let me look. " + call % ("weather", "Bonn") + "\n" + call % ("time", "Rome")

    def script(ask: Ask) -> Any:
        return say(text, 1.0) if len(ask.messages) == 1 else say("Sunny.", 0.2)

    engine.script = script
    tools = [
        {"type": "function", "name": n, "parameters": {"type": "object"}}
        for n in ("weather", "time")
    ]
    with talk(running) as c:
        c.manual(tools=tools)
        add_text(c, "Weather in Bonn, time in Rome?")
        events = answer(c)
        done = events[-1]["response"]
        assert [o["type"] for o in done["output"]] == ["message", "function_call", "function_call"]
        calls = [e for e in events if e["type"] == "response.function_call_arguments.done"]
        assert [(e["name"], e["arguments"]) for e in calls] == [
            ("weather", '{"city": "Bonn"}'), ("time", '{"city": "Rome"}'),
        ]  # fmt: skip
        for e in calls:
            mine = [
                x
                for x in events
                if x.get("item_id") == e["item_id"] or x.get("item", {}).get("id") == e["item_id"]
            ]
            assert types(mine) == [
                "response.output_item.added", "conversation.item.added",
                "response.function_call_arguments.delta",
                "response.function_call_arguments.done", "conversation.item.done",
                "response.output_item.done",
            ]  # fmt: skip
            assert mine[0]["item"]["name"] == e["name"]
            assert mine[-1]["item"]["status"] == "completed"
        for e in calls:
            output = {"type": "function_call_output", "call_id": e["call_id"], "output": "fine"}
            c.send("conversation.item.create", item=output)
            c.until("conversation.item.done")
        assert answer(c)[-1]["response"]["output"][0]["content"][0]["transcript"] == "Sunny."
    assert engine.asks[0].given["tools"][0]["function"]["name"] == "weather"
    assert engine.asks[1].texts == [
        "user: Weather in Bonn, time in Rome?", "assistant: Let me look.",
        "assistant:  <weather>", "assistant:  <time>", "tool: fine", "tool: fine",
    ]  # fmt: skip


def test_a_call_alone_says_nothing(running: Running, engine: ScriptedEngine) -> None:
    engine.script = lambda ask: say('<tool_call>{"name": "f", "arguments": {}}</tool_call>', 1.0)
    with talk(running) as c:
        c.manual(tools=[{"type": "function", "name": "f"}])
        add_text(c, "Do it")
        events = answer(c)
    assert [o["type"] for o in events[-1]["response"]["output"]] == ["function_call"]
    assert "response.output_audio.delta" not in types(events)


@pytest.mark.parametrize("end_token", [True, False])
def test_nobody_waits_for_the_sound_of_a_call(
    running: Running, engine: ScriptedEngine, end_token: bool
) -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    end = [TextDelta((9,), "")] if end_token else []
    engine.script = lambda ask: [*say(call, 0), *end, *say("", 60.0, 60)[1:]]
    with talk(running) as c:
        c.manual(tools=[{"type": "function", "name": "f"}])
        hold(running, engine, 30)  # for good: most of the sound never comes
        add_text(c, "Do it")
        done = answer(c)[-1]["response"]
    assert (done["status"], [o["type"] for o in done["output"]]) == ("completed", ["function_call"])
    assert not engine.ledger.running


def test_timeline_if_asked_for(running: Running, engine: ScriptedEngine) -> None:
    engine.timeline = (TimelineSpan("first", "prefill", 0.0, 0.5),)
    with talk(running) as c:
        c.manual(timeline=True)
        add_text(c, "x")
        wire = answer(c)[-1]["response"]["stretto"]
    assert wire["timeline"] == [{"lane": "first", "name": "prefill", "start": 0.0, "stop": 0.5}]


def test_an_answer_without_words_or_sound(running: Running, engine: ScriptedEngine) -> None:
    engine.script = lambda ask: [TextDelta((0,), "")]
    with talk(running) as c:
        c.manual()
        add_text(c, "x")
        assert types(answer(c)) == ["response.created", "response.done"]


@pytest.mark.parametrize("path", ["/v1/realtime", "/realtime", "/v1/realtime?model=scripted"])
def test_paths(running: Running, path: str) -> None:
    with talk(running, path) as c:
        created = c.seen[0]["session"]
        assert created["model"] == "scripted"
        assert created["audio"]["input"]["turn_detection"]["type"] == "server_vad"


def test_large_sound_in_one_message(running: Running, engine: ScriptedEngine) -> None:
    with talk(running) as c:
        c.manual()
        too_much = c.send("input_audio_buffer.append", audio=b64(bytes((15 << 20) + 2)))
        error = c.until("error")["error"]
        assert (error["code"], error["param"], error["event_id"]) == (
            "invalid_value",
            "audio",
            too_much,
        )
        c.send("input_audio_buffer.append", audio=b64(bytes(14 << 20)))
        c.send("input_audio_buffer.commit")
        c.until("conversation.item.done")
        answer(c)
    assert engine.asks[0].texts == [f"user: [{(14 << 20) / 48000:.2f} s]"]


def test_metrics(running: Running) -> None:
    with talk(running) as c:
        c.manual()
        speak(c)
        answer(c)
        text = running.ask("/metrics").body.decode()
        assert "stretto_realtime_sessions 1.0" in text
        assert 'stretto_realtime_responses_total{status="completed"} 1.0' in text
        assert "stretto_speech_to_audio_seconds_count 1.0" in text
    running.do(running.server.service.sessions.idle.wait())
    assert "stretto_realtime_sessions 0.0" in running.ask("/metrics").body.decode()


def test_a_call_that_meets_the_limit_is_a_call_that_nobody_runs(
    running: Running, engine: ScriptedEngine
) -> None:
    engine.script = lambda ask: [
        TextDelta((1, 2), '<tool_call>\n{"name": "f", "arguments": {"city": "Ro')
    ]
    with talk(running) as c:
        c.manual(max_output_tokens=1, tools=[{"type": "function", "name": "f"}])
        add_text(c, "go")
        events = answer(c)
    assert "response.function_call_arguments.done" not in types(events)
    done = events[-1]["response"]
    assert (done["status"], done["status_details"]["reason"]) == ("incomplete", "max_output_tokens")
    (item,) = done["output"]
    assert (item["type"], item["status"], item["arguments"]) == (
        "function_call", "incomplete", '{"city": "Ro',
    )  # fmt: skip
