"""Each answer of a session leaves one line in the log and one count in the metrics, however it
ends: also before its task has run, when the session closes, and when what ends it fails itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest

from stretto.engine.events import Finished, Usage
from stretto.errors import Busy, Invalid, StageDead
from stretto.server.realtime import transcribe
from stretto.server.realtime.answer_log import AnswerLog, AnswerRecorder
from stretto.server.realtime.items import Conversation
from tests.server.conftest import Running
from tests.server.realtime.client import answer, speak, talk
from tests.server.realtime.silent import SilentSession
from tests.server.realtime.sounds import speech

Line = dict[str, Any]
KINDS = ("response", "transcription")


@dataclass
class Log:
    """Lines about answers."""

    caplog: pytest.LogCaptureFixture

    @property
    def lines(self) -> list[Line]:
        fields = [r.fields for r in self.caplog.records if r.name == "stretto.access"]  # type: ignore[attr-defined]
        return [f for f in fields if f.get("kind") in KINDS]

    def one(self, kind: str) -> Line:
        [line] = [f for f in self.lines if f["kind"] == kind]
        return line


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[Log]:
    with caplog.at_level("DEBUG", logger="stretto"):
        yield Log(caplog)


def play(work: Callable[[SilentSession], Awaitable[None]], **settings: Any) -> SilentSession:
    async def main() -> SilentSession:
        s = SilentSession(**settings)
        await work(s)
        await s.session.close()
        return s

    return asyncio.run(main())


async def never(_: int) -> None:
    await asyncio.Event().wait()


def test_an_answer_says_who_how_long_and_how_much(log: Log) -> None:
    async def work(s: SilentSession) -> None:
        await s.ask()
        await s.quiet()

    s = play(work)
    line = log.one("response")
    [done] = s.events("response.done")
    assert line["id"] == done["response"]["id"]
    assert line["session"] == s.session.state.id
    assert (line["connection"], line["key"]) == ("req-1", "key1")
    assert (line["outcome"], line["ended"], line["audio_s"]) == ("completed", "stop", 1.0)
    assert line["tokens"] == done["response"]["usage"]["output_token_details"]["text_tokens"]
    assert 0 < line["first_text_ms"] <= line["first_audio_ms"] <= line["ms"]
    assert line["queued_ms"] >= 0
    assert s.responses() == {"completed": 1.0}
    assert s.count("stretto_generation_tokens_total") == line["tokens"]
    assert s.count("stretto_audio_seconds_total") == 1.0
    assert s.count("stretto_prompt_tokens_total") == 10.0
    assert s.count("stretto_queue_wait_seconds_count") == 1.0


def test_a_whole_turn_on_a_connection(running: Running, log: Log) -> None:
    with talk(running) as c:
        c.manual(audio={"input": {"transcription": {"model": "any"}}})
        speak(c)
        answer(c)
        c.until("conversation.item.input_audio_transcription.completed")
        session = c.seen[0]["session"]["id"]
    running.do(running.server.service.sessions.idle.wait())
    [whole] = [
        r.fields  # type: ignore[attr-defined]
        for r in log.caplog.records
        if getattr(r, "fields", {}).get("path") == "/v1/realtime"
    ]
    assert (whole["status"], whole["session"], whole["ended"]) == (101, session, "left")
    for line in (log.one("response"), log.one("transcription")):
        assert (line["connection"], line["session"]) == (whole["id"], session)
        assert (line["outcome"], line["ended"], line["key"]) == ("completed", "stop", "anyone")
    text = next(r.getMessage() for r in log.caplog.records if "kind=response" in r.getMessage())
    assert f"session={session} connection={whole['id']} key=anyone outcome=completed" in text


def test_an_answer_that_meets_its_limit(log: Log) -> None:
    async def work(s: SilentSession) -> None:
        await s.ask(max_output_tokens=1)
        await s.quiet()

    s = play(work)
    line = log.one("response")
    assert (line["outcome"], line["ended"]) == ("incomplete", "length")
    assert s.responses() == {"incomplete": 1.0}


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (StageDead("talker: it died"), "talker: it died"),
        (Busy("no room"), "no room"),
        (RuntimeError("oh"), "oh"),
        (Invalid("what the client said"), None),  # its words are not for the log
    ],
)
def test_an_answer_that_fails(error: Exception, words: str | None, log: Log) -> None:
    async def work(s: SilentSession) -> None:
        s.engine.fail_at = 3
        s.engine.error = error
        await s.ask()
        await s.quiet()

    s = play(work)
    line = log.one("response")
    assert (line["outcome"], line["ended"]) == ("failed", type(error).__name__)
    assert line.get("error") == words
    assert line["tokens"] == 2
    assert s.responses() == {"failed": 1.0}


def test_an_answer_for_which_there_is_no_place(log: Log) -> None:
    async def work(s: SilentSession) -> None:
        async with s.service.admission.place("another"):
            await s.ask()
            await s.quiet()

    s = play(work, max_concurrent=1, max_queue=0)
    line = log.one("response")
    assert (line["outcome"], line["ended"]) == ("failed", "Refused")
    assert "the server answers 1 requests at once" in line["error"]
    assert "queued_ms" not in line
    assert s.responses() == {"failed": 1.0}


def test_an_answer_that_cannot_be_stored_fails_and_the_client_is_told(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is stored needs the prompt worker, which may be overloaded: then the answer's failure
    cannot be stored either."""

    def release_forgotten(_: Conversation) -> None:
        raise StageDead("the prompt worker died")

    monkeypatch.setattr(Conversation, "release_forgotten", release_forgotten)

    async def work(s: SilentSession) -> None:
        await s.ask()
        await s.quiet()

    s = play(work)
    [done] = s.events("response.done")
    assert done["response"]["status"] == "failed"
    assert log.one("response")["error"] == "the prompt worker died"
    assert s.responses() == {"failed": 1.0}


def test_an_answer_that_the_client_stops(log: Log) -> None:
    async def work(s: SilentSession) -> None:
        s.engine.gate = lambda i: never(i) if i == 4 else asyncio.sleep(0)
        await s.ask()
        while not s.events("response.output_audio.delta"):
            await asyncio.sleep(0)
        await s.send("response.cancel")

    s = play(work)
    line = log.one("response")
    assert (line["outcome"], line["ended"]) == ("cancelled", "client_cancelled")
    assert line["tokens"] > 0
    assert s.responses() == {"cancelled": 1.0}


@pytest.mark.parametrize("conversation", ["auto", "none"])
def test_an_answer_that_is_stopped_before_its_first_step(conversation: str, log: Log) -> None:
    async def work(s: SilentSession) -> None:
        await s.ask(conversation=conversation)
        [created] = s.events("response.created")
        await s.send("response.cancel", response_id=created["response"]["id"])
        assert not s.engine.asks, "its task never ran"

    s = play(work)
    line = log.one("response")
    assert (line["outcome"], line["ended"]) == ("cancelled", "client_cancelled")
    assert s.responses() == {"cancelled": 1.0}


@pytest.mark.parametrize("begun", [True, False])
def test_answers_of_a_session_that_closes(begun: bool, log: Log) -> None:
    async def work(s: SilentSession) -> None:
        s.engine.gate = never
        await s.ask()
        await s.ask(conversation="none")
        while begun and len(s.engine.asks) < 2:
            await asyncio.sleep(0)

    s = play(work)
    assert [(f["outcome"], f["ended"]) for f in log.lines] == [("cancelled", "session_closed")] * 2
    assert s.responses() == {"cancelled": 2.0}


def test_an_answer_that_nobody_hears_of_is_only_there_when_debugging(log: Log) -> None:
    async def work(s: SilentSession) -> None:
        await s.session.engine_session.append(speech(0.5))
        await s.session.responses.start_speculative("item_1")
        await s.session.responses.cancel_speculative()

    s = play(work)
    line = log.one("response")
    assert (line["outcome"], line["speculative"]) == ("dropped", True)
    [record] = [r for r in log.caplog.records if "kind=response" in r.getMessage()]
    assert record.levelno == logging.DEBUG
    assert s.responses() == {}
    assert s.count("stretto_speculations_total", how="dropped") == 1.0


def test_an_answer_that_nobody_hears_of_and_that_fails(log: Log) -> None:
    """It is asked for again, which may work: only the log knows that something went wrong."""

    async def work(s: SilentSession) -> None:
        s.engine.fail_at = 0
        s.engine.error = RuntimeError("oh")
        await s.session.engine_session.append(speech(0.5))
        await s.session.responses.start_speculative("item_1")
        speculative = s.session.responses.speculative
        assert speculative is not None
        while speculative.error is None:
            await asyncio.sleep(0)
        assert await s.session.responses.speculative_turn() is None

    s = play(work)
    line = log.one("response")
    assert (line["outcome"], line["ended"], line["error"]) == ("failed", "RuntimeError", "oh")
    assert any(r.exc_info for r in log.caplog.records if r.name == "stretto.server")
    assert s.responses() == {"failed": 1.0}
    assert s.count("stretto_speculations_total", how="failed") == 1.0


# ---- transcriptions


def test_a_transcription_that_fails(log: Log) -> None:
    async def work(s: SilentSession) -> None:
        s.engine.fail_at = 1
        s.engine.error = StageDead("thinker: it died")
        await s.speak()
        await s.quiet()

    s = play(work)
    line = log.one("transcription")
    assert (line["outcome"], line["error"]) == ("failed", "thinker: it died")
    assert line["tokens"] == 1
    assert s.count("stretto_transcriptions_total", how="failed") == 1.0


def test_a_transcription_that_the_engine_gives_up(log: Log) -> None:
    async def work(s: SilentSession) -> None:
        s.engine.script = lambda ask: [Finished("cancelled", None, Usage(3, 0, 0, 0), 7)]
        await s.speak()
        await s.quiet()

    s = play(work)
    line = log.one("transcription")
    assert (line["outcome"], line["ended"]) == ("failed", "Gone")
    assert s.events("conversation.item.input_audio_transcription.failed")


def test_transcriptions_that_are_refused_and_that_end_with_the_session(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transcribe, "MAX_WAITING", 2)

    async def work(s: SilentSession) -> None:
        s.engine.gate = never
        for _ in range(3):
            await s.speak()

    s = play(work)
    assert [(f["outcome"], f["ended"]) for f in log.lines] == [
        ("failed", "Busy"),
        ("cancelled", "session_closed"),
        ("cancelled", "session_closed"),
    ]
    assert s.count("stretto_transcriptions_total", how="failed") == 1.0
    assert s.count("stretto_transcriptions_total", how="cancelled") == 2.0


def test_a_transcription_of_an_item_that_is_deleted(log: Log) -> None:
    async def work(s: SilentSession) -> None:
        await s.speak()
        [committed] = s.events("input_audio_buffer.committed")
        await s.send("conversation.item.delete", item_id=committed["item_id"])
        await s.quiet()

    s = play(work)
    line = log.one("transcription")
    assert (line["outcome"], line["ended"]) == ("cancelled", "item_deleted")
    assert s.count("stretto_transcriptions_total", how="cancelled") == 1.0


# ---- by itself


def test_a_task_that_dies_is_seen(log: Log) -> None:
    async def main() -> None:
        async def dies() -> None:
            raise RuntimeError("oh")

        task = asyncio.create_task(dies())
        with suppress(RuntimeError):
            await task
        s = SilentSession()
        recorder = AnswerRecorder(s.service.metrics, s.session.recorder.connection)
        recorder.record(AnswerLog("response", "resp_1"), task)
        assert s.responses() == {"failed": 1.0}

    asyncio.run(main())
    line = log.one("response")
    assert (line["outcome"], line["ended"], line["error"]) == ("failed", "RuntimeError", "oh")
    assert any(r.exc_info for r in log.caplog.records if r.name == "stretto.realtime")


def test_the_first_word_about_its_end_counts() -> None:
    answer = AnswerLog("response", "resp_1")
    answer.end("completed", "stop")
    answer.end("cancelled", "session_closed")
    assert (answer.outcome, answer.ended) == ("completed", "stop")


def test_an_event_that_fails_by_the_servers_fault_is_logged(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def commit(*_: Any, **__: Any) -> None:
        raise StageDead("no pipeline is up")

    async def work(s: SilentSession) -> None:
        await s.send("session.update", session={"type": "realtime"})
        monkeypatch.setattr(type(s.session.engine_session), "commit", commit)
        await s.speak()

    s = play(work)
    assert s.events("error")
    warnings = [r.getMessage() for r in log.caplog.records if r.levelno == logging.WARNING]
    assert warnings == [f"{s.session.state.id}: an event failed: no pipeline is up"]
