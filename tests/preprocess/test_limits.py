"""What a request may hold in all: text wherever it stands, structure, parts, media. And tools,
field by field."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import numpy as np
import pytest

from stretto.errors import Invalid, MediaError, TooLong
from stretto.models.qwen3_omni.prompts import PromptBuilder
from stretto.preprocess.media import MediaLimits
from tests.preprocess.samples import (
    b64,
    data_uri,
    image_file,
    picture,
    shifting_video,
    sound_file,
    tone,
)

HI: dict[str, Any] = {"role": "user", "content": "hi"}


def within(builder: PromptBuilder, **limits: Any) -> PromptBuilder:
    return dataclasses.replace(builder, limits=MediaLimits(**limits))


def refused(
    builder: PromptBuilder, messages: Any, tools: Any = None, kind: type[Invalid] = Invalid
) -> Invalid:
    with pytest.raises(kind) as e:
        builder.build(messages, tools)
    assert len(str(e.value)) < 2_000
    return e.value


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


# Text, wherever it stands

LONG = "x" * 50
CALL = {"function": {"name": "f", "arguments": {"a": [LONG]}}}
TEXTS: dict[str, tuple[Any, Any]] = {
    "messages[0].content": ([{"role": "user", "content": LONG}], None),
    "messages[0].content[0].text": (
        [{"role": "user", "content": [{"type": "text", "text": LONG}]}],
        None,
    ),
    "messages[0].name": ([{**HI, "name": LONG}], None),
    "messages[0].tool_call_id": ([{"role": "tool", "content": "x", "tool_call_id": LONG}], None),
    "messages[0].reasoning_content": (
        [{"role": "assistant", "content": "x", "reasoning_content": LONG}],
        None,
    ),
    "messages[0].tool_calls": ([{"role": "assistant", "tool_calls": [CALL]}], None),
    "tools": ([HI], [tool(description=LONG)]),
}


@pytest.mark.parametrize("param", TEXTS)
def test_text_counts(param: str, builder: PromptBuilder) -> None:
    messages, tools = TEXTS[param]
    error = refused(within(builder, text_chars=49), messages, tools, TooLong)
    assert error.param == param
    assert "over 49 characters" in str(error)
    builder.build([HI, *messages], tools)


@pytest.mark.parametrize(
    "parameters",
    [{LONG: 1}, {"a": {LONG: {}}}, {"a": ["b", {"c": LONG}]}, {"a": 10**60}],
    ids=["keys", "inner keys", "values", "digits"],
)
def test_all_of_a_tool_counts(parameters: Any, builder: PromptBuilder) -> None:
    assert (
        refused(within(builder, text_chars=49), [HI], [tool(parameters=parameters)], TooLong).param
        == "tools"
    )


def test_text_adds_up(builder: PromptBuilder) -> None:
    """type, function, function, name, f, description: 36 characters; and the text."""
    tools, messages = [tool(description="d" * 9)], [{**HI, "content": "1234567", "name": "abc"}]
    within(builder, text_chars=55).build(messages, tools)
    assert (
        refused(within(builder, text_chars=54), messages, tools, TooLong).param
        == "messages[0].content"
    )


# Structure without text


@pytest.mark.parametrize("kind", [dict, list, int, lambda: None])
def test_values_are_counted(kind: Any, builder: PromptBuilder) -> None:
    call = {"function": {"name": "f", "arguments": {"a": [kind() for _ in range(100)]}}}
    calls = [{"role": "assistant", "content": "x", "tool_calls": [call]}]
    tools = [tool(parameters={"a": [kind() for _ in range(100)]})]
    assert refused(within(builder, values=104), calls).param == "messages[0].tool_calls"
    assert refused(within(builder, values=101), [HI], tools).param == "tools"
    within(builder, values=105).build(
        calls
    )  # the call, its function, name and arguments, a, and the hundred


def test_a_million_empty_objects(builder: PromptBuilder) -> None:
    """Nothing of them is looked at."""

    class Many(list[Any]):
        def __iter__(self) -> Any:
            pytest.fail("walked through")

    many = Many([{}] * 1_000_000)
    for message in ({"tool_calls": [{"a": many}]}, {"name": many}, {"reasoning_content": many}):
        error = refused(builder, [{"role": "assistant", "content": "x", **message}])
        assert "over 100,000 nested values" in str(error)
    assert "over 100,000 nested values" in str(refused(builder, [HI], many))


def test_depth(builder: PromptBuilder) -> None:
    def deep(levels: int) -> list[Any]:
        inner: Any = 1
        for _ in range(
            levels - 4
        ):  # the list, the tool, its function and the schema are the others
            inner = {"a": inner}
        return [tool(parameters={"a": inner})]

    within(builder, depth=20).build([HI], deep(20))
    error = refused(within(builder, depth=20), [HI], deep(21))
    assert error.param == "tools"
    assert "more than 20 levels" in str(error)
    assert "levels" in str(refused(builder, [{**HI, "name": deep(5_000)}]))


# How many


def test_messages(builder: PromptBuilder) -> None:
    within(builder, messages=3).build([HI] * 3)
    error = refused(within(builder, messages=3), [HI] * 4)
    assert (error.param, "at most 3" in str(error)) == ("messages", True)
    assert refused(builder, [HI] * 4097).param == "messages"


def test_parts_of_all_messages(builder: PromptBuilder) -> None:
    two = {"role": "user", "content": [{"type": "text", "text": "x"}] * 2}
    within(builder, parts=4).build([two, two])
    assert refused(within(builder, parts=3), [two, two]).param == "messages[1].content"
    assert (
        refused(builder, [{"role": "user", "content": [{}] * 4097}]).param == "messages[0].content"
    )


SOUND = {
    "type": "input_audio",
    "input_audio": {"data": b64(sound_file(tone(0.5))), "format": "wav"},
}
IMAGE = {
    "type": "image_url",
    "image_url": {"url": data_uri(image_file(picture(64, 64)), "image/png")},
}
VIDEO = {
    "type": "video_url",
    "video_url": {"url": data_uri(shifting_video((64, 10)), "video/mp2t")},
}


@pytest.mark.parametrize(
    ("part", "limits", "message"),
    [
        (SOUND, {"media": 2}, "at most 2"),
        (SOUND, {"audio_seconds": 1.2}, "over 1.2 s in the request"),
        (SOUND, {"audio_values": 20_000}, "over 20,000 sample values in the request"),
        (IMAGE, {"decode_seconds": 2.5 * 64 * 64 * 60e-9}, "all of this request's"),
        (
            VIDEO,
            {"decode_seconds": 2.5 * 64 * 64 * (6 * 1.5 * 1.25e-9 + 2 * 9e-9)},
            "all of this request's",
        ),
        (VIDEO, {"video_input_frames": 25}, "over 25 in the request"),
    ],
)
def test_media_are_bounded_in_all(
    part: Any, limits: Any, message: str, builder: PromptBuilder
) -> None:
    """Two pass and the third does not, in whatever messages they stand."""
    two = [{"role": "user", "content": [part]}, {"role": "user", "content": [part]}]
    within(builder, **limits).build(two)
    error = refused(
        within(builder, **limits), [*two, {"role": "user", "content": [part]}], kind=MediaError
    )
    assert error.param == "messages[2].content[0]"
    assert message in str(error)


def test_media_of_a_refused_request_go_with_it(builder: PromptBuilder) -> None:
    """Not when the interpreter looks for circles, before which many more may come."""
    gc.collect()
    gc.disable()
    try:
        sound = np.zeros(16_000, np.float32)
        held = weakref.ref(sound)
        part = {"type": "audio", "data": sound, "sample_rate": 16_000}
        try:
            within(builder, media=2).build([{"role": "user", "content": [part] * 3}])
        except MediaError as e:  # `pytest.raises` makes a circle of its own
            words = str(e)
        del sound, part
        assert "at most 2" in words
        assert held() is None
    finally:
        gc.enable()


def test_a_request_knows_nothing_of_others(builder: PromptBuilder) -> None:
    small = within(builder, media=1, audio_seconds=0.6)
    for _ in range(3):
        small.build([{"role": "user", "content": [SOUND]}])


def test_base64_is_strict(builder: PromptBuilder) -> None:
    data = b64(sound_file(np.zeros(16_000, np.float32)))
    for bad in (
        data[:100] + "\n" + data[100:],
        data.replace("A", "-", 1),
        data + "=",
        data + "AAAA=",
    ):
        part = {"type": "input_audio", "input_audio": {"data": bad}}
        error = refused(builder, [{"role": "user", "content": [part]}])
        assert error.param == "messages[0].content[0].input_audio.data"


# Tools, field by field

BAD_TOOLS: list[tuple[Any, str, str]] = [
    ({}, "tools", "Expected array | null, got object"),
    ("x", "tools", "Expected array | null, got str"),
    (["x"], "tools[0]", "Expected object, got str"),
    ([{}], "tools[0].type", "missing required field type"),
    ([{"type": "function"}], "tools[0].function", "missing required field function"),
    ([{"type": "code", "function": {"name": "f"}}], "tools[0].type", "Invalid enum value 'code'"),
    ([{"type": "function", "function": "f"}], "tools[0].function", "Expected object, got str"),
    (
        [{"type": "function", "function": {}}],
        "tools[0].function.name",
        "missing required field name",
    ),
    ([tool(), tool(name="a b")], "tools[1].function.name", "Expected str matching regex"),
    ([tool(name="x" * 129)], "tools[0].function.name", "Expected str matching regex"),
    ([tool(name="")], "tools[0].function.name", "Expected str matching regex"),
    ([tool(name=5)], "tools[0].function.name", "Expected str, got int"),
    ([tool(description=5)], "tools[0].function.description", "Expected str | null, got int"),
    ([tool(parameters=[])], "tools[0].function.parameters", "Expected object | null, got array"),
    ([tool(strict="yes")], "tools[0].function.strict", "Expected bool | null, got str"),
    ([tool(colour="red")], "tools[0].function.colour", "unknown field 'colour'"),
    ([{**tool(), "colour": "red"}], "tools[0].colour", "unknown field 'colour'"),
    ([tool()] * 257, "tools", "Expected array of length <= 256"),
]


@pytest.mark.parametrize(
    ("tools", "param", "message"), BAD_TOOLS, ids=[f"{p} {m}" for _, p, m in BAD_TOOLS]
)
def test_bad_tools(tools: Any, param: str, message: str, builder: PromptBuilder) -> None:
    error = refused(builder, [HI], tools)
    assert error.param == param
    assert str(error).startswith(f"{param}: {message}")


def test_good_tools(builder: PromptBuilder) -> None:
    full = tool(
        description="d",
        parameters={"type": "object", "properties": {"a": {"type": "string"}}},
        strict=True,
    )
    assert builder.build([HI], [full] * 2).ids == builder.build([HI], (full, full)).ids
    bare = builder.build([HI], [tool()]).ids
    assert builder.build([HI], [tool(description=None, parameters=None, strict=None)]).ids == bare
    assert (
        builder.build([HI], []).ids
        == builder.build([HI], None).ids
        == builder.build([HI]).ids
        != bare
    )
    assert within(builder, values=10_000).build([HI], [tool()] * 256).ids


def test_tools_that_no_json_has(builder: PromptBuilder) -> None:
    assert refused(builder, [HI], [tool(parameters={"a": object()})]).param == "tools"


def test_names_in_errors_are_short(builder: PromptBuilder) -> None:
    huge = "x" * 900_000
    refused(builder, [HI], [tool(**{huge: 1})])
    refused(builder, [{"role": huge, "content": "x"}])
    refused(builder, [{"role": "user", "content": [{"type": huge}]}])
    refused(builder, [{"role": [[huge] * 9] * 9, "content": "x"}])
