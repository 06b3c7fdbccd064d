"""/v1/responses by OpenAI's own client: text, functions, JSON, media, streams, errors. With a
scripted engine, and with the tiny model where the grammar or the prompt counts."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from PIL import Image
from pydantic import TypeAdapter

from stretto.server.http.body import ON_THE_LOOP
from stretto.server.openai import responses
from stretto.server.openai.chat_params import MAX_SCHEMA
from stretto.server.openai.grammar import LONG
from tests.server.conftest import Running, serve
from tests.server.scripted_engine import ScriptedEngine

PATH = "/v1/responses"
SCHEMA = {
    "type": "object",
    "properties": {"mood": {"enum": ["calm", "glad"]}},
    "required": ["mood"],
}
TOOL = {"type": "function", "name": "get_time", "description": "The time", "parameters": SCHEMA}
CALL = '<tool_call>\n{"name": "get_time", "arguments": {"mood": "calm"}}\n</tool_call>'
strict: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def running(engine: ScriptedEngine) -> Iterator[Running]:
    with serve(engine, drain_timeout=1.0, api_key=("one", "two")) as it:
        yield it


def client(running: Running, key: str = "one") -> openai.OpenAI:
    return running.client(api_key=key)


def create(running: Running, **fields: Any) -> Any:
    return client(running).responses.create(**{"model": "default", "input": "Hello", **fields})


def streamed(running: Running, **fields: Any) -> list[Any]:
    events = list(create(running, stream=True, **fields))
    for event in events:
        strict.validate_python(event.to_dict())  # with every field that strict clients need
    assert [e.sequence_number for e in events] == list(range(len(events)))
    return events


def test_a_response(running: Running, engine: ScriptedEngine) -> None:
    answer = create(running, instructions="Be brief.", max_output_tokens=50, metadata={"a": "b"})
    assert answer.output_text == "Hello there."
    assert (answer.status, answer.model, answer.metadata) == ("completed", "scripted", {"a": "b"})
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (7, 3)
    assert answer.instructions == "Be brief."
    (call,) = engine.calls
    assert call["messages"] == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"},
    ]  # fmt: skip
    assert call["modalities"] == ("text",)
    assert call["params"].max_text_tokens == 50


def test_a_stream(running: Running) -> None:
    events = streamed(running)
    assert [e.type for e in events] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added", *["response.output_text.delta"] * 3,
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        "response.completed",
    ]  # fmt: skip
    assert "".join(e.delta for e in events if e.type.endswith("text.delta")) == "Hello there."
    assert events[-1].response.output_text == "Hello there."
    with client(running).responses.stream(model="default", input="Hello") as stream:
        assert stream.get_final_response().output_text == "Hello there."


def test_functions_and_their_items_by_reference(running: Running, engine: ScriptedEngine) -> None:
    engine.pieces = ("Let me see. ", CALL)
    events = streamed(running, tools=[TOOL])
    words, call = events[-1].response.output
    assert (words.type, words.content[0].text) == ("message", "Let me see.")
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call", "get_time", {"mood": "calm"},
    )  # fmt: skip
    assert [e.type for e in events if e.type.startswith("response.function_call")] == [
        "response.function_call_arguments.delta", "response.function_call_arguments.done",
    ]  # fmt: skip
    (chat_tool,) = engine.calls[0]["tools"]
    assert chat_tool["function"]["name"] == "get_time"

    output = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    inline = [{"role": "user", "content": "Hello"}, words.to_dict(), call.to_dict(), output]
    by_reference = [
        {"role": "user", "content": "Hello"},
        *({"type": "item_reference", "id": item.id} for item in (words, call)),
        output,
    ]
    for items in (inline, by_reference):
        create(running, input=items, tools=[TOOL])
        said = {"id": call.call_id, "type": "function",
                "function": {"name": "get_time", "arguments": '{"mood": "calm"}'}}  # fmt: skip
        assert engine.calls[-1]["messages"] == [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Let me see.", "tool_calls": [said]},
            {"role": "tool", "tool_call_id": call.call_id, "content": "noon"},
        ]
    with pytest.raises(openai.BadRequestError, match="there is no item"):
        client(running, "two").responses.create(model="default", input=by_reference)  # type: ignore[arg-type]


def test_items_of_a_response_that_is_not_stored_cannot_be_referred_to(running: Running) -> None:
    answer = create(running, store=False)
    with pytest.raises(openai.BadRequestError, match="there is no item"):
        create(running, input=[{"type": "item_reference", "id": answer.output[0].id}])


def test_a_call_that_meets_the_limit_is_incomplete(
    running: Running, engine: ScriptedEngine
) -> None:
    engine.pieces = ('<tool_call>\n{"name": "get_time", "arguments": {"mo',)
    engine.end = "length"
    answer = create(running, tools=[TOOL])
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    (call,) = answer.output
    assert (call.type, call.status, call.arguments) == ("function_call", "incomplete", '{"mo')


@pytest.mark.parametrize("pad", [0, 300_000])
def test_media_and_large_bodies(real_server: Running, pad: int) -> None:
    """Read where prompts are built, whichever way the body came."""
    picture = io.BytesIO()
    Image.new("RGB", (64, 64)).save(picture, "PNG")
    url = "data:image/png;base64," + base64.b64encode(picture.getvalue()).decode()
    sound = base64.b64encode(bytes(16_000)).decode()
    parts = [
        {"type": "input_text", "text": "What is this?"},
        {"type": "input_image", "image_url": url, "detail": "auto"},
        {"type": "input_audio", "input_audio": {"data": sound, "format": "pcm16"}},
    ]
    body = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 3,
            "instructions": "Be brief."}  # fmt: skip
    reply = real_server.ask(PATH, json.dumps(body).encode() + b" " * pad)
    assert reply.status == 200, reply.body
    media = reply.json["usage"]["input_tokens"]
    words = real_server.ask(PATH, {**body, "input": "What is this?"}).json["usage"]["input_tokens"]
    assert media > words + 5
    bad = {**body, "input": [{"role": "user", "content": [{"type": "input_image",
           "image_url": "data:image/png;base64,AAAA"}]}]}  # fmt: skip
    error = real_server.ask(PATH, json.dumps(bad).encode() + b" " * pad).error
    assert error["param"].startswith("input[0].content[0]")


def test_json_and_required_calls(real_server: Running) -> None:
    shape = {"format": {"type": "json_schema", "name": "mood", "schema": SCHEMA, "strict": True}}
    made = real_server.client().responses
    fields: dict[str, Any] = {"model": "default", "input": "Hello", "max_output_tokens": 200,
                              "extra_body": {"seed": 3}}  # fmt: skip
    answer = made.create(**fields, text=shape)
    assert json.loads(answer.output_text)["mood"] in ("calm", "glad")
    other = {**TOOL, "name": "get_mood"}
    for choice in ({"type": "function", "name": "get_time"},
                   {"type": "allowed_tools", "mode": "required",
                    "tools": [{"type": "function", "name": "get_time"}]}):  # fmt: skip
        answer = made.create(
            **fields, tools=[TOOL, other], tool_choice=choice, parallel_tool_calls=False
        )
        assert [item.name for item in answer.output] == ["get_time"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["weather"]}, "include"),
        ({"input": None}, "input"),
        ({"input": 7}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
         "input[0].content[0].file_data"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "c",
                     "output": [{"type": "input_image", "image_url": "data:image/png,"}]}]},
         "input[0].output"),
        ({"input": [{"role": "nobody", "content": "hi"}]}, "input[0].role"),
        ({"instructions": ["a"]}, "instructions"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": [1]}}},
         "text.format.schema"),
        ({"text": {"format": {"type": "json_object"}}, "tools": [TOOL],
          "tool_choice": "required"}, "text.format"),
        ({"voice": "ethan"}, "voice"),
    ],
)  # fmt: skip
def test_what_is_refused(real_server: Running, fields: dict[str, Any], param: str) -> None:
    reply = real_server.ask(PATH, {"input": "Hello", "max_output_tokens": 3, **fields})
    assert reply.status == 400, reply.body
    assert reply.error["param"] == param


def test_a_model_that_only_reads_aloud_answers_nothing() -> None:
    with serve(ScriptedEngine(card={"output_modalities": ("audio",)})) as it:
        reply = it.ask(PATH, {"input": "Hello"})
        assert (reply.status, reply.error["param"]) == (400, "model")


LONG_TEXT = "x" * MAX_SCHEMA
LONG_TOOL = {**TOOL, "parameters": {**SCHEMA, "title": LONG_TEXT}}


@pytest.mark.parametrize("pad", [0, ON_THE_LOOP])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template_kwargs": {"a": "x" * (16 << 10)}}, "chat_template_kwargs"),
        ({"tool_choice": {"type": "function", "name": "x" * (64 << 10)}}, "tool_choice"),
        ({"metadata": {"a": "x" * (64 << 10)}}, "metadata"),
        ({"text": {"verbosity": "x" * (MAX_SCHEMA + (16 << 10))}}, "text"),
        ({"text": {"format": {"type": "json_schema", "schema": {"title": LONG_TEXT}}}},
         "text.format.schema"),
        ({"tools": [LONG_TOOL], "tool_choice": "required"}, "tools"),
    ],
)  # fmt: skip
def test_what_is_too_long_is_refused(
    fields: dict[str, Any], param: str, pad: int, running: Running, engine: ScriptedEngine
) -> None:
    body = json.dumps({"input": "Hello", **fields}).encode() + b" " * pad
    headers = {"Authorization": "Bearer one", "Content-Type": "application/json"}
    reply = running.ask(PATH, body, headers=headers)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert "more than the" in reply.error["message"]
    assert not engine.calls


def test_long_tools_are_not_told_again(running: Running) -> None:
    tools = [{**TOOL, "description": "x" * size} for size in (8 << 10, 8 << 10)]
    assert create(running, tools=tools).tools == []
    assert len(create(running, tools=tools[:1]).tools) == 1


def test_long_schemas_are_read_in_a_thread(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_loop: list[bool] = []

    def grammar_of(*_: Any) -> str:
        on_loop.append(threading.current_thread() is running.thread)
        return ""

    monkeypatch.setattr(responses, "grammar_of", grammar_of)
    for size in (LONG // 2, LONG):
        schema = {"type": "object", "title": "x" * size}
        create(running, text={"format": {"type": "json_schema", "name": "a", "schema": schema}})
        tool = {**TOOL, "parameters": schema}
        create(running, tools=[tool], tool_choice="required")
    assert on_loop == [True, True, False, False]


def test_log_probabilities(real_server: Running) -> None:
    answer = real_server.client().responses.create(
        model="default", input="Hello", max_output_tokens=4, top_logprobs=2,
        include=["message.output_text.logprobs"],
    )  # fmt: skip
    part: Any = answer.output[0].content[0]  # type: ignore[union-attr]
    assert len(part.logprobs) >= 3
    assert all(len(p.top_logprobs) == 2 and p.logprob <= 0 for p in part.logprobs)
