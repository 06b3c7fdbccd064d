"""The page with an open microphone, against the real server with a scripted engine: turns,
transcript, interruption."""

from __future__ import annotations

import wave
from collections.abc import Iterator

import numpy as np
import pytest

from tests.server.realtime.conftest import talking
from tests.server.realtime.sounds import silence, speech
from tests.server.scripted_engine import ScriptedEngine
from tests.server.scripted_session import Ask, say
from tests.server.web.tab import READY, Browser, find_chromium


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser at whose microphone somebody speaks, pauses, and speaks again."""
    if find_chromium() is None:
        pytest.skip("needs Chromium (Debian: apt-get install chromium)")
    path = tmp_path_factory.mktemp("talker") / "microphone.wav"
    sound = np.concatenate([silence(1.2, 48_000), speech(0.8, 48_000), silence(1.5, 48_000)])
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(48_000)
        file.writeframes((sound * 32767).astype("<i2").tobytes())
    with Browser(path) as browser:
        yield browser


SLOW_MICROPHONE = """
window.sockets = [];
window.tracks = [];
window.WebSocket = class extends WebSocket { constructor(...a) { super(...a); sockets.push(this); } };
const ask = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
const allowed = new Promise((go) => (window.allow = go));
navigator.mediaDevices.getUserMedia = async (...a) => {
  await allowed;
  const media = await ask(...a);
  tracks.push(...media.getTracks());
  return media;
};
"""


def test_impatient_clicks_leave_no_microphone_open(talker: Browser) -> None:
    """While the browser asks whether it may listen, a second click takes the first one back."""
    with talking(ScriptedEngine()) as server:
        tab = talker.open(server.url, before=SLOW_MICROPHONE)
        tab.until(READY)
        tab.click("talk")
        tab.click("live")
        tab.do(tab.page.evaluate("allow()"))
        tab.until("tracks.length && tracks.every((t) => t.readyState === 'ended')")
        assert tab.do(tab.page.evaluate("sockets.length")) == 0
        tab.click("talk")
        tab.until("strettoStats().talk === 'listening' && sockets[0]?.readyState === 1")
        assert (
            tab.do(tab.page.evaluate("tracks.filter((t) => t.readyState === 'live').length")) == 1
        )
        tab.click("live")
        tab.until("strettoStats().talk === 'idle' && tracks.every((t) => t.readyState === 'ended')")
        assert tab.complained() == []
        tab.close()


def test_a_live_conversation(talker: Browser) -> None:
    def script(ask: Ask) -> list:  # type: ignore[type-arg]
        if "Transcribe the" in ask.texts[0]:
            return say("what was said", 0)
        spoken = sum(m["role"] == "user" for m in ask.messages)
        return say("Good day to you.", 0.5) if spoken != 2 else say("word " * 60, 60.0, 60)

    engine = ScriptedEngine(script=script)
    with talking(engine) as server:
        tab = talker.open(server.url)
        tab.until(READY)
        tab.click("talk")
        tab.until("strettoStats().turns[0]?.outcome === 'done'")
        tab.until("strettoStats().turns[0].heardAfter !== null")
        first = tab.stats()["turns"][0]
        assert first["text"].startswith("Good day")
        parts = {part["name"]: part["seconds"] for part in first["parts"]}
        assert first["heardAfter"] > parts["pause"] > 0.4
        assert sum(parts.values()) == pytest.approx(first["heardAfter"], abs=1e-6)
        shown = tab.do(
            tab.page.evaluate(
                "async (s) => (await import('/turn.js')).duration(s)", first["heardAfter"]
            )
        )
        assert tab.text("clock-figure") == shown
        tab.until("document.querySelector('[data-testid=heard]')?.textContent === 'what was said'")
        tab.until("document.querySelector('[data-testid=parts]').textContent.includes('Pause')")
        tab.until("strettoStats().turns[1]?.outcome === 'stopped'")  # somebody spoke again
        tab.until("strettoStats().turns[2]?.outcome === 'done'")
        tab.click("live")
        tab.until("strettoStats().talk === 'ended'")
        assert tab.complained() == []
        tab.close()
        text = server.ask("/metrics").body.decode()
    assert 'stretto_barge_in_total{by="speech"} ' in text
    third = next(a for a in engine.asks if sum(m["role"] == "user" for m in a.messages) == 3)
    said = [t for t in third.texts if t.startswith("assistant: word")]
    assert all(len(t.split()) < 60 for t in said), "only what was heard is remembered"
