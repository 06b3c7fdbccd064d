"""Paths that have no route: 404 with the route that was probably meant."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.conftest import Running, serve
from tests.server.scripted_engine import ScriptedEngine


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serve(ScriptedEngine()) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "POST /v1/chat/completions"),
        ("/audio/speech", "POST /v1/audio/speech"),
        ("/responses", "POST /v1/responses"),
        ("/v1/chat/completion", "POST /v1/chat/completions"),
        ("/v1/v1/chat/completions", "POST /v1/chat/completions"),
        ("/v1/embeddings", None),
    ],
)
def test_a_path_that_is_not_there(path: str, meant: str | None, running: Running) -> None:
    reply = running.ask(path, {"model": "x", "input": "hi"})
    assert reply.status == 404
    assert reply.error["code"] == "not_found"
    assert f"there is no POST {path}" in reply.error["message"]
    # Nothing here is like embeddings: no guess is made.
    hint = (
        f"did you mean {meant}?" if meant is not None else "GET /openapi.json tells what there is"
    )
    assert reply.error["message"].endswith(f"; {hint}")


def test_a_list_of_models_without_v1(running: Running) -> None:
    assert "did you mean GET /v1/models?" in running.ask("/models").error["message"]
