"""Messages of clients: what is an event, and what is said about what is not."""

import base64
import json
from typing import Any

import numpy as np
import pytest

from stretto.server.realtime.client_events import LARGE, Append, EventError, ResponseCreate, decode
from stretto.server.realtime.item_reader import read_item


def refusal(data: bytes) -> tuple[str, str | None, str | None]:
    with pytest.raises(EventError) as e:
        decode(data)
    return e.value.code, e.value.param, e.value.event_id


def event(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def test_half_a_surrogate_pair_is_replaced() -> None:
    cut = decode(b'{"type": "response.create", "response": {"instructions": "cut \\ud83d"}}')
    assert isinstance(cut, ResponseCreate)
    assert cut == decode(event(type="response.create", response={"instructions": "cut \ufffd"}))


def test_refusals() -> None:
    assert refusal(b"{") == ("invalid_json", None, None)
    assert refusal(b"\xff") == ("invalid_json", None, None)
    assert refusal(b'{"type": "session.update", "session": ' + b'{"tools":' * 5000)[0] in (
        "invalid_json",
        "invalid_value",
    )
    assert refusal(b"[]") == ("invalid_event", None, None)
    assert refusal(b"3") == ("invalid_event", None, None)
    assert refusal(b'{"event_id": "e"}') == ("invalid_event", "type", "e")
    assert refusal(b'{"type": 7, "event_id": "e"}') == ("invalid_event", "type", "e")
    assert refusal(b'{"type": "nope", "event_id": "e"}') == ("invalid_event", "type", "e")
    assert refusal(event(type="input_audio_buffer.append", event_id="e")) == (
        "invalid_value",
        "audio",
        "e",
    )
    assert refusal(event(type="input_audio_buffer.append", audio="A")) == (
        "invalid_value",
        "audio",
        None,
    )
    assert refusal(event(type="conversation.item.create", item={"type": "poem"}, event_id="e")) == (
        "invalid_value", "item.type", "e",
    )  # fmt: skip
    assert refusal(event(type="nope", event_id="e" * 600)) == ("invalid_event", "type", None)


def test_unknown_fields_are_ignored() -> None:
    got = decode(
        event(type="response.create", novelty=1, response={"instructions": None, "speed": 2})
    )
    assert isinstance(got, ResponseCreate)


@pytest.mark.parametrize("size", [3, LARGE, 3 * LARGE + 1, 3 * LARGE + 2])
def test_sound_of_any_size(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
    got = decode(
        event(type="input_audio_buffer.append", audio=base64.b64encode(data).decode(), event_id="e")
    )
    assert isinstance(got, Append)
    assert (got.audio, got.event_id) == (data, "e")
    other = (
        b'{"audio" : "%s", "event_id":"e",\n"type":"input_audio_buffer.append"}'
        % base64.b64encode(data)
    )
    assert decode(other) == got


def test_large_messages_that_are_something_else() -> None:
    text = "A" * LARGE
    assert refusal(event(type="nope", audio=text)) == ("invalid_event", "type", None)
    assert refusal(event(type="input_audio_buffer.append", audio=text + "\n")) == (
        "invalid_value",
        "audio",
        None,
    )
    assert refusal(event(type="input_audio_buffer.append", audio=text[:-1])) == (
        "invalid_value",
        "audio",
        None,
    )
    assert refusal(event(type="input_audio_buffer.append", audio=text)[:-1]) == (
        "invalid_json",
        None,
        None,
    )
    escaped = event(type="input_audio_buffer.append", audio="//8A" * (LARGE // 4)).replace(
        b"/", b"\\/"
    )
    assert isinstance(decode(escaped), Append)


def test_items_say_what_they_mean_to_the_model() -> None:
    def read(**item: Any) -> tuple[Any, Any]:
        got = decode(event(type="conversation.item.create", item=item))
        entry, message = read_item(got.item, "audio/pcm")  # type: ignore[union-attr]
        return entry.item, message

    item, message = read(
        type="message", role="user", content=[{"type": "input_text", "text": "Hi"}], id="mine"
    )
    assert (item.id, item.status, message) == (
        "mine",
        "completed",
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    )
    sound = base64.b64encode(bytes(4800)).decode()
    _, message = read(
        type="message", role="user", content=[{"type": "input_audio", "audio": sound}]
    )
    assert len(message["content"][0]["data"]) == 1600
    url = "data:image/png;base64," + "A" * 100_000
    item, message = read(
        type="message", role="user", content=[{"type": "input_image", "image_url": url}]
    )
    assert message["content"] == [{"type": "image_url", "image_url": {"url": url}}]
    assert not item.content[0].image_url  # too long to be told again
    item, message = read(
        type="message", role="assistant", content=[{"type": "output_audio", "transcript": "Yes"}]
    )
    assert message == {"role": "assistant", "content": "Yes"}
    _, message = read(type="function_call", name="f", call_id="c", arguments='{"a": 1}')
    assert message["tool_calls"] == [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    ]
    _, message = read(type="function_call_output", call_id="c", output="42")
    assert message == {"role": "tool", "tool_call_id": "c", "content": "42"}
    assert (
        read(type="message", role="user", content=[{"type": "input_text", "text": ""}])[1] is None
    )
