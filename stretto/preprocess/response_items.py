"""The input of OpenAI's Responses API as messages and tools of chats. Pure; called where prompts
are built, with JSON that was decoded there.

An item is a message, a function's call or its output, or a reference to an item of an earlier
answer, which the server knows (`audio_references.py`). Calls that follow each other, and the words
before them, are one message of the assistant's."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from stretto.errors import Invalid
from stretto.preprocess.remote_media import is_remote

_TEXT = ("input_text", "output_text", "text", "summary_text")
_PASSED = ("input_audio", "audio_url", "image_url", "video_url")
_MESSAGE = re.compile(r"messages\[(\d+)\]")


@dataclass(slots=True)
class Translation:
    """Messages, and for each the place of the item in the input that it began with."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, items: Any, instructions: Any, recalled: Mapping[str, str]) -> Translation:
        own = cls()
        if instructions is not None:
            if not isinstance(instructions, str):
                raise Invalid("instructions must be a string", "instructions")
            own.add({"role": "system", "content": instructions}, "instructions")
        if isinstance(items, str):
            own.add({"role": "user", "content": items}, "input")
        elif isinstance(items, list):
            for i, item in enumerate(items):
                own.add_item(item, f"input[{i}]", recalled)
        else:
            raise Invalid("input must be a string or a list of items", "input")
        return own

    def add(self, message: dict[str, Any], place: str) -> None:
        self.messages.append(message)
        self.places.append(place)

    def add_item(self, item: Any, at: str, recalled: Mapping[str, str]) -> None:
        if not isinstance(item, dict):
            raise Invalid(f"{at} must be an object", at)
        match item.get("type", "message"):
            case "message":
                role = item.get("role")
                content = _content(item.get("content"), role, f"{at}.content")
                self.add({"role": role, "content": content}, at)
            case "function_call":
                self._add_call(item, at)
            case "function_call_output":
                output = _output(item.get("output"), f"{at}.output")
                id = item.get("call_id")
                self.add({"role": "tool", "tool_call_id": id, "content": output}, at)
            case "item_reference":
                known = recalled.get(str(item.get("id")))
                if known is None:
                    raise Invalid(
                        f"{at}.id: there is no item {reprlib.repr(item.get('id'))} (any more); "
                        f"send the item itself",
                        f"{at}.id",
                    )
                self.add_item(msgspec.json.decode(known), at, {})
            case "reasoning":
                pass  # of another model: ours hands out none
            case other:
                kinds = "message, function_call, function_call_output, item_reference"
                raise Invalid(
                    f"{at}.type must be one of {kinds}, got {reprlib.repr(other)}", f"{at}.type"
                )

    def _add_call(self, item: Mapping[str, Any], at: str) -> None:
        call = {
            "id": item.get("call_id"),
            "type": "function",
            "function": {"name": item.get("name"), "arguments": item.get("arguments")},
        }
        for name in ("name", "arguments", "call_id"):
            if not isinstance(item.get(name), str):
                raise Invalid(f"{at}.{name} must be a string", f"{at}.{name}")
        last = self.messages[-1] if self.messages else {}
        if last.get("role") == "assistant" and isinstance(last.get("content"), str):
            last.setdefault("tool_calls", []).append(call)
        else:
            self.add({"role": "assistant", "content": "", "tool_calls": [call]}, at)

    def blame(self, error: Invalid) -> Invalid:
        """The same error with the place in the input, where it names a message."""

        def place(match: re.Match[str]) -> str:
            number = int(match[1])
            return self.places[number] if number < len(self.places) else match[0]

        param = error.param and _MESSAGE.sub(place, error.param, count=1)
        return type(error)(_MESSAGE.sub(place, str(error)), param)


def _content(content: Any, role: Any, at: str) -> Any:
    if not isinstance(content, list):
        return content  # the builder says what is wrong with it
    parts = [_part(part, f"{at}[{i}]") for i, part in enumerate(content)]
    if role == "assistant" and all(p.get("type") == "text" for p in parts):
        return "".join(str(p.get("text")) for p in parts)
    return parts


def _part(part: Any, at: str) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise Invalid(f"{at} must be an object", at)
    kind = part.get("type")
    if kind in _TEXT:
        return {"type": "text", "text": part.get("text")}
    if kind == "refusal":
        return {"type": "text", "text": part.get("refusal")}
    if kind == "input_image":
        if part.get("image_url") is None:
            raise Invalid(f"{at}.image_url is missing; files are not stored", f"{at}.image_url")
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    if kind == "input_file":
        return _file(part, at)
    if kind in _PASSED:
        return part
    kinds = ", ".join((*_TEXT[:2], "input_image", "input_file", *_PASSED))
    raise Invalid(f"{at}.type must be one of {kinds}, got {reprlib.repr(kind)}", f"{at}.type")


def _file(part: Mapping[str, Any], at: str) -> dict[str, Any]:
    """Sound, a picture or a video as a data URI, or where to fetch one."""
    url = part.get("file_data") or part.get("file_url")
    if not isinstance(url, str):
        raise Invalid(f"{at}.file_data is missing; files are not stored", f"{at}.file_data")
    if is_remote(url):
        return {"type": "file_url", "file_url": {"url": url}}
    kind = url[:16].lower().removeprefix("data:").partition("/")[0]
    if kind not in ("audio", "image", "video"):
        raise Invalid(
            f"{at}: a file must be a data URI of sound, a picture or a video", f"{at}.file_data"
        )
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def _output(output: Any, at: str) -> Any:
    if not isinstance(output, list):
        return output
    parts = [_part(part, f"{at}[{i}]") for i, part in enumerate(output)]
    if any(p.get("type") != "text" for p in parts):
        raise Invalid(f"{at}: the output of a function is text", at)
    return "".join(str(p.get("text")) for p in parts)


def chat_tools(tools: Any) -> list[Any] | None:
    """Functions in the format of chats."""
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise Invalid("tools must be a list", "tools")
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def _tool(tool: Any, at: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, dict) else tool
        raise Invalid(
            f"{at}: only tools of type function are supported, not {reprlib.repr(kind)}",
            f"{at}.type",
        )
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {n: tool[n] for n in names if n in tool}}
