"""What attackers send: bytes, made beforehand."""

from __future__ import annotations

import base64
import io
import json
import random
import struct
from collections.abc import Iterable
from typing import Any

MIB = 1 << 20
BOUNDARY = "----------------------------stretto"
FORM = f"multipart/form-data; boundary={BOUNDARY}"


def chat(content: Any = "hi", **more: Any) -> bytes:
    return json.dumps(
        {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **more}
    ).encode()


def letters(count: int, seed: int = 0) -> str:
    return "".join(random.Random(seed).choices("etaoin shrdlu", k=count))


def schema(shape: dict[str, Any], **more: Any) -> bytes:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": shape}}
    return chat(response_format=form, **more)


def multiple_of(number: int) -> bytes:
    return schema({"type": "integer", "multipleOf": number})


def bounded_integers(count: int, seed: int) -> bytes:
    rng = random.Random(seed)
    fields = {
        f"p{i}": {
            "type": "integer",
            "minimum": rng.randrange(1000),
            "maximum": rng.randrange(10**6, 10**9),
        }
        for i in range(count)
    }
    return schema(
        {
            "type": "object",
            "properties": fields,
            "required": list(fields),
            "additionalProperties": False,
        }
    )


def properties(count: int, seed: int) -> bytes:
    """None is required, so that any subset in order may come."""
    fields: dict[str, Any] = {f"s{seed}p{i}": {"type": "null"} for i in range(count)}
    return schema(
        {"type": "object", "properties": fields, "additionalProperties": False}, max_tokens=16
    )


def filled(size: int, item: str) -> str:
    """A JSON object of nearly `size` bytes, with as many members as fit."""
    count = (size - 2) // (len(item) + 12)
    return "{" + ",".join(f'"k{i:07}":{item}' for i in range(count)) + "}"


def template_kwargs(size: int) -> bytes:
    return chat()[:-1] + b',"chat_template_kwargs":' + filled(size - 200, "1").encode() + b"}"


def large_schema(size: int) -> bytes:
    head = b',"response_format":{"type":"json_schema","json_schema":{"name":"x","schema":{"type":"object","properties":'  # noqa: E501
    return chat()[:-1] + head + filled(size - 400, "{}").encode() + b"}}}}"


def required_call(size: int) -> bytes:
    head = b',"tool_choice":"required","tools":[{"type":"function","function":{"name":"f","parameters":'  # noqa: E501
    shape = b'{"type":"object","properties":' + filled(size - 500, "{}").encode() + b"}"
    return chat()[:-1] + head + shape + b"}}]}"


def logit_bias(size: int) -> bytes:
    return chat()[:-1] + b',"logit_bias":' + filled(size - 200, "1").encode() + b"}"


def session_tools(size: int) -> bytes:
    """A `session.update`."""
    tools = [
        {
            "type": "function",
            "name": f"f{i}",
            "description": "d",
            "parameters": json.loads(filled(size // 64 - 200, "1")),
        }
        for i in range(64)
    ]
    return json.dumps(
        {"type": "session.update", "session": {"type": "realtime", "tools": tools}}
    ).encode()


def item(*content: dict[str, Any], role: str = "user") -> bytes:
    message = {"type": "message", "role": role, "content": list(content)}
    return json.dumps({"type": "conversation.item.create", "item": message}).encode()


def pcm(seconds: float, rate: int = 24_000) -> str:
    """A tone in base64."""
    samples = (i * 997 % 8000 - 4000 for i in range(int(seconds * rate)))
    return base64.b64encode(struct.pack(f"<{int(seconds * rate)}h", *samples)).decode()


def wav(seconds: float, rate: int = 16_000) -> bytes:
    data = base64.b64decode(pcm(seconds, rate))
    form = struct.pack("<HHIIHH", 1, 1, rate, 2 * rate, 2, 16)
    head = b"RIFF" + struct.pack("<I", 36 + len(data)) + b"WAVEfmt " + struct.pack("<I", 16) + form
    return head + b"data" + struct.pack("<I", len(data)) + data


def form(file: bytes, fields: Iterable[tuple[str, str]] = (), name: str = "file") -> bytes:
    parts = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{n}"\r\n\r\n{v}\r\n'.encode()
        for n, v in fields
    ]
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"; filename="a.wav"\r\n\r\n'.encode()  # noqa: E501
    return b"".join((*parts, head, file, f"\r\n--{BOUNDARY}--\r\n".encode()))


def progressive_jpeg(side: int, scans: int) -> str:
    """A grey picture of one colour in which a scan without content is repeated: some hundred bytes
    each, for which a decoder visits all blocks. In base64."""
    from PIL import Image

    out = io.BytesIO()
    Image.new("L", (side, side), 128).save(out, "JPEG", progressive=True, quality=50)
    data = out.getvalue()
    starts = [i for i in range(len(data) - 1) if data[i : i + 2] == b"\xff\xda"]
    last, end = starts[-1], len(data) - 2
    assert data[end:] == b"\xff\xd9"
    return base64.b64encode(data[:end] + data[last:end] * scans + data[end:]).decode()


def picture(data: str, kind: str = "jpeg") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{data}"}}


def sound(data: str, kind: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": data, "format": kind}}
