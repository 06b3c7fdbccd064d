"""The page at /docs shows every route and field of the description, and needs nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser

import pytest

from stretto.server.openai.docs_page import SOCKETS
from stretto.server.pages import HEADERS
from stretto.server.realtime.endpoint import PATHS
from tests.server.conftest import Running, serve
from tests.server.scripted_engine import ScriptedEngine


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        assert tag not in ("script", "style", "iframe")
        assert "style" not in values
        if "id" in values:
            self.ids.append(values["id"])
        if tag == "a":
            self.links.append(values["href"])
        elif "href" in values or "src" in values:
            self.loads.append(values.get("href") or values["src"])

    def handle_data(self, data: str) -> None:
        self.words += f"{data} "


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serve(ScriptedEngine(), api_key=("secret",)) as it:
        yield it


def test_it_has_the_pages_headers_and_needs_no_key(running: Running) -> None:
    reply = running.ask("/docs")
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert HEADERS.items() <= reply.headers.items()


def test_all_that_it_loads_comes_from_the_server(running: Running) -> None:
    page = Page(running.ask("/docs").body.decode())
    assert page.loads == ["docs.css"]
    style = running.ask("/docs.css")
    assert (style.status, style.headers["content-type"]) == (200, "text/css; charset=utf-8")
    assert b"url(" not in style.body
    assert b"@import" not in style.body
    outside = {link for link in page.links if not link.startswith("#")}
    assert all(link == "openapi.json" or "/stretto-engine/stretto/" in link for link in outside)


def test_all_routes_and_fields_are_listed_and_links_resolve(running: Running) -> None:
    document = running.ask("/openapi.json").json
    page = Page(running.ask("/docs").body.decode())
    assert len(page.ids) == len(set(page.ids))
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    said = set(page.words.split())
    assert {*document["paths"], *SOCKETS} <= said
    assert PATHS[0] in SOCKETS
    for name, schema in document["components"]["schemas"].items():
        assert f"schema-{name}" in page.ids
        assert set(schema.get("properties", {})) <= said, name


def test_the_examples_are_requests_that_are_answered(running: Running) -> None:
    page = running.ask("/docs").body.decode()
    bodies = re.findall(r"localhost:8000(/\S+) -H &#x27;[^;]*; -d &#x27;(.*?)&#x27;", page)
    assert [path for path, _ in bodies] == ["/v1/chat/completions", "/v1/audio/speech"]
    for path, body in bodies:
        headers = {"Authorization": "Bearer secret"}
        fields = json.loads(body.replace("&quot;", '"'))
        assert running.ask(path, fields, headers=headers).status == 200, path
