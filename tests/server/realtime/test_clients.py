"""The examples, run as they are against a server: OpenAI's client, and voice frameworks where they
are installed.

The frameworks are heavy, so they may live in environments of their own: CLIENT_PYTHONS names their
interpreters, separated by colons. Where none has a framework, its test is skipped."""

from __future__ import annotations

import os
import subprocess
import sys
import wave
from pathlib import Path

import pytest

from tests.server.conftest import Running
from tests.server.realtime import conversation
from tests.server.realtime.sounds import pcm, silence, speech
from tests.server.scripted_engine import ScriptedEngine
from tests.server.scripted_session import Ask, say

EXAMPLES = Path(__file__).parents[3] / "examples" / "realtime"
CLIENTS = {
    "openai_client.py": ("openai", "http://127.0.0.1:{port}/v1"),
    "openai_agent.py": ("agents", "ws://127.0.0.1:{port}/v1/realtime"),
    "livekit_agent.py": ("livekit.plugins.openai", "http://127.0.0.1:{port}/v1"),
    "pipecat_bot.py": ("pipecat", "ws://127.0.0.1:{port}/v1/realtime"),
}
DRIVERS = {
    "agents_sdk.py": "agents",
    "livekit_plugin.py": "livekit.plugins.openai",
    "pipecat_pipeline.py": "pipecat",
}


def python_with(module: str) -> str:
    candidates = [sys.executable, *filter(None, os.environ.get("CLIENT_PYTHONS", "").split(":"))]
    for python in candidates:
        code = (
            f"import importlib.util as u, sys; sys.exit(u.find_spec({module.split('.')[0]!r}) is "
            f"None)"
        )
        if subprocess.run([python, "-c", code], check=False).returncode == 0:
            return python
    pytest.skip(f"{module} is not installed, and no interpreter in CLIENT_PYTHONS has it")


@pytest.mark.parametrize("name", CLIENTS)
def test_an_example_hears_and_is_heard(
    name: str, running: Running, engine: ScriptedEngine, tmp_path: Path
) -> None:
    module, url = CLIENTS[name]
    python = python_with(module)

    def script(ask: Ask) -> list:  # type: ignore[type-arg]
        return (
            say("what was said", 0)
            if "Transcribe the" in ask.texts[0]
            else say("Good day to you.", 1.0)
        )

    engine.script = script
    question, answer = tmp_path / "question.wav", tmp_path / "answer.wav"
    with wave.open(str(question), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(24_000)
        file.writeframes(pcm(silence(0.2), speech(0.6)))
    command = [
        python,
        str(EXAMPLES / name),
        str(question),
        str(answer),
        "--url",
        url.format(port=running.port),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    with wave.open(str(answer)) as file:
        assert abs(file.getnframes() / 24_000 - 1.0) < 0.1, done.stdout + done.stderr
    requests = [a for a in engine.asks if "Transcribe the" not in a.texts[0]]
    assert requests[-1].texts[0] == "system: You are a friendly assistant. Be brief."
    assert "[" in requests[-1].texts[1]


@pytest.mark.parametrize("name", DRIVERS)
def test_a_framework_in_a_whole_conversation(
    name: str, running: Running, engine: ScriptedEngine, tmp_path: Path
) -> None:
    """A turn, one that calls a function, one that is interrupted, and another."""
    python = python_with(DRIVERS[name])
    engine.script = conversation.answers
    turn = tmp_path / "turn.wav"
    conversation.write_turn(turn)
    command = [python, str(conversation.DRIVERS / name), f"{running.url}/v1", str(turn)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok: " in done.stdout
    conversation.check_conversation(running, engine)
