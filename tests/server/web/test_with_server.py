"""The page and the clients against the real server with the real tiny model: that both sides mean
the same."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile

from stretto.config.engine import EngineConfig, HostSettings, PoolSettings
from stretto.testing.qwen3_tts import write_tiny
from tests.loadtest.command import run
from tests.server.conftest import Running, serve
from tests.server.real_engine import served
from tests.server.scripted_engine import ScriptedEngine
from tests.server.web.tab import READY, SOUND, Browser, shows


def test_a_conversation_with_the_tiny_model(browser: Browser, real_server: Running) -> None:
    tab = browser.open(real_server.url, clock=True)
    tab.until(READY)
    tab.stop_time()  # a press of the microphone's button is a click, however long it takes here
    voices = tab.eval("[...document.querySelector('#voice').options].map((option) => option.value)")
    assert voices == list(real_server.server.service.engine().info.voices)
    tab.eval("document.querySelector('#longest').append(new Option('Very short', '8', true, true))")

    tab.click("mic")
    tab.until(
        "parseFloat(document.querySelector('#recording-text').textContent.split(' ')[1]) >= 0.5"
    )
    tab.click("mic")
    tab.until("strettoStats().turns[0]?.outcome === 'done'")
    tab.ask("And in writing?")
    tab.until("strettoStats().turns[1]?.outcome === 'done'")
    for turn in tab.stats()["turns"]:
        assert turn["packets"] > 0
        assert 0 < turn["audioSeconds"] <= 2.0
        assert turn["measured"], "the server sent its timeline"
    assert tab.complained() == []
    tab.close()


def test_a_text_is_read_by_a_voice_of_a_clip(browser: Browser, tmp_path: Path) -> None:
    """With the real model that clones, tiny: a clip that is too short is refused in the server's
    words."""
    write_tiny(tmp_path / "tts", 0, "base")
    config = EngineConfig(prompts=PoolSettings(), host=HostSettings(max_rows=4))
    with served(tmp_path / "tts", config) as it:
        tab = browser.open(it.running.url, before=SOUND)
        tab.until("document.body.dataset.mode === 'reading'")
        assert "noise" in tab.text("model")
        for seconds, fine in ((0.2, False), (1.5, True)):
            soundfile.write(
                tmp_path / "clip.wav",
                np.random.default_rng(0).uniform(-0.3, 0.3, int(24000 * seconds)),
                24000,
            )
            if not tab.eval("document.querySelector('#voices').open"):
                tab.click("add-voice")
            tab.do(tab.at("clip").set_input_files(str(tmp_path / "clip.wav")))
            tab.eval("document.querySelector('#voice-name').value = 'My voice'")
            tab.click("save-voice")
            tab.until(
                "!document.querySelector('#voices').open"
                if fine
                else "!document.querySelector('#voice-wrong').hidden"
            )
        assert "short" in tab.text("voice-wrong")
        assert tab.eval("document.querySelector('#voice').value") == "My voice"
        tab.ask("Hi.")
        tab.until("strettoStats().turns[0]?.outcome === 'done'")
        (turn,) = tab.stats()["turns"]
        assert turn["packets"] > 0
        assert turn["measured"]
        tab.close()


def test_errors_and_states_are_told_in_the_servers_words(browser: Browser) -> None:
    engine = ScriptedEngine(state="loading")
    with serve(engine, api_key=("sk-secret",)) as server:
        tab = browser.open(server.url)
        tab.until(shows("The model is loading."))
        engine.state = "ready"
        tab.until(shows("This server asks for a key."))
        tab.write("key-now", "sk-secret")
        tab.press("Enter")
        tab.until(READY)
        tab.close()


def test_bench(real_server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run.json"
    short = ("--max-tokens", "5", "--extra", '{"max_audio_frames": 6}')
    assert (
        run("bench", real_server.url, "-c", "2", "-n", "4", "--quiet", "--json", str(out), *short)
        == 0
    )
    told = json.loads(out.read_text())
    assert "version" in told["server"]
    for sample in told["levels"][0]["samples"]:
        assert 0 < sample["text_tokens"] <= 5
        assert 0 < sum(s for _, s in sample["packets"]) <= 6 * 1920 / 24000
    assert "4 answers" in capsys.readouterr().out


def test_talk(real_server: Running, tmp_path: Path) -> None:
    assert run("talk", real_server.url, "--text", "Hi", "--max-tokens", "4", "--text-only") == 0
