"""One Chromium for all tests of the page, one scripted server that each test gives its script."""

from __future__ import annotations

import math
import wave
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.server.scripted_server import ScriptedServer
from tests.server.web.tab import MICROPHONE_HZ, Browser, find_chromium


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if find_chromium() is None:
        pytest.skip("needs Chromium (Debian: apt-get install chromium)")
    folder = tmp_path_factory.mktemp("chromium")
    with Browser(microphone_file(folder / "microphone.wav")) as browser:
        yield browser


@pytest.fixture(scope="session")
def running() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


@pytest.fixture
def server(running: ScriptedServer) -> ScriptedServer:
    """The scripted server, as good as new."""
    running.reset()
    return running


def microphone_file(path: Path) -> Path:
    """A steady tone, which Chromium plays to the page over and over as its microphone."""
    t = np.arange(48000) / 48000
    tone = (0.5 * np.sin(2 * math.pi * MICROPHONE_HZ * t) * 32767).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(48000)
        file.writeframes(tone.tobytes())
    return path
