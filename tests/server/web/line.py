"""A spoken conversation between the page and the scripted server: the test speaks into the page's
microphone, the server finds the turns by their loudness, and the test makes the answers event by
event. For tabs opened with `SOUND` and `LISTEN`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from stretto.engine.events import AudioChunk, TextDelta
from tests.server.scripted_server import RATE, ScriptedServer
from tests.server.scripted_session import Float
from tests.server.web.tab import Tab

# What the page sends, and how many connections it has made and lost.
LISTEN = """
window.sockets = [];
window.sent = [];
window.lost = 0;
window.WebSocket = class extends WebSocket {
  constructor(...a) {
    super(...a);
    sockets.push(this);
    this.addEventListener("close", () => lost++);
  }
  send(data) {
    sent.push(JSON.parse(data));
    super.send(data);
  }
};
"""
LOUD = 0.2  # of a voice
VOICE, PAUSE = 60, 120  # blocks of 128 samples: 0.32 s, and 0.64 s, after which a turn is over
PAUSE_S = 0.512  # of silence end a turn: half a second, in windows of 32 ms


def steady(*parts: tuple[float, float]) -> Float:
    """Sound of (seconds, value of each sample)."""
    return np.concatenate([np.full(int(s * RATE), v, np.float32) for s, v in parts])


@dataclass
class Line:
    tab: Tab
    server: ScriptedServer

    # -- what the person does

    def phase(self, wanted: str) -> None:
        self.tab.until(f"strettoStats().talk === '{wanted}'")

    def begin(self, by: str = "talk") -> None:
        self.tab.click(by)
        self.phase("listening")
        self.wait_for("session.update")

    def start_speaking(self, then: str = "hearing") -> None:
        self.tab.speak(VOICE, LOUD)
        self.phase(then)

    def stop_speaking(self) -> None:
        self.tab.speak(PAUSE, 0.0)
        self.phase("thinking")

    def ask(self, number: int = 0) -> None:
        """The person says something; the answer begins, and has no sound yet."""
        self.start_speaking()
        self.stop_speaking()
        self.answer("I am.", number)

    # -- what the engine does

    def answer(self, text: str, number: int = 0) -> None:
        self.server.tell(number, TextDelta((0,), text))
        self.tab.until(f"strettoStats().turns[{number}]?.text === {text!r}")

    def sound(self, samples: Float, number: int = 0) -> None:
        """The answer's sound arrives; nothing of it is played yet."""
        self.server.tell(number, AudioChunk(0, samples))
        self.tab.until(f"strettoStats().turns[{number}]?.packets === 1")

    def done(self, number: int = 0) -> None:
        self.server.tell(number, None)
        self.tab.until(f"strettoStats().turns[{number}]?.outcome === 'done'")

    def write_down(self, words: str) -> None:
        """What the person said: the next that is asked for, when an answer has its first sound."""
        self.server.call(self.server.question.put_nowait, words)

    # -- what the page sends

    def wait_for(self, type: str, count: int = 1, since: int = 0) -> dict[str, Any]:
        """The event of this type that the page sent as the `count`-th after `since` others."""
        found = f"sent.slice({since}).filter((event) => event.type === {type!r})[{count - 1}]"
        event: dict[str, Any] = self.tab.until(found)
        return event

    @property
    def num_sent(self) -> int:
        return int(self.tab.eval("sent.length"))

    @property
    def num_connections(self) -> int:
        return int(self.tab.eval("sockets.length"))

    # -- what the network and the server do

    def wait_until_closed(self) -> None:
        """Until the server has no session."""
        self.server.running.do(self.server.service.sessions.idle.wait())

    def refuse(self) -> None:
        self.server.service.sessions.limit = 0

    def accept(self) -> None:
        self.server.service.sessions.limit = self.server.service.config.realtime_sessions
