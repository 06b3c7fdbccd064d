"""Over HTTP no file of the server's can be named: the real engine behind the real server, real
files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stretto.config.engine import EngineConfig
from stretto.engine.engine import PipelineEngine
from stretto.engine.protocol import EngineClient
from stretto.preprocess.pool.pool import PoolSettings
from tests.preprocess.samples import data_uri, image_file, picture, sound_file, tone, video_file
from tests.server.conftest import Reply, Running

FILES = {
    "audio": sound_file(tone(0.5)),
    "image": image_file(picture(64, 64)),
    "video": video_file(4, 4, (32, 32)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server and its prompt worker run."""
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def running(tiny_dir: Path, folder: Path) -> Iterator[Running]:
    async def open_engine() -> EngineClient:
        engine = PipelineEngine(tiny_dir.resolve(), EngineConfig(prompts=PoolSettings()))
        await engine.start()
        return engine

    with contextlib.chdir(folder), Running(open_engine) as running:
        yield running


def ask(running: Running, part: dict[str, Any]) -> Reply:
    body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
    return running.ask("/v1/chat/completions", body, headers={"content-type": "application/json"})


@pytest.mark.parametrize("kind", FILES)
def test_files_are_not_read(kind: str, running: Running, folder: Path) -> None:
    path = folder / "a"
    path.write_bytes(FILES[kind])
    name = f"{kind}_url"
    assert (
        ask(running, {"type": name, name: {"url": data_uri(FILES[kind], f"{kind}/x")}}).status
        == 200
    )
    for url in (
        path.as_uri(),
        f"file://{path}",
        f"FILE:{path}",
        str(path),
        "a",
        "./a",
        f"//{path}",
    ):
        reply = ask(running, {"type": name, name: {"url": url}})
        assert reply.status == 400
        assert reply.error["param"] == f"messages[0].content[0].{name}.url"
        assert "files are not read" in reply.error["message"]
    for part in ({"path": str(path)}, {"path": "a"}, {"path": path.as_uri()}):
        reply = ask(running, {"type": kind, **part})
        assert (reply.status, reply.error["param"]) == (400, "messages[0].content[0].path")
        assert "files are not read" in reply.error["message"]


def test_scripts_that_name_files_are_not_followed(running: Running, folder: Path) -> None:
    (folder / "a.mp4").write_bytes(FILES["video"])
    script = b"ffconcat version 1.0\nfile a.mp4\n"
    reply = ask(running, {"type": "video_url", "video_url": {"url": data_uri(script, "video/mp4")}})
    assert reply.status == 400
    assert "cannot be decoded" in reply.error["message"]
