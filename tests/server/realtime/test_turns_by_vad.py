"""Turns that the server finds: events, what the model gets to hear, interruption, answers begun
early."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from tests.server.conftest import Running, serve
from tests.server.realtime.client import Client, Json, hold, talk, types
from tests.server.realtime.conftest import talking
from tests.server.realtime.sounds import pcm, silence, speech
from tests.server.scripted_engine import ScriptedEngine
from tests.server.scripted_session import Ask, say

TURN = pcm(silence(0.5), speech(1.0), silence(0.8))
WINDOW_MS = 32


def run_turn(c: Client, data: bytes = TURN) -> list[Json]:
    c.append(data)
    return c.collect("response.done")


def lengths(ask: Ask) -> list[float]:
    """Seconds of each sound the model was given."""
    parts = [p for m in ask.messages if isinstance(m["content"], list) for p in m["content"]]
    return [len(p["data"]) / 16_000 for p in parts if p["type"] == "audio"]


def test_a_turn_is_found_and_answered(running: Running, engine: ScriptedEngine) -> None:
    with talk(running) as c:
        events = run_turn(c)
    assert types(events)[:6] == [
        "input_audio_buffer.speech_started", "input_audio_buffer.speech_stopped",
        "input_audio_buffer.committed",
        "conversation.item.added", "conversation.item.done", "response.created",
    ]  # fmt: skip
    started, stopped, committed, added = events[:4]
    assert started["item_id"] == stopped["item_id"] == committed["item_id"] == added["item"]["id"]
    assert 200 - 2 * WINDOW_MS <= started["audio_start_ms"] <= 200 + WINDOW_MS
    assert 1500 + 200 <= stopped["audio_end_ms"] <= 1500 + 200 + 2 * WINDOW_MS
    [seconds] = lengths(engine.asks[0])
    assert abs(seconds * 1000 - (stopped["audio_end_ms"] - started["audio_start_ms"])) <= 1
    done = events[-1]["response"]
    assert done["status"] == "completed"
    assert done["stretto"]["vad_wait_s"] == stopped["vad_wait_s"] == 0.512
    assert done["stretto"]["speech_to_audio_s"] >= 0.512


def test_with_the_real_detector(engine: ScriptedEngine) -> None:
    with serve(engine, drain_timeout=1.0) as running, talk(running) as c:
        events = run_turn(c)
        assert types(events)[:3] == [
            "input_audio_buffer.speech_started", "input_audio_buffer.speech_stopped",
            "input_audio_buffer.committed",
        ]  # fmt: skip
        assert 100 <= events[0]["audio_start_ms"] <= 400
        assert 1500 <= events[1]["audio_end_ms"] <= 2000


def test_silence_is_neither_answered_nor_encoded(running: Running, engine: ScriptedEngine) -> None:
    with talk(running) as c:
        c.append(pcm(silence(3.0)))
        assert c.sync() == []
        assert engine.sessions[0].pending == 0
        c.append(TURN)
        c.until("response.done")
    assert lengths(engine.asks[0])[0] < 1.7


def test_sound_reaches_the_engine_while_it_is_spoken(
    running: Running, engine: ScriptedEngine
) -> None:
    with talk(running) as c:
        c.append(pcm(silence(0.5), speech(1.0)))
        assert types(c.sync()) == ["input_audio_buffer.speech_started"]
        assert engine.sessions[0].pending > 0.9 * 16_000
        c.append(pcm(silence(1.0)))
        c.until("response.done")


def test_the_next_turn_does_not_get_the_last_one_s_sound(
    running: Running, engine: ScriptedEngine
) -> None:
    with talk(running) as c:
        run_turn(c, pcm(speech(1.0), silence(0.6)))
        run_turn(c, pcm(speech(1.0), silence(0.6)))
    first, second = lengths(engine.asks[1])
    assert 1.0 < first < 1.0 + 0.224 + 0.07
    assert 1.3 < second < 1.0 + 0.3 + 0.224 + 0.07


def test_without_create_response_turns_are_found_all_the_same(
    running: Running, engine: ScriptedEngine
) -> None:
    with talk(running) as c:
        c.update(
            audio={"input": {"turn_detection": {"type": "server_vad", "create_response": False}}}
        )
        c.append(TURN)
        c.until("conversation.item.done")
        c.sync()
        assert not engine.asks
        c.send("response.create")
        c.until("response.done")
    assert len(lengths(engine.asks[0])) == 1


@pytest.mark.parametrize(
    ("eagerness", "pause", "ends"), [("high", 0.45, True), ("low", 1.5, False), ("low", 1.7, True)]
)
def test_semantic_detection_waits_as_it_is_eager(
    running: Running, eagerness: str, pause: float, ends: bool
) -> None:
    with talk(running) as c:
        wire = c.update(
            audio={"input": {"turn_detection": {"type": "semantic_vad", "eagerness": eagerness}}}
        )
        assert wire["audio"]["input"]["turn_detection"]["interrupt_response"] is True
        c.append(pcm(silence(0.1), speech(0.6), silence(pause)))
        assert ("input_audio_buffer.speech_stopped" in types(c.sync())) == ends


def test_the_client_may_end_a_turn_of_the_server_s(
    running: Running, engine: ScriptedEngine
) -> None:
    with talk(running) as c:
        c.append(pcm(silence(0.3), speech(0.5)))
        started = c.until("input_audio_buffer.speech_started")
        c.send("input_audio_buffer.commit")
        assert c.until("input_audio_buffer.committed")["item_id"] == started["item_id"]
        c.append(pcm(silence(1.0)))
        assert "input_audio_buffer.speech_stopped" not in types(c.sync())
        c.send("response.create")
        c.until("response.done")
    assert abs(lengths(engine.asks[0])[0] - 0.8) < 0.1


def test_what_is_being_spoken_has_its_name(running: Running, engine: ScriptedEngine) -> None:
    """A client cannot put another item in its place."""
    with talk(running) as c:
        c.append(pcm(silence(0.3), speech(0.5)))
        started = c.until("input_audio_buffer.speech_started")
        text = [{"type": "input_text", "text": "x"}]
        item = {"id": started["item_id"], "type": "message", "role": "user", "content": text}
        c.send("conversation.item.create", item=item)
        assert c.until("error")["error"]["code"] == "item_create_duplicate_item_id"
        c.append(pcm(silence(1.0)))
        assert c.until("response.done")["response"]["status"] == "completed"
    assert len(lengths(engine.asks[0])) == 1


def test_idle_timeout(running: Running, engine: ScriptedEngine) -> None:
    with talk(running) as c:
        c.update(
            audio={"input": {"turn_detection": {"type": "server_vad", "idle_timeout_ms": 1000}}}
        )
        run_turn(c)
        c.append(pcm(silence(0.9)))
        assert c.sync() == []
        c.append(pcm(silence(1.3)))  # the answer's second of sound counts as well
        event = c.until("input_audio_buffer.timeout_triggered")
        assert event["audio_end_ms"] - event["audio_start_ms"] >= 1000
        assert c.until("input_audio_buffer.committed")["item_id"] == event["item_id"]
        c.until("response.done")
    assert len(engine.asks) == 2


# ---- interruption


def interrupted(
    c: Client, running: Running, engine: ScriptedEngine, at: int = 6
) -> tuple[list[Json], Any]:
    """Speak, let the answer begin, and speak again into it."""
    go_on = hold(running, engine, at)
    c.append(TURN)
    c.until("response.output_audio.delta")
    c.append(pcm(speech(0.4)))
    return c.collect("response.done"), go_on


def test_speech_stops_an_answer(running: Running, engine: ScriptedEngine) -> None:
    with talk(running) as c:
        events, go_on = interrupted(c, running, engine)
        kinds = types(events)
        assert kinds.index("input_audio_buffer.speech_started") < kinds.index(
            "response.output_audio.done"
        )
        assert kinds[kinds.index("response.output_audio.done") :] == [
            "response.output_audio.done", "response.output_audio_transcript.done",
            "response.content_part.done",
            "conversation.item.done", "response.output_item.done", "response.done",
        ]  # fmt: skip
        done = events[-1]["response"]
        assert (done["status"], done["status_details"]["reason"]) == ("cancelled", "turn_detected")
        assert done["output"][0]["status"] == "incomplete"
        assert all(
            isinstance(done["usage"][k], int)
            for k in ("total_tokens", "input_tokens", "output_tokens")
        )
        running.do(engine.ledger.idle.wait())  # the engine has let go
        go_on()
        engine.gate = None
        c.append(pcm(silence(1.0)))
        later = c.collect("response.done")
        assert not [
            e
            for e in later
            if done["id"] in (e.get("response_id"), e.get("response", {}).get("id"))
        ]
        # What clients then say about it still finds the item.
        item = done["output"][0]["id"]
        c.send("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=10**9)
        wire = c.until("conversation.item.truncated")
        assert wire["audio_end_ms"] < 10**5
        c.send("response.cancel")
        assert c.until("error")["error"]["code"] == "response_cancel_not_active"
    text = running.ask("/metrics").body.decode()
    assert 'stretto_barge_in_total{by="speech"} 1.0' in text
    assert "stretto_cancel_seconds_count 1.0" in text


def test_speech_leaves_an_answer_alone_if_asked_to(
    running: Running, engine: ScriptedEngine
) -> None:
    with talk(running) as c:
        c.update(
            audio={"input": {"turn_detection": {"type": "server_vad", "interrupt_response": False}}}
        )
        go_on = hold(running, engine, 6)
        c.append(TURN)
        c.until("response.output_audio.delta")
        c.append(pcm(speech(0.5), silence(1.0)))
        c.until("input_audio_buffer.committed")
        engine.gate = None
        go_on()
        assert c.until("response.done")["response"]["status"] == "completed"
        assert (
            c.until("response.done")["response"]["status"] == "completed"
        )  # to what was said meanwhile
    assert [len(lengths(a)) for a in engine.asks] == [1, 2]


def test_history_is_what_was_heard(running: Running, engine: ScriptedEngine) -> None:
    words = " ".join(f"word{i}" for i in range(20))
    engine.script = lambda ask: say(words, 10.0, 10)
    with talk(running) as c:
        c.manual()
        c.send("conversation.item.create", item=text_item("Count."))
        c.send("response.create")
        c.until("response.output_audio.delta")
        event = c.until("response.done")["response"]
        item = event["output"][0]["id"]
        for ms, last in ((5000, 9), (100, None), (7600, 14), (10**9, 19)):
            c.send("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=ms)
            assert c.until("conversation.item.truncated")["audio_end_ms"] == min(ms, 10_000)
            c.send("conversation.item.retrieve", item_id=item)
            transcript = c.until("conversation.item.retrieved")["item"]["content"][0]["transcript"]
            assert transcript == " ".join(words.split()[: 0 if last is None else last + 1])
        c.send("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=5000)
        c.send("conversation.item.create", item=text_item("Go on."))
        c.send("response.create")
        c.until("response.done")
    assert engine.asks[1].texts == [
        "user: Count.",
        "assistant: " + " ".join(words.split()[:10]),
        "user: Go on.",
    ]


def test_a_truncate_before_the_cancel_counts(running: Running, engine: ScriptedEngine) -> None:
    """Some clients say what was heard first, and stop the answer then."""
    words = " ".join(f"word{i}" for i in range(20))
    engine.script = lambda ask: say(words, 5.0, 5)
    with talk(running) as c:
        c.manual()
        go_on = hold(running, engine, 24)
        c.send("conversation.item.create", item=text_item("Count."))
        c.send("response.create")
        item = c.until("response.output_item.added")["item"]["id"]
        while "word18" not in c.until("response.output_audio_transcript.delta")["delta"]:
            pass
        c.send("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=1000)
        c.until("conversation.item.truncated")
        c.send("response.cancel")
        assert (
            c.until("response.done")["response"]["status_details"]["reason"] == "client_cancelled"
        )
        go_on()
        engine.gate = None
        c.send("response.create")
        c.until("response.done")
    played = engine.asks[1].texts[1].removeprefix("assistant: ").split()
    assert played == words.split()[: len(played)]
    assert 1 <= len(played) <= 4  # a second of twenty words of about half a second


def text_item(text: str) -> Json:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def test_what_was_not_heard_at_all_is_forgotten(running: Running, engine: ScriptedEngine) -> None:
    with talk(running) as c:
        events, go_on = interrupted(c, running, engine)
        item = events[-1]["response"]["output"][0]["id"]
        c.send("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=0)
        c.until("conversation.item.truncated")
        engine.gate = None
        go_on()
        c.append(pcm(silence(1.0)))
        c.until("response.done")
    assert [t.split(":")[0] for t in engine.asks[-1].texts] == ["user", "user"]


# ---- answers begun before the turn is surely over


def answers(
    engine: ScriptedEngine, sound: bytes, piece: int, **settings: Any
) -> tuple[list[str], list[bytes], list[Any]]:
    """All that is said in a conversation by VAD: words, sound, and what the engine was asked each
    time that counted."""
    words, sounds = [], []
    with talking(engine, **settings) as running, talk(running) as c:
        c.append(sound, piece)
        events = c.sync()
        while types(events).count("response.done") < types(events).count("response.created"):
            c.until("response.done")
            events = list(c.seen)
        for e in (e for e in c.seen if e["type"] == "response.done"):
            words.append(e["response"]["output"][0]["content"][0]["transcript"])
            mine = [x for x in c.seen if x["type"] == "response.output_audio.delta"]
            got = (
                base64.b64decode(x["delta"])
                for x in mine
                if x["response_id"] == e["response"]["id"]
            )
            sounds.append(b"".join(got))
    return words, sounds, [lengths(a) for a in engine.asks]


def test_the_same_is_said_with_and_without() -> None:
    # A pause that is not the end, one that is, and a second turn after the answer.
    sound = pcm(
        silence(0.3),
        speech(0.7),
        silence(0.35),
        speech(0.6, seed=2),
        silence(0.8),
        speech(0.5, seed=3),
        silence(0.7),
    )

    def script(ask: Ask) -> Any:
        return say(f"I heard {lengths(ask)}.", 0.3, 3)

    early = answers(ScriptedEngine(script=script), sound, 4800)
    late = answers(ScriptedEngine(script=script), sound, 4800, realtime_speculate=False)
    assert early[:2] == late[:2]
    assert len(late[0]) == 2
    assert late[2] == [early[2][1], early[2][2]]  # and one that nobody heard
    assert len(early[2]) == 3


def test_nothing_is_heard_of_an_answer_before_the_turn_is_over(
    running: Running, engine: ScriptedEngine
) -> None:
    with talk(running) as c:
        c.append(pcm(silence(0.3), speech(0.7), silence(0.35)))
        assert types(c.sync()) == ["input_audio_buffer.speech_started"]
        running.do(engine.ledger.idle.wait())
        assert len(engine.asks) == 1  # it was made all the same
        c.append(pcm(speech(0.5), silence(1.0)))
        done = c.until("response.done")["response"]
        assert done["stretto"]["speculative"] is True
    assert len(engine.asks) == 2
    assert (
        engine.asks[1].texts == ["user: [2.08 s]"] or abs(lengths(engine.asks[1])[0] - 2.07) < 0.07
    )
    text = running.ask("/metrics").body.decode()
    assert 'stretto_speculations_total{how="dropped"} 1.0' in text
    assert 'stretto_speculations_total{how="kept"} 1.0' in text


def test_an_event_in_the_pause_is_part_of_the_question(
    running: Running, engine: ScriptedEngine
) -> None:
    with talk(running) as c:
        c.append(pcm(silence(0.3), speech(0.7), silence(0.35)))
        c.sync()
        c.send("conversation.item.create", item=text_item("Look at this, too."))
        c.until("conversation.item.done")
        c.append(pcm(silence(0.5)))
        c.until("response.done")
    assert [t.split(":")[1][:6] for t in engine.asks[-1].texts] == [" Look ", " [1.25"]


def test_an_early_answer_that_failed_is_made_again(
    running: Running, engine: ScriptedEngine
) -> None:
    engine.fail_at, engine.error = 0, RuntimeError("full")
    with talk(running) as c:
        c.append(pcm(silence(0.3), speech(0.7), silence(0.35)))
        c.sync()
        running.do(engine.ledger.idle.wait())
        engine.fail_at = None
        c.append(pcm(silence(0.5)))
        assert c.until("response.done")["response"]["status"] == "completed"
    assert np.allclose(lengths(engine.asks[0]), lengths(engine.asks[1]))


# ---- words of what was said


def test_transcription(running: Running, engine: ScriptedEngine) -> None:
    with talk(running) as c:
        c.update(
            audio={
                "input": {"transcription": {"model": "gpt-4o-mini-transcribe", "language": "en"}}
            }
        )
        c.append(TURN)
        done = c.until("conversation.item.input_audio_transcription.completed")
        item = next(e for e in c.seen if e["type"] == "input_audio_buffer.committed")["item_id"]
        assert (done["item_id"], done["transcript"], done["content_index"]) == (
            item,
            "what was said",
            0,
        )
        assert done["usage"]["type"] == "tokens"
        deltas = [
            e for e in c.seen if e["type"] == "conversation.item.input_audio_transcription.delta"
        ]
        assert "".join(e["delta"] for e in deltas) == "what was said"
        first = next(i for i, e in enumerate(c.seen) if e["type"] == "response.output_audio.delta")
        assert first < c.seen.index(deltas[0])  # the answer goes first
        c.send("conversation.item.retrieve", item_id=item)
        part = c.until("conversation.item.retrieved")["item"]["content"][0]
        assert part == {"type": "input_audio", "transcript": "what was said"}
    request = engine.asks[-1]
    assert request.texts[0].endswith("Transcribe the English audio into text.")
    assert request.given["modalities"] == ("text",)
    assert request.given["remember"] is False
    assert request.given["params"].priority > 0


def test_a_model_that_cannot_transcribe(running: Running, engine: ScriptedEngine) -> None:
    """The client shows that something was said; the model is asked for the answer alone."""
    engine.transcription = None
    with talk(running) as c:
        c.update(audio={"input": {"transcription": {}}})
        c.append(TURN)
        done = c.until("conversation.item.input_audio_transcription.completed")
        assert done["transcript"] == "(spoken)"
        assert done["usage"]["total_tokens"] == 0
        c.until("response.done")
        c.send("conversation.item.retrieve", item_id=done["item_id"])
        part = c.until("conversation.item.retrieved")["item"]["content"][0]
        assert part.get("transcript") is None
    assert len(engine.asks) == 1


def test_a_transcription_waits_for_the_answer_s_first_sound(
    running: Running, engine: ScriptedEngine
) -> None:
    with talk(running) as c:
        c.update(audio={"input": {"transcription": {}}})
        go_on = hold(running, engine, 0)
        c.append(TURN)
        c.until("response.created")
        c.sync()
        assert len(engine.asks) == 1
        engine.gate = None
        go_on()
        c.until("conversation.item.input_audio_transcription.completed")
    assert len(engine.asks) == 2


def test_a_transcription_that_fails(running: Running, engine: ScriptedEngine) -> None:
    from stretto.errors import Busy

    with talk(running) as c:
        c.manual(audio={"input": {"transcription": {}}})
        for error, code in (
            (Busy("full"), "server_busy"),
            (ValueError("a fault of ours"), "internal_error"),
        ):
            engine.fail_at, engine.error = 0, error
            c.append(pcm(speech(0.5)))
            c.send("input_audio_buffer.commit")
            failed = c.until("conversation.item.input_audio_transcription.failed")
            assert failed["error"]["code"] == code
        engine.fail_at = None
        c.send("response.create")
        c.until("response.done")
