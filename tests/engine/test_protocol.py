"""The promises of `stretto.engine.protocol`, kept by the real engine and by the scripted one that
stands for it in tests of the server."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from stretto.engine.engine import PipelineEngine
from stretto.engine.events import AudioChunk, Event, Finished, TextDelta
from stretto.engine.protocol import EngineClient
from stretto.engine.session import INPUT_RATE, Session
from stretto.errors import Gone, Invalid
from stretto.params import Params
from stretto.preprocess.pool.jobs import Conversation
from stretto.preprocess.pool.memfile import MemFile
from stretto.types import RequestId
from tests.engine.common import freed
from tests.preprocess.samples import sound_file
from tests.server.conftest import Running, serve
from tests.server.scripted_engine import ScriptedEngine
from tests.server.scripted_session import ScriptedSession

ASKED = [{"role": "user", "content": "Hello?"}]
PARAMS = Params(max_text_tokens=5, max_frames=6, seed=3)
LONG = Params(max_text_tokens=4000, max_frames=4000, temperature=1.0, seed=1, ignore_eos=True)
PACKETS = [np.full(size, 0.1, np.float32) for size in (1365, 1920, 3840)]


@dataclass
class Subject:
    """An engine on a server's event loop."""

    running: Running
    engine: Any
    idle: Callable[[], Awaitable[object]]  # until nothing of a request is held
    names: Iterator[RequestId] = field(
        default_factory=lambda: (RequestId(f"promise-{i}") for i in range(1 << 30))
    )

    def do(self, work: Any) -> Any:
        return self.running.do(work)

    def generate(self, messages: Any = ASKED, **given: Any) -> AsyncIterator[Event]:
        given = {"params": PARAMS, "request_id": next(self.names), **given}
        return self.engine.generate(messages, **given)


@pytest.fixture(params=["scripted", "real"])
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    if request.param == "real":
        running = request.getfixturevalue("real_server")
        engine = running.server.service.engine()
        yield Subject(running, engine, lambda: freed(engine))
    else:
        scripted = ScriptedEngine(pieces=["One", " two", " three"] * 100, packets=PACKETS * 100)
        with serve(scripted) as running:
            yield Subject(running, scripted, lambda: scripted.ledger.idle.wait())


async def collect(events: AsyncIterator[Event]) -> list[Event]:
    return [event async for event in events]


def is_answer(events: list[Event], spoken: bool = True) -> Finished:
    """Sound that tiles its time, and one end after all else; its usage counts what came."""
    *rest, end = events
    assert isinstance(end, Finished)
    assert all(isinstance(e, TextDelta | AudioChunk) for e in rest)
    sounds = [e for e in rest if isinstance(e, AudioChunk)]
    starts = np.cumsum([0, *(len(e.samples) for e in sounds)]).tolist()
    assert [e.start for e in sounds] == starts[:-1]
    assert end.usage.samples == starts[-1]
    assert bool(sounds) == spoken == (end.audio is not None)
    assert end.usage.text_tokens == sum(len(e.ids) for e in rest if isinstance(e, TextDelta))
    assert end.usage.prompt_tokens > 0
    return end


def test_the_methods_are_those_of_the_protocol() -> None:
    """With the same parameters, where they are not taken as they come."""
    for mine, protocol in ((ScriptedEngine, EngineClient), (ScriptedSession, Session)):
        for name in (n for n in dir(protocol) if not n.startswith("_")):
            promised, kept = getattr(protocol, name), getattr(mine, name)
            if not inspect.isfunction(promised):
                continue
            known = inspect.signature(kept).parameters
            if not any(p.kind is p.VAR_KEYWORD for p in known.values()):
                assert list(known) == list(inspect.signature(promised).parameters), name
    methods = {n for n, _ in inspect.getmembers(EngineClient, inspect.isfunction)}
    assert {n for n in methods if not n.startswith("_")} <= set(dir(PipelineEngine))


def test_an_answer_ends_with_one_finished(subject: Subject) -> None:
    is_answer(subject.do(collect(subject.generate())))


def test_text_alone_has_no_sound(subject: Subject) -> None:
    is_answer(subject.do(collect(subject.generate(modalities=("text",)))), spoken=False)


def test_a_text_is_read_aloud(subject: Subject) -> None:
    params = Params(max_frames=6, seed=3)
    events = subject.engine.speak("Read this.", params=params, request_id=next(subject.names))
    got = subject.do(collect(events))
    is_answer(got)
    assert not any(isinstance(e, TextDelta) for e in got)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"voice": "nobody"}, "voice"),
        ({"modalities": ()}, "modalities"),
        ({"modalities": ("smell",)}, "modalities"),
    ],
)
def test_a_mistake_is_refused_before_any_event(
    subject: Subject, given: dict[str, Any], param: str
) -> None:
    with pytest.raises(Invalid) as caught:
        subject.do(collect(subject.generate(**given)))
    assert caught.value.param is not None
    assert caught.value.param.endswith(param)


def test_closing_the_iterator_cancels_the_request(subject: Subject) -> None:
    async def leave() -> None:
        events: Any = subject.generate(params=LONG)
        await anext(events)
        await events.aclose()
        await subject.idle()

    subject.do(leave())
    is_answer(subject.do(collect(subject.generate())))


def test_a_cancelled_reader_cancels_the_request(subject: Subject) -> None:
    async def leave() -> None:
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in subject.generate(params=LONG):
                begun.set()

        reader = asyncio.create_task(read())
        await begun.wait()
        reader.cancel()
        await asyncio.wait([reader])
        await subject.idle()

    subject.do(leave())


def test_it_says_what_it_is(subject: Subject) -> None:
    info, progress = subject.engine.info, subject.engine.progress
    assert info.default_voice in info.voices
    assert (info.sample_rate, progress.state, progress.error) == (24_000, "ready", None)
    assert set(progress.stages.values()) == {"ready"}
    numbers = subject.engine.metrics()
    assert all(isinstance(value, int | float) for value in numbers.values())


def test_no_voice_is_made_by_a_model_without(subject: Subject) -> None:
    clip = Conversation.of(json.dumps(ASKED).encode())
    with pytest.raises(Invalid):
        subject.do(subject.engine.enrol(clip))


def test_a_large_body_is_cut_into_its_fields(subject: Subject) -> None:
    async def outline() -> tuple[bytes, bytes]:
        body = MemFile.sealed(b'{"model": "m", "messages": [1, 2]}')
        try:
            outlined, file = await subject.engine.outline(body, ("messages",), 1000)
        finally:
            body.close()
        with file:
            data = bytes(file.view())
        start, stop = outlined.long["messages"]
        return data[: outlined.short], data[start:stop]

    short, messages = subject.do(outline())
    assert json.loads(short) == {"model": "m"}
    assert json.loads(messages) == [1, 2]


def test_a_long_sound_is_cut_into_windows(subject: Subject) -> None:
    async def cut() -> list[int]:
        sound = MemFile.sealed(sound_file(np.zeros(40_000, np.float32)))
        try:
            windows, file = await subject.engine.cut(sound, 1.0)
        finally:
            sound.close()
        file.close()
        return [stop - start for start, stop in windows.windows]

    assert len(subject.do(cut())) == 3


# ---- sessions


def in_a_session(subject: Subject, work: Callable[[Any], Awaitable[None]]) -> None:
    async def run() -> None:
        session = subject.engine.session(owner="somebody")
        try:
            await work(session)
        finally:
            await session.close()

    subject.do(run())


def voice(seconds: float) -> np.ndarray:
    rng = np.random.default_rng(int(1000 * seconds))
    return rng.uniform(-0.1, 0.1, int(seconds * INPUT_RATE)).astype(np.float32)


async def respond(session: Any, **given: Any) -> list[Event]:
    return await collect(session.respond(params=PARAMS, **given))


def test_an_answer_becomes_part_of_the_conversation(subject: Subject) -> None:
    async def work(s: Any) -> None:
        await s.append(voice(0.5))
        await s.append(voice(0.25))
        assert s.pending == 0.75 * INPUT_RATE
        item = await s.commit("turn")
        assert (item.id, item.role, s.pending) == ("turn", "user", 0)
        asked: list[Any] = []
        events = await respond(s, on_prompt=asked.append)
        end = is_answer(events)
        assert [u.prompt_tokens for u in asked] == [end.usage.prompt_tokens]
        said = "".join(e.text for e in events if isinstance(e, TextDelta))
        assert [i.role for i in s.items] == ["user", "assistant"]
        assert s.items[1].message == {"role": "assistant", "content": said}
        await respond(s, remember=False)
        assert len(s.items) == 2

    in_a_session(subject, work)


def test_items_are_put_where_they_belong(subject: Subject) -> None:
    async def work(s: Any) -> None:
        for id, after in (("b", "end"), ("d", "end"), ("a", None), ("c", "b")):
            await s.add({"role": "user", "content": id}, id=id, after=after)
        assert [i.id for i in s.items] == ["a", "b", "c", "d"]
        await s.remove("b")
        await s.replace("c", {"role": "user", "content": "other"})
        assert [i.message["content"] for i in s.items] == ["a", "other", "d"]
        for mistake in (
            s.add({"role": "user", "content": "again"}, id="a"),
            s.add({"role": "user", "content": "x"}, after="nowhere"),
            s.remove("b"),
            s.replace("b", {"role": "user", "content": "x"}),
        ):
            with pytest.raises(Invalid):
                await mistake
        assert len(s.items) == 3
        other = await s.item({"role": "user", "content": "aside"})
        is_answer(await respond(s, items=[other], remember=False))
        assert len(s.items) == 3

    in_a_session(subject, work)


def test_a_turn_that_was_not_over_goes_on(subject: Subject) -> None:
    async def work(s: Any) -> None:
        await s.append(voice(0.5))
        await s.commit("turn", maybe=True)
        await s.reopen("turn")
        assert (s.items, s.pending) == ((), 0.5 * INPUT_RATE)
        await s.append(voice(0.25))
        assert (await s.draft()).role == "user"
        assert s.pending == 0.75 * INPUT_RATE
        await s.commit("turn", maybe=True)
        await s.append(voice(0.25))
        with pytest.raises(Invalid):
            await s.reopen("turn")
        await s.clear()
        assert s.pending == 0
        for mistake in (s.commit(), s.draft(), s.reopen("turn")):
            with pytest.raises(Invalid):
                await mistake

    in_a_session(subject, work)


def test_a_session_with_nothing_to_answer(subject: Subject) -> None:
    async def work(s: Any) -> None:
        with pytest.raises(Invalid):
            await respond(s)
        with pytest.raises(Invalid):
            await respond(s, modalities=())
        assert s.items == s.dropped == ()

    in_a_session(subject, work)


def test_an_answer_that_is_left_is_remembered_so_far(subject: Subject) -> None:
    async def work(s: Any) -> None:
        await s.add({"role": "user", "content": "Hello?"})
        events = s.respond(params=LONG)
        said = ""
        async for event in events:
            if isinstance(event, TextDelta):
                said += event.text
            if len(said) > 3:
                break
        await events.aclose()
        await subject.idle()
        assert s.items[-1].message == {"role": "assistant", "content": said}

    in_a_session(subject, work)


def test_a_closed_session_is_gone(subject: Subject) -> None:
    async def work(s: Any) -> None:
        await s.add({"role": "user", "content": "Hello?"})
        await s.close()
        assert s.items == ()
        for late in (s.append(voice(0.1)), s.commit(), s.clear(), s.add(ASKED[0])):
            with pytest.raises(Gone):
                await late
        with pytest.raises(Gone):
            await respond(s)

    in_a_session(subject, work)
