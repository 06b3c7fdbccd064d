"""Finds function calls in an answer while it is being written: <tool_call>{"name": ...,
"arguments": {...}}</tool_call>. Chat, responses and realtime sessions make one `ToolParser` for
each answer.

The parser is fed with the text as it comes. It holds back text that may be the beginning of a call;
if that turns out not to be one, it is plain text again, letter for letter. A call that the limit of
tokens has cut is still a call, with the arguments that there are."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_BEGUN = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*(?:,\s*"arguments"\s*:\s*(.*))?', re.S
)
"""A call that may have been cut anywhere behind the function's name."""


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: str  # JSON; the beginning of it, where the call is not complete
    complete: bool = True


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
                self._add_text(before, out)
            elif (call := parse_call(before)) is not None:
                self._gap = ""
                self.num_calls += 1
                out.append(call)
            else:
                self._add_text(OPEN + before + CLOSE, out)
            self.inside = not self.inside
        if not self.inside:
            wait = len_possible_mark(self._text)
            self._add_text(self._text[: len(self._text) - wait], out)
            self._text = self._text[len(self._text) - wait :]
        return out

    def finish(self, cut: bool = False) -> list[str | Call]:
        """The answer is over: a call that lacks only its closing mark counts, anything else is
        text. `cut`: at a limit; then what has begun as a call is never text."""
        out: list[str | Call] = []
        call = parse_call(self._text) if self.inside else None
        if call is None and cut and self.inside:
            call = parse_begun(self._text)
        if call is not None:
            self.num_calls += 1
            out.append(call)
        elif not cut or not (self.inside or self._text.startswith(OPEN[:2])):
            self._add_text((OPEN if self.inside else "") + self._text, out)
            if self._gap and not self.num_calls:
                out.append(self._gap)
        self._text = ""
        self._gap = ""
        self.inside = False
        return out

    def _add_text(self, text: str, out: list[str | Call]) -> None:
        whole = self._gap + text
        words = whole.rstrip()
        self._gap = whole[len(words) :]
        if words:
            out.append(words)


def len_possible_mark(text: str) -> int:
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


def parse_begun(text: str) -> Call | None:
    """The call of a function that is named already."""
    match = _BEGUN.match(text)
    if match is None:
        return None
    try:
        name = json.loads(match[1])
    except ValueError:
        return None
    return Call(name, match[2] or "", complete=False)
