"""The page at /docs: the API's description as HTML, made of the document that `/openapi.json`
sends. It needs no script and nothing of another host; its style is `web/docs.css`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

REFERENCE = "#/components/schemas/"
TITLE = "Stretto API"
GUIDES = "https://github.com/stretto-engine/stretto/blob/main/docs"
CHAT = '{"model": "default", "messages": [{"role": "user", "content": "Hello!"}]}'
SPEECH = '{"input": "Hello!", "response_format": "wav"}'
EXAMPLES = {
    "/v1/chat/completions": f"-H 'Content-Type: application/json' -d '{CHAT}'",
    "/v1/audio/speech": f"-H 'Content-Type: application/json' -d '{SPEECH}' -o hello.wav",
    "/v1/audio/transcriptions": "-F file=@hello.wav",
    "/v1/models": "",
    "/health": "",
}
"""What comes after the address in a command that tries a route."""
SOCKETS = {
    "/v1/realtime": ("Voice conversations, with OpenAI's events", "realtime.md"),
    "/v1/audio/speech/stream": (
        "Speech of a text that is still being written",
        "server.md#speech-while-the-text-is-written",
    ),
}
"""WebSockets, which OpenAPI cannot describe, and their guides."""
BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "maxProperties": "at most {} names",
}


def render(document: Mapping[str, Any]) -> str:
    routes = [
        (method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    parts = [
        *_head(document["info"]["version"]),
        *_contents(routes),
        *(part for route in routes for part in _route(*route)),
        *_sockets(),
        "<h2 id=schemas>Schemas</h2>",
        *(part for item in document["components"]["schemas"].items() for part in _schema(*item)),
        "</main></html>",
    ]
    return "\n".join(parts)


def _head(version: str) -> Iterator[str]:
    yield "<!doctype html><html lang=en><meta charset=utf-8>"
    yield "<meta name=viewport content='width=device-width, initial-scale=1'>"
    yield f"<title>{TITLE}</title><link rel=stylesheet href=docs.css><main>"
    yield f"<h1>{TITLE} <small>{escape(version)}</small></h1>"
    yield (
        "<p>OpenAI's clients work unchanged with <code>/v1</code> as their base URL. Where the "
        "server has API keys, send one as <code>Authorization: Bearer KEY</code>. For programs: "
        f"<a href=openapi.json>openapi.json</a>. Explanations: <a href={GUIDES}/server.md>HTTP "
        f"API</a>, <a href={GUIDES}/realtime.md>realtime</a>.</p>"
    )


def _contents(routes: list[tuple[str, str, Mapping[str, Any]]]) -> Iterator[str]:
    yield "<nav><ul>"
    for method, path, operation in routes:
        yield (
            f"<li><a href='#{_anchor(method, path)}'><b>{method.upper()}</b> "
            f"<code>{escape(path)}</code></a> {escape(operation['summary'])}</li>"
        )
    for path, (about, _) in SOCKETS.items():
        yield f"<li><a href='#sockets'><b>WS</b> <code>{path}</code></a> {escape(about)}</li>"
    yield "</ul></nav>"


def _anchor(method: str, path: str) -> str:
    return escape(f"{method}{path.replace('/', '-').replace('{', '').replace('}', '')}")


def _route(method: str, path: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield f"<section id='{_anchor(method, path)}'>"
    yield f"<h2><b>{method.upper()}</b> <code>{escape(path)}</code></h2>"
    yield f"<p>{escape(operation['summary'])}.</p>"
    if path in EXAMPLES:
        words = f"curl http://localhost:8000{path} {EXAMPLES[path]}".strip()
        yield f"<pre>{escape(words)}</pre>"
    if "requestBody" in operation:
        yield "<h3>Request</h3><ul>"
        for kind, content in operation["requestBody"]["content"].items():
            yield f"<li><code>{escape(kind)}</code> {_type(content.get('schema', {}))}</li>"
        yield "</ul>"
    yield "<h3>Answers</h3><table>"
    for status, answer in operation["responses"].items():
        kinds = ", ".join(
            f"<code>{escape(kind)}</code> {_type(content.get('schema', {}))}"
            for kind, content in answer.get("content", {}).items()
        )
        yield f"<tr><th>{status}<td>{escape(answer['description'])}<td>{kinds}"
    yield "</table></section>"


def _sockets() -> Iterator[str]:
    yield "<section id=sockets><h2>WebSockets</h2><table>"
    for path, (about, guide) in SOCKETS.items():
        link = f"<a href='{GUIDES}/{guide}'>messages and events</a>"
        yield f"<tr><th><code>{path}</code><td>{escape(about)}<td>{link}"
    yield "</table></section>"


def _schema(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    yield f"<section id='schema-{escape(name)}'><h3>{escape(name)}</h3>"
    required = schema.get("required", ())
    yield "<table>"
    for field, kind in schema.get("properties", {}).items():
        needed = "required" if field in required else ""
        yield f"<tr><th><code>{escape(field)}</code><td>{_type(kind)}<td>{needed}"
    yield "</table></section>"


def _type(schema: Mapping[str, Any]) -> str:
    """A type in words, with its bounds; names of schemas are links."""
    if "$ref" in schema:
        name = escape(schema["$ref"].removeprefix(REFERENCE))
        return f"<a href='#schema-{name}'>{name}</a>"
    if "anyOf" in schema:
        options = [s for s in schema["anyOf"] if s.get("type") != "null"]
        return " or ".join(_type(option) for option in options)
    if "enum" in schema:
        return " ".join(f"<code>{escape(str(v))}</code>" for v in schema["enum"] if v is not None)
    if "const" in schema:
        return f"<code>{escape(str(schema['const']))}</code>"
    if "contentSchema" in schema:
        return _type(schema["contentSchema"])
    bounds = [text.format(schema[key]) for key, text in BOUNDS.items() if key in schema]
    words = ", ".join([_kind(schema), *bounds])
    if "properties" in schema:
        inner = ", ".join(
            f"<code>{escape(field)}</code> {_type(kind)}"
            for field, kind in schema["properties"].items()
        )
        words += f" with {inner}"
    return words


def _kind(schema: Mapping[str, Any]) -> str:
    kind = str(schema.get("type", ""))
    if kind == "array" and "items" in schema:
        return f"array of {_type(schema['items'])}"
    if kind == "string" and schema.get("format") == "binary":
        return "file"
    if kind == "string" and "contentEncoding" in schema:
        return f"string ({escape(schema['contentEncoding'])})"
    return kind
