"""Finds calls of functions in an answer as it is written: <tool_call>{"name": ..., "arguments":
{...}}</tool_call>.

One parser per answer, fed with the text as it comes. What cannot be told apart from the beginning
of a call waits; what turns out not to be one is plain text again, letter for letter."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: str  # JSON


@dataclass(slots=True)
class ToolParser:
    num_calls: int = 0
    inside: bool = False  # a call has begun and not ended
    _text: str = ""
    _gap: str = field(default="")  # white space that may only separate two calls

    def feed(self, text: str) -> list[str | Call]:
        """What is certain now, in order."""
        self._text += text
        out: list[str | Call] = []
        while True:
            mark = CLOSE if self.inside else OPEN
            before, found, after = self._text.partition(mark)
            if not found:
                break
            self._text = after
            if not self.inside:
                self._say(before, out)
            elif (call := parse_call(before)) is not None:
                self._gap = ""
                self.num_calls += 1
                out.append(call)
            else:
                self._say(OPEN + before + CLOSE, out)
            self.inside = not self.inside
        if not self.inside:
            wait = held(self._text)
            self._say(self._text[: len(self._text) - wait], out)
            self._text = self._text[len(self._text) - wait :]
        return out

    def finish(self) -> list[str | Call]:
        """The answer is over: a call that lacks only its closing mark counts, anything else is
        text."""
        out: list[str | Call] = []
        if self.inside and (call := parse_call(self._text)) is not None:
            self.num_calls += 1
            out.append(call)
        else:
            self._say((OPEN if self.inside else "") + self._text, out)
            if self._gap and not self.num_calls:
                out.append(self._gap)
        self._text = ""
        self._gap = ""
        self.inside = False
        return out

    def _say(self, text: str, out: list[str | Call]) -> None:
        whole = self._gap + text
        words = whole.rstrip()
        self._gap = whole[len(words) :]
        if words:
            out.append(words)


def held(text: str) -> int:
    """How many of the last characters may begin a call."""
    return next(
        (n for n in range(min(len(OPEN) - 1, len(text)), 0, -1) if text.endswith(OPEN[:n])), 0
    )


def parse_call(text: str) -> Call | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):  # some models write the arguments as JSON within JSON
        return Call(value["name"], arguments)
    if not isinstance(arguments, dict):
        return None
    return Call(value["name"], json.dumps(arguments, ensure_ascii=False))
