"""Nonsense in, an answer out: 20,000 events, and interruptions at any moment. Nothing dies, nothing
stays behind."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Iterator

import pytest

from stretto.engine.events import AudioChunk
from tests.server.conftest import Running
from tests.server.realtime.client import Json, check, talk
from tests.server.realtime.conftest import talking
from tests.server.realtime.order import Order
from tests.server.realtime.sounds import pcm, silence, speech
from tests.server.scripted_engine import ScriptedEngine
from tests.server.scripted_session import Ask, say
from tests.slow.fuzz.realtime import Fuzz, Judge, fuzz_sessions

EVENTS = 12_000
MOMENTS = 40


def new_judge() -> Judge:
    """Every event is one that strict clients know, and comes where they expect it."""
    order = Order()

    def judge(event: Json) -> None:
        check(event)
        order.see(event)

    return judge


def left_behind(running: Running) -> list[str]:
    """Tasks of sessions that still run."""

    async def names() -> list[str]:
        return [
            t.get_name()
            for t in asyncio.all_tasks()
            if t.get_name() in ("response", "transcription")
        ]

    running.do(running.server.service.sessions.idle.wait())
    return running.do(names())


@pytest.fixture
def _quick_switches() -> Iterator[None]:
    """Server, client and detector are threads of one process here: they should not wait long for
    each other."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_quick_switches")
def test_fuzzed_events() -> None:
    engine = ScriptedEngine(script=lambda ask: say("one two three", 0.3, 3))
    with talking(engine) as running:
        url = f"ws://127.0.0.1:{running.port}/v1/realtime"
        seen, problems = asyncio.run(fuzz_sessions(url, EVENTS, 0, new_judge, patience_s=None))
        assert not problems
        assert left_behind(running) == []
        assert not engine.ledger.running
        assert all(s.closed for s in engine.sessions)
        assert running.server.service.admission.running == 0
        assert running.ask("/health").status == 200
    # It was not all noise: much of it meant something, and the rest was told apart.
    assert seen["session.updated"] > EVENTS // 50
    assert seen["response.done"] > EVENTS // 50
    assert seen["input_audio_buffer.speech_started"] > 10
    codes = {k for k in seen if k.startswith("error ")}
    assert {"error invalid_json", "error invalid_event", "error invalid_value"} <= codes


def test_a_seed_draws_the_same_events() -> None:
    one, two = Fuzz(3), Fuzz(3)
    assert [one.message() for _ in range(50)] == [two.message() for _ in range(50)]


@pytest.mark.usefixtures("_quick_switches")
@pytest.mark.parametrize("by", ["speech", "client"])
def test_interruption_at_any_moment(by: str) -> None:
    """At seeded moments: nothing of the answer comes after its end, history is what was heard, all
    is given back."""
    words = [f"w{i}" for i in range(30)]

    def script(ask: Ask) -> list:  # type: ignore[type-arg]
        return say(" ".join(words), 3.0, 30)

    async def slowly(i: int) -> None:
        await asyncio.sleep(0)

    engine = ScriptedEngine(script=script, gate=slowly)
    question = pcm(silence(0.1), speech(0.5), silence(0.6))
    with talking(engine) as running:
        for seed in range(MOMENTS):
            rng = random.Random(seed)
            stop_after = rng.randrange(0, 60)
            hold = asyncio.Event()

            async def gate(
                i: int, stop_after: int = stop_after, hold: asyncio.Event = hold
            ) -> None:
                if i == stop_after:
                    await hold.wait()

            with talk(running) as c:
                engine.gate = gate
                c.append(question)
                response = c.until("response.created")["response"]["id"]
                num_events = sum(
                    1 for e in script(Ask([], {}))[:stop_after] if isinstance(e, AudioChunk)
                )
                for _ in range(num_events):
                    c.until("response.output_audio.delta")
                if by == "speech":
                    c.append(pcm(speech(0.3)))
                else:
                    c.send("response.cancel")
                done = c.until("response.done")["response"]
                assert (done["id"], done["status"]) == (response, "cancelled")
                running.loop.call_soon_threadsafe(hold.set)
                engine.gate = None
                later = c.sync()
                mine = {response}
                assert not [
                    e
                    for e in later
                    if mine & {e.get("response_id"), e.get("response", {}).get("id")}
                ]
                running.do(engine.ledger.idle.wait())
                session = engine.sessions[-1]
                remembered = [
                    i.message["content"] for i in session.items if i.message["role"] == "assistant"
                ]
                transcripts = [o["content"][0]["transcript"] for o in done["output"]]
                assert all(t.startswith(s) for s, t in zip(remembered, transcripts, strict=False))
                if done["output"]:
                    c.send(
                        "conversation.item.truncate",
                        item_id=done["output"][0]["id"],
                        content_index=0,
                        audio_end_ms=1000,
                    )
                    c.until("conversation.item.truncated")
                    stored = [
                        i.message["content"]
                        for i in session.items
                        if i.message["role"] == "assistant"
                    ]
                    assert stored == [] or (
                        len(stored) == 1
                        and transcripts[0].startswith(stored[0])
                        and len(stored[0].split()) <= 11
                    )
        assert left_behind(running) == []
        assert not engine.ledger.running
        assert running.server.service.admission.running == 0
