"""Sessions that write down what they hear: as OpenAI's clients of today and of the beta open them,
with words while one speaks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from stretto.engine.events import Event, TextDelta
from stretto.server.realtime.audio_input import SAMPLE_BYTES
from stretto.server.realtime.partial_transcripts import agreed
from stretto.server.realtime.transcribe import LEAST_TOKENS, TOKENS_A_SECOND
from tests.server.conftest import Running
from tests.server.realtime.client import Client, talk, types
from tests.server.realtime.conftest import talking
from tests.server.realtime.sounds import pcm, silence, speech
from tests.server.scripted_engine import ScriptedEngine
from tests.server.scripted_session import Ask

PATH = "/v1/realtime?intent=transcription&model=gpt-4o-mini-transcribe"
WORDS = "conversation.item.input_audio_transcription."
COUNT = ("one", "two", "three", "four", "five", "six")


def seconds_heard(ask: Ask) -> float:
    return len(ask.messages[-1]["content"][0]["data"]) / 16_000


def counting(ask: Ask) -> Sequence[Event]:
    """A word for each second; a part of the next one, which is often wrong."""
    seconds = seconds_heard(ask)
    words = " ".join(COUNT[: int(seconds)])
    return [TextDelta((1,), words), *([TextDelta((2,), " mumble")] if seconds % 1 > 0.1 else [])]


@contextmanager
def transcribing(running: Running, path: str = PATH, **session: Any) -> Iterator[Client]:
    with talk(running, path) as c:
        c.order.transcribes = True
        if session:
            c.send("session.update", session={"type": "transcription", **session})
            assert c.until("session.updated")["session"]["type"] == "transcription"
        yield c


def deltas(events: list[Any]) -> str:
    return "".join(e["delta"] for e in events if e["type"] == f"{WORDS}delta")


def test_words_come_while_one_speaks_and_the_turn_is_forgotten(
    running: Running, engine: ScriptedEngine
) -> None:
    engine.script = counting
    with transcribing(running) as c:
        session = c.seen[0]["session"]
        assert (session["type"], session["object"]) == (
            "transcription", "realtime.transcription_session",
        )  # fmt: skip
        c.append(pcm(silence(0.5)))
        for i in range(4):
            c.append(pcm(speech(1.0, seed=i)))
        while deltas(c.seen).split() != ["one", "two"]:
            c.until(f"{WORDS}delta")  # while the turn goes on
        assert "input_audio_buffer.speech_stopped" not in types(c.seen)
        c.append(pcm(silence(0.8)))
        done = c.until(f"{WORDS}completed")
        assert done["transcript"].split()[:4] == ["one", "two", "three", "four"]
        assert done["transcript"] == deltas(c.seen), "the rest came as it was made"
        named = {e["item_id"] for e in c.seen if "item_id" in e}
        assert named == {done["item_id"]}
        c.append(pcm(speech(0.5), silence(0.8)))
        second = c.until("input_audio_buffer.committed")
        assert second["previous_item_id"] == done["item_id"]
        c.until(f"{WORDS}completed")
    (session,) = engine.sessions
    assert session.items == ()
    assert not [line for line in session.log if "respond" in line]
    assert all(len(ask.messages) == 1 for ask in engine.asks), "each turn is heard by itself"
    assert {ask.given["modalities"] for ask in engine.asks} == {("text",)}
    assert "response.created" not in types(c.seen)


def test_the_transcript_that_counts_may_differ_from_the_words_before(
    running: Running, engine: ScriptedEngine
) -> None:
    engine.script = lambda ask: [
        TextDelta((1,), "won too three" if seconds_heard(ask) < 3.5 else "one two three")
    ]
    with transcribing(running, audio={"input": {"turn_detection": None}}) as c:
        for i in range(3):
            c.append(pcm(speech(1.1, seed=i)))
        c.until(f"{WORDS}delta")
        c.append(pcm(speech(1.0)))
        c.send("input_audio_buffer.commit")
        assert c.until("input_audio_buffer.committed")["item_id"] == c.seen[-2].get("item_id")
        assert c.until(f"{WORDS}completed")["transcript"] == "one two three"
        assert deltas(c.seen) == "won too"


def test_by_hand_with_a_language_and_what_is_not_possible(
    running: Running, engine: ScriptedEngine
) -> None:
    engine.script = counting
    transcription = {"language": "de-AT", "prompt": "Mozart"}
    audio_input = {"turn_detection": None, "transcription": transcription}
    with transcribing(running, audio={"input": audio_input}) as c:
        c.append(pcm(speech(0.5)))
        c.send("input_audio_buffer.commit")
        c.until(f"{WORDS}completed")
        text = engine.asks[-1].messages[0]["content"][-1]["text"]
        assert text == "Transcribe the German audio into text. Mozart"
        most = engine.asks[-1].given["params"].max_text_tokens
        assert most == LEAST_TOKENS + TOKENS_A_SECOND // 2, "a model that repeats itself ends"
        c.send("input_audio_buffer.commit")
        assert c.until("error")["error"]["code"] == "input_audio_buffer_commit_empty"
        item = {"item": {"type": "message"}}
        for kind, fields in (("response.create", {}), ("conversation.item.create", item)):
            c.send(kind, **fields)
            assert "transcription session" in c.until("error")["error"]["message"]
        c.send("session.update", session={"type": "realtime"})
        assert c.until("error")["error"]["param"] == "session.type"
        c.send("session.update", session={"audio": {"input": {"transcription": None}}})
        assert c.until("session.updated")["session"]["audio"]["input"]["transcription"]


def held_up(engine: ScriptedEngine) -> asyncio.Event:
    """No answer comes before it is set."""
    go_on = asyncio.Event()

    async def gate(_: int) -> None:
        await go_on.wait()

    engine.gate = gate
    return go_on


def until(running: Running, condition: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.001)

    running.do(wait())


BY_HAND = {"audio": {"input": {"turn_detection": None}}}


def test_what_was_cleared_is_not_transcribed(running: Running, engine: ScriptedEngine) -> None:
    engine.script = counting
    with transcribing(running, **BY_HAND) as c:
        for i in range(3):
            c.append(pcm(speech(1.1, seed=i)))
        c.until(f"{WORDS}delta")
        before = c.seen[-1]["item_id"]
        c.send("input_audio_buffer.clear")
        c.until("input_audio_buffer.cleared")
        start = len(c.seen)
        c.append(pcm(speech(1.0)))
        c.send("input_audio_buffer.commit")
        done = c.until(f"{WORDS}completed")
        assert done["item_id"] != before
        assert deltas(c.seen[start:]) == done["transcript"] == "one"


def test_leaving_ends_the_transcript_of_a_turn_that_goes_on(
    running: Running, engine: ScriptedEngine
) -> None:
    held_up(engine)
    with transcribing(running, **BY_HAND) as c:
        c.append(pcm(speech(1.5)))
        until(running, lambda: bool(engine.ledger.running))
    running.do(running.server.service.sessions.idle.wait())
    assert not engine.ledger.running


def test_turns_count_until_they_are_transcribed(running: Running, engine: ScriptedEngine) -> None:
    """Among the memory of sessions: the engine's session has forgotten them."""
    go_on = held_up(engine)
    memory = running.server.service.sessions.memory
    sound = pcm(speech(0.9))
    with transcribing(running, **BY_HAND) as c:
        c.sync()
        before = memory.held
        for _ in range(4):
            c.append(sound)
            c.send("input_audio_buffer.commit")
        c.sync()
        assert memory.held > before + 4 * 0.8 * 16_000 * SAMPLE_BYTES
        running.loop.call_soon_threadsafe(go_on.set)
        for _ in range(4):
            c.until(f"{WORDS}completed")
        c.sync()
        # an event or a message that is under way may count here or there
        until(running, lambda: memory.held < before + 10_000)


def test_session_type_may_change_before_any_sound(running: Running, engine: ScriptedEngine) -> None:
    with talk(running) as c:
        c.send("session.update", session={"type": "transcription"})
        assert c.until("session.updated")["session"]["type"] == "transcription"
    with talk(running) as c:
        c.manual()
        c.append(pcm(speech(0.5)))
        c.send("session.update", session={"type": "transcription"})
        assert c.until("error")["error"]["param"] == "session.type"
        c.send("input_audio_buffer.clear")
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}
        c.send("conversation.item.create", item=item)
        c.until("conversation.item.done")
        c.send("session.update", session={"type": "transcription"})
        assert c.until("error")["error"]["param"] == "session.type"


def test_clients_of_the_beta(running: Running, engine: ScriptedEngine) -> None:
    engine.script = counting
    url = f"ws://127.0.0.1:{running.port}/v1/realtime?intent=transcription"
    with connect(url, additional_headers={"OpenAI-Beta": "realtime=v1"}) as socket:

        def until(kind: str) -> Any:
            while (event := json.loads(socket.recv()))["type"] != kind:
                assert event["type"] != "error", event
            return event

        assert until("transcription_session.created")["session"]["input_audio_format"] == "pcm16"
        session = {
            "input_audio_format": "g711_ulaw",
            "input_audio_transcription": {"model": "whisper-1", "language": "en"},
            "turn_detection": {"type": "server_vad", "silence_duration_ms": 300},
        }
        socket.send(json.dumps({"type": "transcription_session.update", "session": session}))
        session = until("transcription_session.updated")["session"]
        assert session["input_audio_format"] == "g711_ulaw"
        assert session["turn_detection"]["silence_duration_ms"] == 300


def test_a_model_that_does_not_write_down_speech() -> None:
    engine = ScriptedEngine(transcription=None)
    with talking(engine) as running:
        with pytest.raises(InvalidStatus) as refused, talk(running, PATH):
            pass
        body = json.loads(refused.value.response.body or b"")
        assert refused.value.response.status_code == 400
        assert body["error"]["message"] == "this model cannot transcribe speech"
        with talk(running) as c:
            c.send("session.update", session={"type": "transcription"})
            assert "cannot transcribe" in c.until("error")["error"]["message"]
            c.manual(audio={"input": {"transcription": {"model": "whisper-1"}}})
            c.append(pcm(speech(0.3)))
            c.send("input_audio_buffer.commit")
            assert c.until(f"{WORDS}completed")["transcript"] == "(spoken)"


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        ("", "hello", ""),
        ("hello wor", "hello world is", "hello"),
        ("hello world", "hello world is", "hello"),
        ("hello world,", "hello world, he", "hello world,"),
        ("hello there", "hello world", "hello"),
        ("\u4f60\u597d\u5417", "\u4f60\u597d\u554a", "\u4f60\u597d"),
        ("don't go", "don't stop", "don't"),
    ],
)
def test_agreed_words(one: str, two: str, expected: str) -> None:
    assert agreed(one, two) == expected
    assert agreed(two, one) == expected
