"""Two hundred interruptions at seeded moments: by the client, by speech, with and without word of
what was heard. After each, nothing of the answer follows its end, the conversation is what was
heard, and nothing is held any more."""

from __future__ import annotations

import asyncio
import base64
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from stretto.engine.events import AudioChunk, Event, TextDelta
from stretto.engine.session import Session
from stretto.server.realtime import response as responses
from stretto.server.realtime.playback_estimate import played_text
from stretto.server.realtime.vad import Batcher
from tests.engine.common import freed
from tests.server.conftest import Running
from tests.server.real_engine import Served
from tests.server.realtime.client import Client, Json, add_text, talk
from tests.server.realtime.conftest import talking
from tests.server.realtime.loudness_vad import LoudnessVad
from tests.server.realtime.sounds import pcm, speech
from tests.server.scripted_engine import ScriptedEngine
from tests.server.scripted_session import RATE, say, short

SCRIPTED, REAL = 140, 60
FRAMES = 400
SPEECH = pcm(speech(0.3))
WORDS = (
    "well",
    "I",
    "think",
    "that",
    "it",
    "may",
    "rain",
    "in",
    "the",
    "north",
    "but",
    "nobody",
    "knows",
)
BY_SPEECH = {"type": "server_vad", "create_response": False}


class Clock:
    """Of the server's own estimate of what was heard."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Answer:
    """What a client has had of one."""

    def __init__(self, c: Client) -> None:
        self.c, self.text, self.samples = c, "", 0
        self.id = str(c.until("response.created")["response"]["id"])
        self.item = ""
        self.done: Json | None = None

    @property
    def seconds(self) -> float:
        return self.samples / RATE

    def take(self) -> None:
        event = self.c.until(
            "response.output_audio.delta", "response.output_audio_transcript.delta",
            "response.output_item.added",
            "response.done", "input_audio_buffer.speech_started", "conversation.item.truncated",
        )  # fmt: skip
        match event["type"]:
            case "response.output_item.added":
                self.item = event["item"]["id"]
            case "response.output_audio.delta":
                self.samples += len(base64.b64decode(event["delta"])) // 2
            case "response.output_audio_transcript.delta":
                self.text += event["delta"]
            case "response.done":
                self.done = event["response"]

    def end(self) -> Json:
        while self.done is None:
            self.take()
        return self.done


def interrupt(c: Client, how: str, answer: Answer, heard_ms: int) -> None:
    if how == "truncate":  # some clients truncate before they cancel
        c.send(
            "conversation.item.truncate",
            item_id=answer.item,
            content_index=0,
            audio_end_ms=heard_ms,
        )
    if how == "speech":
        c.append(SPEECH)
    else:
        c.send("response.cancel")


def check_over(c: Client, answer: Answer, how: str) -> None:
    """It was cancelled for this reason, and nothing of it comes any more; the speaker is silent
    again."""
    done = answer.end()
    assert (done["id"], done["status"]) == (answer.id, "cancelled")
    assert done["status_details"]["reason"] == (
        "turn_detected" if how == "speech" else "client_cancelled"
    )
    if how == "speech":
        c.send("input_audio_buffer.clear")
    for event in c.sync():
        assert event.get("response_id") != answer.id
        assert event.get("response", {}).get("id") != answer.id


async def tasks_of(kind: str) -> int:
    return sum(t.get_name() == kind for t in asyncio.all_tasks())


def gate_at(running: Running, engine: ScriptedEngine, at: int) -> None:
    """The answer stands still before its event of this number, for good."""

    async def gate(i: int) -> None:
        if i == at:
            await asyncio.Event().wait()

    engine.gate = gate


def draw(seed: int) -> tuple[random.Random, list[Event], int]:
    """An answer of some words and some sound, and how many of its events come."""
    rng = random.Random(seed)
    text = " ".join(rng.choices(WORDS, k=rng.randrange(1, 12)))
    events = say(text, rng.uniform(0.2, 3.0), rng.randrange(1, 9))
    return rng, events, rng.randrange(len(events))


@pytest.mark.parametrize("first", range(0, SCRIPTED, 35))
def test_what_is_kept_is_what_was_heard(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, engine, history = Clock(), ScriptedEngine(), []
    monkeypatch.setattr(responses, "clock", clock)
    with talking(engine) as running, talk(running) as c:
        c.update(audio={"input": {"turn_detection": BY_SPEECH}})
        for seed in range(first, first + 35):
            rng, events, at = draw(seed)
            engine.script = lambda ask, events=events: events
            gate_at(running, engine, at)
            add_text(c, f"question {seed}")
            c.send("response.create")
            answer = Answer(c)
            text, made = sent(events[:at])
            while (answer.text, answer.samples) != (text, made):
                answer.take()
            played = rng.uniform(0.0, 1.2) * made / RATE
            cut_s = rng.uniform(0.0, made / RATE)
            clock.now += played
            how = (
                rng.choice(("cancel", "speech", "truncate"))
                if answer.item
                else rng.choice(("cancel", "speech"))
            )
            interrupt(c, how, answer, round(1000 * cut_s))
            check_over(c, answer, how)
            if how == "truncate":
                played = round(1000 * cut_s) / 1000
            stored = played_text(text, min(played, made / RATE), made / RATE, complete=False)
            history += [f"user: question {seed}", *([f"assistant: {stored}"] if stored else [])]
            assert [short(i.message) for i in engine.sessions[0].items] == history, seed
            assert not engine.ledger.running
            assert running.do(tasks_of("response")) == 0
            usage = answer.end()["usage"]
            assert usage["input_tokens"] == 10 * len(engine.asks[-1].messages) or (
                at == 0 and not usage["input_tokens"]
            )
            assert usage["output_token_details"]["text_tokens"] == sum(
                isinstance(e, TextDelta) for e in events[:at]
            )
            clock.now += 100.0


def sent(events: Sequence[Event]) -> tuple[str, int]:
    text = "".join(e.text for e in events if isinstance(e, TextDelta))
    return text, sum(len(e.samples) for e in events if isinstance(e, AudioChunk))


def recorded(engine: Any, patch: pytest.MonkeyPatch) -> list[Session]:
    """All sessions that are opened from now on. Their answers are too long to end by themselves."""
    opened: list[Session] = []
    before = engine.session

    def session(**options: Any) -> Session:
        it: Any = before(**options)
        respond = it.respond

        def at_length(**more: Any) -> Any:
            params = replace(more.pop("params"), ignore_eos=True, min_frames=FRAMES)
            return respond(params=params, **more)

        it.respond = at_length
        opened.append(it)
        return opened[-1]

    patch.setattr(engine, "session", session)
    return opened


def test_the_real_engine_has_all_back_each_time(
    real_server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = real_server.server.service.sessions
    monkeypatch.setattr(sessions, "batcher", Batcher(LoudnessVad))
    engine: Any = real_server.server.service.engine()
    opened = recorded(engine, monkeypatch)
    it = Served(real_server, engine)
    with talk(it.running) as c:
        c.update(
            audio={"input": {"turn_detection": BY_SPEECH}},
            max_output_tokens=300,
            max_audio_frames=FRAMES,
        )
        for seed in range(REAL):
            check_one(it, c, opened[0], random.Random(seed))
    it.do(sessions.idle.wait())
    it.do(freed(engine))


def check_one(it: Served, c: Client, session: Session, rng: random.Random) -> None:
    before = [i.message for i in session.items]
    question = add_text(c, "What is the weather like?")["item"]["id"]
    c.send("response.create", response={"seed": rng.randrange(1000)})
    answer = Answer(c)
    packets = rng.randrange(4)
    while packets and answer.done is None:
        was = answer.samples
        answer.take()
        packets -= answer.samples > was
    assert answer.done is None, "it was to be longer"
    how = rng.choice(("cancel", "speech", "truncate") if answer.item else ("cancel", "speech"))
    interrupt(c, how, answer, rng.randrange(400))
    check_over(c, answer, how)
    it.do(freed(it.engine))
    assert it.running.do(tasks_of("response")) == 0
    content = answer.end()["output"][0]["content"][0] if answer.end()["output"] else {}
    whole = content.get("transcript", "")
    if answer.item:
        assert answer.end()["usage"]["input_tokens"] > 5
    assert whole.startswith(answer.text)
    stored: list[Any] = []
    if answer.item:
        ms = rng.randrange(1000)  # the client knows best what was heard
        c.send("conversation.item.truncate", item_id=answer.item, content_index=0, audio_end_ms=ms)
        c.until("conversation.item.truncated")
        words = played_text(whole, min(ms / 1000, answer.seconds), answer.seconds, complete=False)
        stored = [{"role": "assistant", "content": words}] if words else []
    assert [i.message for i in session.items][: len(before)] == before
    assert [i.message for i in session.items][len(before) + 1 :] == stored
    if len(session.items) > 8:  # short prompts are quick
        for id in (answer.item, question):
            if id:
                c.send("conversation.item.delete", item_id=id)
                c.until("conversation.item.deleted")
