"""The conversation that the programs in `drivers` have with a scripted engine: a spoken turn, one
that calls a function, one that is interrupted, and another. test_clients.py and `python -m
tests.slow clients` run them; here is what the engine answers, and what the server must have done.
"""

from __future__ import annotations

import wave
from collections.abc import Sequence
from pathlib import Path

from stretto.engine.events import Event
from tests.server.conftest import Running
from tests.server.realtime.sounds import pcm, silence, speech
from tests.server.scripted_engine import ScriptedEngine
from tests.server.scripted_session import RATE, Ask, say

DRIVERS = Path(__file__).parent / "drivers"
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>'
LONG = say("word " * 60, 60.0, 60)


def is_transcription(ask: Ask) -> bool:
    return "Transcribe the" in ask.texts[0]


def answers(ask: Ask) -> Sequence[Event]:
    """The second turn calls the function, the third is answered for a minute."""
    if is_transcription(ask):
        return say("what was said", 0)
    if ask.messages[-1]["role"] == "tool":
        return say("It is sunny.", 1.0)
    turn = sum(m["role"] == "user" for m in ask.messages)
    if turn == 2:
        return say(CALL, 0.5)
    return LONG if turn == 3 else say("Good day to you.", 1.0)


def write_turn(path: Path) -> None:
    """A turn's sound, and a silence that ends the turn."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(pcm(silence(0.2), speech(0.6), silence(1.2)))


def check_conversation(running: Running, engine: ScriptedEngine) -> None:
    """The last answer was asked for with all turns, and speech interrupted one answer."""
    last = [ask for ask in engine.asks if not is_transcription(ask)][-1]
    roles = [text.partition(":")[0] for text in last.texts]
    assert (roles[0], roles[-1]) == ("system", "user"), roles
    assert (roles.count("user"), roles.count("tool")) == (4, 1), roles
    assert roles.index("tool") > roles.index("assistant"), roles
    text = running.ask("/metrics").body.decode()
    assert 'stretto_barge_in_total{by="speech"} 1.0' in text
