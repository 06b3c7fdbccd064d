"""Calls of tools, found in the text of an answer."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.server.openai.tools import Call, ToolParser

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": [1, "}"]}}\n</tool_call>'


def parse(pieces: list[str]) -> tuple[str, list[Call]]:
    parser, out = ToolParser(), []
    for p in pieces:
        out += parser.feed(p)
    out += parser.finish()
    return "".join(o for o in out if isinstance(o, str)), [o for o in out if isinstance(o, Call)]


@given(
    st.lists(st.integers(1, len(CALL)), max_size=20),
    st.sampled_from(["", "Hi! ", "a < b <tool", " \n"]),
)
def test_calls_are_found_however_the_text_is_cut(cuts: list[int], before: str) -> None:
    text, at, pieces = f"{before}{CALL}\n{CALL}", 0, []
    for n in cuts:
        pieces.append(text[at : at + n])
        at += n
    said, calls = parse([*pieces, text[at:]])
    assert said == before.rstrip()
    assert [(c.name, json.loads(c.arguments)) for c in calls] == [("f", {"x": [1, "}"]})] * 2


@pytest.mark.parametrize(
    "text",
    [
        "plain words\n",
        "a < b",
        "<tool_call>not json</tool_call>",
        "<tool_call>{}</tool_call> after",
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "f", "arguments": 7}</tool_call>',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        "<tool_call>{",
        "<tool_call",
        "  ",
        "",
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    for pieces in ([text], [*text[:300], text[300:]]):
        assert parse(pieces) == (text, [])


def test_an_unclosed_call_counts() -> None:
    assert parse(['<tool_call>{"name": "f"}']) == ("", [Call("f", "{}")])
    assert parse(['<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}']) == (
        "",
        [Call("f", '{"a": 1}')],
    )


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"city": "Ro', "", [("f", '{"city": "Ro')]),
        ('Hi! <tool_call>{"name": "f", "argu', "Hi!", [("f", "")]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"na', "", []),
        ("Hi! <tool_ca", "Hi!", []),
        ("a <", "a <", []),
        ("plain words\n", "plain words\n", []),
    ],
)
def test_a_call_that_is_cut_is_a_call(text: str, said: str, calls: list[tuple[str, str]]) -> None:
    for pieces in ([text], list(text)):
        parser, out = ToolParser(), []
        for p in pieces:
            out += parser.feed(p)
        out += parser.finish(cut=True)
        assert "".join(o for o in out if isinstance(o, str)) == said
        assert [o for o in out if isinstance(o, Call)] == [Call(*c, complete=False) for c in calls]
        assert parser.num_calls == len(calls)
