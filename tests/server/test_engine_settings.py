"""What the server's settings do, with the real engine and the tiny model behind it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from stretto.config.engine import EngineConfig
from stretto.engine import request, request_manager
from tests.pipeline import LINKS, STAGES
from tests.server.conftest import HEAD, PATIENCE_S, read_until
from tests.server.real_engine import Served, served

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
ALOUD: dict[str, Any] = {
    **ASK,
    "modalities": ["text", "audio"],
    "stream": True,
    "audio": {"format": "pcm16"},
}
NEVER = 10**9


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def strict(tiny_dir: Path, patch: pytest.MonkeyPatch) -> Iterator[Served]:
    """Asks its hosts for numbers when they start and never again, and wants speech at an impossible
    pace from the first packet on."""
    patch.setattr(request_manager, "PING_EVERY", NEVER)
    patch.setattr(request, "PACE_AFTER_S", 0.0)
    with served(tiny_dir, EngineConfig(placement="two", min_pace=1e9)) as it:
        yield it


def test_numbers_are_there_from_the_first_look(strict: Served) -> None:
    told = strict.running.ask("/metrics").body.decode()
    for stage in STAGES:
        assert f'stretto_stage_steps_total{{stage="{stage}",kind="decode"}}' in told
    [between] = [name for name, (sender, _) in LINKS.items() if sender == STAGES[0]]
    for end in ("in", "out"):
        assert f'stretto_link_chunks_total{{link="{between}",end="{end}"}}' in told
    assert 'stretto_host_idle_seconds_total{host="' in told


def test_speech_is_refused_while_running_speech_is_too_slow(strict: Served) -> None:
    """Of two streams: the only one of a client is his own, and refuses him nothing."""
    body = {
        **ALOUD,
        "ignore_eos": True,
        "min_audio_frames": 3000,
        "max_audio_frames": 3000,
        "max_tokens": 2000,
    }
    data = json.dumps(body).encode()
    request = f"POST /v1/chat/completions {HEAD}Content-Length: {len(data)}\r\n\r\n".encode()
    address = "127.0.0.1", strict.running.port
    with ExitStack() as stack:
        for _ in range(2):
            s = stack.enter_context(socket.create_connection(address, timeout=PATIENCE_S))
            s.sendall(request + data)
            read_until(s, b'"data"')
        refused = strict.running.ask("/v1/chat/completions", ALOUD)
        assert (refused.status, refused.error["code"]) == (429, "server_busy")
        assert "times real time" in refused.error["message"]
        assert "retry-after" in refused.headers
        assert strict.running.ask("/v1/chat/completions", ASK).status == 200, (
            "text does not need a pace"
        )


def test_without_streaming_sound_is_made_when_all_speech_is(tiny_dir: Path) -> None:
    fixed = {
        "ignore_eos": True,
        "min_audio_frames": 12,
        "max_audio_frames": 12,
        "timeline": True,
        "stream": False,
    }
    with served(tiny_dir, EngineConfig(), streaming=False) as it:
        spans = it.chat(**{**ALOUD, **fixed})["stretto"]["timeline"]
    spoken = [s["stop"] for s in spans if s["lane"] == "talker"]
    heard = [s["start"] for s in spans if s["lane"] == "packets"]
    assert len(spoken) >= 12
    assert max(spoken) <= min(heard)
