"""Sessions: whatever was read ahead, however the sound was cut and whatever the caches have lost,
an answer is that of the plain driver to the whole conversation; and what is left to do after a turn
does not grow with its length."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pytest

from stretto.config.engine import EngineConfig, HostSettings, PoolSettings
from stretto.engine.engine import PipelineEngine
from stretto.engine.events import AudioChunk, Event
from stretto.engine.request_manager import RequestManager, clamp_params
from stretto.engine.session import INPUT_RATE, Session, oldest_turn
from stretto.engine.sync import LoopThread
from stretto.errors import Gone, Invalid, MediaError, TooLong
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.load import Models
from stretto.models.qwen3_omni.prompts import PromptBuilder
from stretto.params import Params, RequestOptions
from stretto.preprocess import messages as messages_module
from stretto.preprocess.media import MediaLimits
from stretto.preprocess.packed_prompt import PackedPrompt
from tests.engine.common import (
    Answer,
    collect,
    come_to,
    expected,
    freed,
    picture,
    run,
    same,
    say,
    stats,
)
from tests.pipeline import ONE_HOST, PROCESSES
from tests.preprocess.pool.workers import heavy, until

T = TypeVar("T")
Samples = npt.NDArray[np.float32]
PARAMS = Params(max_text_tokens=6, max_frames=7, seed=5, want_codes=True)
WORDS = "What did you hear?"
BLOCK, WINDOW = 16, 104  # rows
EIGHT = (8.02, 0.013, 17.3, 8.0, 0.3, 33.0, 5.0, 12.9)  # seconds
ROWS, ENCODED = "stretto_stage_rows_total", "stretto_stage_encoded_total"
STEPS = "stretto_stage_steps_total"
CHANGED = "stretto_engine_windows_changed_total"


@pytest.fixture(scope="module")
def builder(tiny_dir: Path) -> PromptBuilder:
    return PromptBuilder.open(tiny_dir, OmniConfig.read(tiny_dir))


class Stand:
    """An engine, and the answers that it must give."""

    def __init__(
        self, model: Path, config: EngineConfig, models: Models, builder: PromptBuilder
    ) -> None:
        self.thread = LoopThread()
        self.models = models
        self.builder = builder
        try:
            self.engine = self.run(self._start(model, config))
        except BaseException:
            self.thread.close()
            raise

    @staticmethod
    async def _start(model: Path, config: EngineConfig) -> PipelineEngine:
        engine = PipelineEngine(model, config)
        await engine.start()
        return engine

    def __enter__(self) -> Stand:
        return self

    def __exit__(self, *exc: object) -> None:
        self.thread.close(self.engine.close())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.thread.run(work)

    def want(self, messages: list[dict[str, Any]]) -> Answer:
        return expected(self.models, self.builder, messages, PARAMS)

    async def answer(self, s: Session, **more: Any) -> Answer:
        return await collect(s.respond(params=PARAMS, **more))


@pytest.fixture(scope="module", params=[ONE_HOST, PROCESSES], ids=["one", "shm"])
def stand(
    request: pytest.FixtureRequest, tiny_dir: Path, models: Models, builder: PromptBuilder
) -> Iterator[Stand]:
    with Stand(tiny_dir, EngineConfig(placement=request.param), models, builder) as stand:
        yield stand


in_one_host = pytest.mark.parametrize("stand", [ONE_HOST], indirect=True, ids=["one"])


def voice(seconds: float, seed: int, burst_at: float | None = None) -> Samples:
    """Sound with pauses. At `burst_at`, much louder than before: the floor of all its features
    rises."""
    rng, n = np.random.default_rng(seed), int(INPUT_RATE * seconds)
    loud = np.repeat(rng.choice([1e-5, 0.01, 0.1], n // 4000 + 1), 4000)[:n]
    wave = loud * np.sin(np.cumsum(rng.uniform(0.02, 0.2, n)))
    if burst_at is not None:
        at = int(INPUT_RATE * burst_at)
        wave[at : at + 800] = rng.uniform(-1, 1, 800)[: n - at]
    return wave.astype(np.float32)


def heard(samples: Samples, *more: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "audio", "data": samples}, *more]}


async def speak(s: Session, samples: Samples, rng: random.Random) -> None:
    """In pieces of 20 ms to 5 s, cut anywhere."""
    at = 0
    while at < len(samples):
        size = int(INPUT_RATE * 0.02 * 250 ** rng.random())
        await s.append(samples[at : at + size])
        at += size


@pytest.mark.parametrize(
    ("seconds", "burst_at"),
    [((0.3,), None), (EIGHT, 0.0), ((26.1,), 25.0), ((60.0,), 41.0), ((200.0,), 0.0)],
    ids=["short", "eight at once", "louder at the end", "long", "very long"],
)
def test_sound_in_pieces_is_the_whole_sound(
    stand: Stand, seconds: tuple[float, ...], burst_at: float | None
) -> None:
    sounds = [voice(t, i, burst_at) for i, t in enumerate(seconds)]

    async def one(samples: Samples, seed: int) -> Answer:
        async with stand.engine.session() as s:
            await speak(s, samples, random.Random(seed))
            assert s.pending == len(samples)
            await s.commit()
            assert s.pending == 0
            return await stand.answer(s)

    async def all_of_them() -> list[Answer]:
        return await asyncio.gather(*(one(samples, seed) for seed, samples in enumerate(sounds)))

    changed = stand.engine.metrics()[CHANGED]
    for got, samples in zip(stand.run(all_of_them()), sounds, strict=True):
        same(got, stand.want([heard(samples)]))
    assert (stand.engine.metrics()[CHANGED] > changed) == bool(burst_at)


def test_what_is_left_after_a_turn_does_not_grow_with_it(stand: Stand) -> None:
    """In windows to encode, in rows of both stages and in steps; told in the usage, and counted by
    the stages."""

    async def after(seconds: float, speech: bool) -> tuple[Answer, dict[str, float]]:
        modalities = ("text", "audio") if speech else ("text",)
        async with stand.engine.session() as s:
            s.expect(modalities=modalities, instructions="Answer briefly.")
            await speak(
                s, voice(seconds, int(10 * seconds) + speech, burst_at=0.0), random.Random(1)
            )
            await s.read()
            before = await stats(stand.engine)
            await s.commit()
            got = await stand.answer(s, modalities=modalities, instructions="Answer briefly.")
            values = await stats(stand.engine)
        return got, {
            k: v - before[k] for k, v in values.items() if k.startswith((ROWS, ENCODED, STEPS))
        }

    for speech in (True, False):
        for seconds in (13.0, 197.0):
            got, work = stand.run(after(seconds, speech))
            assert got.end is not None
            usage = got.end.usage
            assert usage.encoded_pieces == 1
            assert usage.prompt_tokens - usage.cached_tokens < BLOCK + WINDOW
            assert work[ENCODED + '{stage="thinker"}'] == 1
            assert work[ROWS + '{stage="thinker"}'] < BLOCK + WINDOW + PARAMS.max_text_tokens
            assert work[STEPS + '{stage="thinker",kind="prefill"}'] == 1
            talker = work[ROWS + '{stage="talker"}']
            assert talker < BLOCK + WINDOW + 16 + PARAMS.max_frames + 2 if speech else talker == 0


def test_turns_remember_the_earlier_ones(stand: Stand) -> None:
    """Each slice is a turn; text and pictures come between. Only what is new is sent and
    encoded."""
    first, second = voice(9.0, 21), voice(12.0, 22)

    async def talk() -> list[Answer]:
        async with stand.engine.session() as s:
            got = []
            for turn, samples in enumerate((first, second)):
                await speak(s, samples, random.Random(turn))
                await s.commit()
                got.append(await stand.answer(s))
            await s.add({"role": "user", "content": [picture(), say(WORDS)]})
            got.append(await stand.answer(s))
            assert [i.message["role"] for i in s.items] == ["user", "assistant"] * 3
            return got

    answers = stand.run(talk())
    history: list[dict[str, Any]] = []
    turns = (heard(first), heard(second), {"role": "user", "content": [picture(), say(WORDS)]})
    for got, turn in zip(answers, turns, strict=True):
        history.append(turn)
        same(got, stand.want(history))
        history.append({"role": "assistant", "content": got.text})
    ends = [a.end for a in answers if a.end is not None]
    assert [e.usage.encoded_pieces for e in ends] == [1, 1, 1]
    assert all(e.usage.cached_tokens >= WINDOW - BLOCK for e in ends)


@in_one_host
def test_what_was_read_ahead_for_another_answer_is_read_again(stand: Stand) -> None:
    """Words were expected, and speech is asked for; then behind other instructions."""
    samples = voice(11.0, 31)

    async def talk() -> list[Answer]:
        async with stand.engine.session() as s:
            s.expect(modalities=("text",))
            await speak(s, samples, random.Random(2))
            await s.commit()
            return [
                await stand.answer(s, remember=False),
                await stand.answer(s, remember=False, instructions="Be brief."),
            ]

    plain, told = stand.run(talk())
    same(plain, stand.want([heard(samples)]))
    same(told, stand.want([{"role": "system", "content": "Be brief."}, heard(samples)]))


@in_one_host
def test_an_answer_that_is_closed_leaves_nothing_and_the_next_is_the_same(stand: Stand) -> None:
    """A guess at the end of the turn, given up when speech goes on; and sound that is forgotten
    while it is read."""
    samples, more = voice(10.0, 41), voice(3.0, 42)

    async def talk() -> Answer:
        async with stand.engine.session() as s:
            await speak(s, voice(30.0, 43), random.Random(3))
            await s.clear()
            assert s.pending == 0
            await freed(stand.engine)
            await speak(s, samples, random.Random(4))
            guess = await s.commit(maybe=True)
            async with aclosing(s.respond(params=Params(min_frames=500), remember=False)) as events:
                async for event in events:
                    if isinstance(event, AudioChunk):
                        break
            await freed(stand.engine)
            await s.reopen(guess.id)
            assert (s.pending, s.items) == (len(samples), ())
            await s.append(more)
            with pytest.raises(Invalid, match="take back"):
                await s.reopen(guess.id)
            await s.commit()
            got = await stand.answer(s)
            await speak(s, voice(30.0, 44), random.Random(5))
        await freed(stand.engine)
        with pytest.raises(Gone):
            await s.append(more)
        return got

    same(stand.run(talk()), stand.want([heard(np.concatenate([samples, more]))]))


@in_one_host
def test_a_restarted_host_is_told_again(stand: Stand) -> None:
    first, second = voice(17.0, 51), voice(2.0, 52)

    async def talk() -> tuple[list[Answer], float]:
        engine = stand.engine
        async with engine.session() as s:
            await speak(s, first, random.Random(6))
            await s.commit()
            got = [await stand.answer(s)]
            pipeline, [pid] = engine.pipelines[0], engine.pids
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            while engine.pids == [pid] or not pipeline.ready(pipeline.spec.names):
                await asyncio.sleep(0.01)
            await speak(s, second, random.Random(7))
            await s.commit()
            got.append(await stand.answer(s))
            values = await come_to(engine, lambda v: "stretto_host_idle_seconds_total" in v)
            return got, values['stretto_stage_asked_total{stage="thinker"}']

    (one, two), asked = stand.run(talk())
    same(one, stand.want([heard(first)]))
    said = {"role": "assistant", "content": one.text}
    same(two, stand.want([heard(first), said, heard(second)]))
    assert asked == 3, "three windows were sent before it died"


def test_idle_sessions_give_their_memory_to_others(
    tiny_dir: Path, models: Models, builder: PromptBuilder
) -> None:
    """Three conversations take turns where one has room: each finds nothing of its own left, and
    goes on exactly."""
    turns = {n: [voice(9.5, 80 + n), voice(1.0, 90 + n)] for n in range(3)}
    host = HostSettings(blocks={"thinker": 14, "talker": 14}, max_context=14 * BLOCK)

    async def talk(stand: Stand) -> dict[int, list[Answer]]:
        sessions = {n: stand.engine.session() for n in turns}
        got: dict[int, list[Answer]] = {n: [] for n in turns}
        for turn in range(2):
            for n, s in sessions.items():
                await speak(s, turns[n][turn], random.Random(n))
                await s.commit()
                got[n].append(await stand.answer(s))
        for s in sessions.values():
            await s.close()
        return got

    with Stand(tiny_dir, EngineConfig(placement=ONE_HOST, host=host), models, builder) as stand:
        answers = stand.run(talk(stand))
    for n, (one, two) in answers.items():
        first, second = map(heard, turns[n])
        same(one, stand.want([first]))
        same(two, stand.want([first, {"role": "assistant", "content": one.text}, second]))
        assert two.end is not None
        assert two.end.usage.cached_tokens < WINDOW, "it was given away"


def alone(
    tiny_dir: Path, work: Callable[[Session], Coroutine[Any, Any, None]], **config: Any
) -> None:
    """A session of an engine that was never started: what needs no stage."""

    async def go() -> None:
        async with PipelineEngine(tiny_dir, EngineConfig(**config)).session() as s:
            await work(s)

    run(go())


def test_an_answer_waits_for_what_is_being_read(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All came at once, and the answer is wanted at once: it does not do the same work beside
    it."""
    order: list[str] = []
    sent: list[int] = []

    async def work(s: Session) -> None:
        go, asked = asyncio.Event(), asyncio.Event()

        async def run_request(
            self: RequestManager, build: Callable[[], Any], options: RequestOptions
        ) -> AsyncIterator[Event]:
            if options.prefill_only:
                sent.append(sum(p.offset is not None for p in (await build()).pieces()))
                await go.wait()
                order.append("read")
            else:
                asked.set()
                sent.append(sum(p.offset is not None for p in (await build()).pieces()))
                order.append("answered")
            return
            yield

        monkeypatch.setattr(RequestManager, "run", run_request)
        await s.append(voice(17.0, 35, burst_at=0.0))
        await s.commit()
        answer = asyncio.create_task(collect_nothing(s.respond()))
        await asked.wait()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not order
        go.set()
        await answer

    async def collect_nothing(events: AsyncIterator[Event]) -> None:
        assert not [e async for e in events]

    alone(tiny_dir, work)
    assert order == ["read", "answered"]
    assert sent == [2, 1], "each window is sent once"


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[PackedPrompt]:
    """The prompts of requests, which are built and go to no stage."""
    made: list[PackedPrompt] = []

    async def run_request(
        self: RequestManager, build: Callable[[], Any], options: RequestOptions
    ) -> AsyncIterator[Event]:
        made.append(await build())
        return
        yield

    monkeypatch.setattr(RequestManager, "run", run_request)
    return made


async def prompt_of(s: Session, built: list[PackedPrompt], **more: Any) -> PackedPrompt:
    """What the stages would be asked for a short answer."""
    async for _ in s.respond(params=Params(max_text_tokens=8), **more):
        pass
    return built[-1]


def test_when_the_context_is_full_the_oldest_turns_go(
    tiny_dir: Path, built: list[PackedPrompt]
) -> None:
    async def work(s: Session) -> None:
        await s.add({"role": "system", "content": "Answer in a few words."}, id="system")
        for turn in range(12):
            await s.add(
                {"role": "user", "content": "What is the weather like in the city? " * 2},
                id=f"q{turn}",
            )
            await s.add({"role": "assistant", "content": "Fine."}, id=f"a{turn}")
            prompt = await prompt_of(s, built)
            assert len(prompt.ids) <= 7 / 8 * 256
            if turn and s.dropped:
                break
        assert s.dropped, "it was never full"
        # Whole turns, in order, and more than was needed: the next ones fit as well.
        assert s.dropped[:2] == ("q0", "a0")
        assert [i.id for i in s.items[:2]] == ["system", f"q{len(s.dropped) // 2}"]
        assert len(prompt.ids) <= 3 / 4 * 256
        # A turn that leaves no room for others is alone with the system's words, and refused if it
        # is too long itself.
        await s.add(
            {"role": "user", "content": "What is the weather like in the city? " * 40}, id="long"
        )
        prompt = await prompt_of(s, built)
        assert [i.id for i in s.items] == ["system", "long"]
        with pytest.raises(TooLong):
            clamp_params(RequestOptions("text"), len(prompt.ids), 256, 1000)

    alone(tiny_dir, work, host=HostSettings(max_context=256))


def test_the_oldest_turn(tiny_dir: Path) -> None:
    async def work(s: Session) -> None:
        roles = [
            "developer",
            "assistant",
            "user",
            "user",
            "assistant",
            "system",
            "user",
            "assistant",
        ]
        for i, role in enumerate(roles):
            await s.add({"role": role, "content": "Hm."}, id=str(i))
        assert [i.id for i in oldest_turn(s.items)] == ["1", "2", "3", "4"]
        assert not oldest_turn(s.items[5:])
        assert [i.id for i in oldest_turn(s.items[:5])] == ["1"], "what comes before the last turn"
        pictures = [*s.items[2:4], *s.items[6:7]] * 2  # in a row, as a camera gives them
        for left in (3, 2, 1):
            assert oldest_turn(pictures) == pictures[: len(pictures) // 2]
            pictures = pictures[len(pictures) // 2 :]
            assert len(pictures) == left
        assert not oldest_turn(pictures)
        assert not oldest_turn([])

    alone(tiny_dir, work)


def test_a_stranger_s_pictures_are_decoded_elsewhere(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch, built: list[PackedPrompt]
) -> None:
    """Not in this process: one that takes long, or much memory, is nobody else's trouble. What the
    engine is then told is the same."""
    message = {
        "role": "user",
        "content": [picture(), {"type": "audio", "data": voice(0.1, 1)}, picture(seed=2)],
    }
    bad = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}

    async def go() -> None:
        engine = PipelineEngine(tiny_dir, EngineConfig(prompts=PoolSettings()))
        async with engine.session(allow_paths=True) as plain:
            want = await prompt_of(plain, built, items=[await plain.item(message)])
        await engine.prompts.start()
        try:
            monkeypatch.setattr(messages_module, "load_image", None)
            async with engine.session() as s:
                got = await prompt_of(s, built, items=[await s.item(message)])
                assert got.ids == want.ids
                assert [p.digest for p in got.pieces()] == [p.digest for p in want.pieces()]
                assert all(p.offset is not None for p in got.pieces())
                with pytest.raises(MediaError) as e:
                    await s.add(
                        {"role": "user", "content": [{"type": "text", "text": "Look."}, bad]}
                    )
                assert e.value.param == "messages[0].content[1]"
                assert not s.items
        finally:
            await engine.prompts.close()

    run(go())


def test_sessions_of_one_client_share_its_turns(roomy_dir: Path) -> None:
    """However many there are, another client's media find a prompt process."""
    message = json.loads(bytes(heavy(count=1).body))[0]

    async def go() -> None:
        engine = PipelineEngine(roomy_dir, EngineConfig(prompts=PoolSettings(workers=2)))
        await engine.prompts.start()

        def numbers() -> tuple[float, float]:
            told = engine.prompts.metrics()
            return told["stretto_prompts_running"], told["stretto_prompts_waiting"]

        async def add(client: str) -> None:
            async with engine.session(client=client) as session:
                await session.add(message)

        try:
            mine = [asyncio.create_task(add("me")) for _ in range(3)]
            await until(lambda: sum(numbers()) == 3)
            assert numbers() == (1, 2)
            other = asyncio.create_task(add("other"))
            await until(lambda: numbers() == (2, 2))
            for task in (*mine, other):
                task.cancel()
            await asyncio.gather(*mine, other, return_exceptions=True)
            await until(lambda: numbers() == (0, 0))
        finally:
            await engine.prompts.close()

    run(go())


def test_a_conversation_has_any_number_of_sounds(tiny_dir: Path, built: list[PackedPrompt]) -> None:
    """What a single request may hold of media does not bound what a session has heard in its
    time."""

    async def work(s: Session) -> None:
        for turn in range(MediaLimits().media + 3):
            await s.append(voice(0.1, turn))
            await s.commit(f"q{turn}")
        prompt = await prompt_of(s, built)
        assert len(prompt.audios) == len(s.items) == MediaLimits().media + 3
        assert not s.dropped

    alone(tiny_dir, work)


def test_bad_input_is_named_and_changes_nothing(tiny_dir: Path) -> None:
    async def work(s: Session) -> None:
        with pytest.raises(Invalid, match="nothing to answer"):
            s.respond()
        with pytest.raises(Invalid, match="no sound"):
            await s.commit()
        await s.append(np.zeros(150, np.float32))
        with pytest.raises(MediaError, match="too short"):
            await s.commit()
        with pytest.raises(Invalid, match="not numbers"):
            await s.append(np.array([0.0, np.nan], np.float32))
        assert s.pending == 150
        await s.append(np.zeros(150, np.float32))
        item = await s.commit()
        with pytest.raises(Invalid, match="already"):
            await s.add({"role": "user", "content": "Hm."}, id=item.id)
        with pytest.raises(MediaError):
            await s.add(
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "data:;base64,AAAA"}}],
                }
            )
        with pytest.raises(Invalid, match="no item"):
            await s.remove("nobody")
        assert s.items == (item,)

    alone(tiny_dir, work)


def test_sound_that_is_never_committed_is_bounded(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stretto.engine.session.MAX_PENDING_S", 1.0)

    async def work(s: Session) -> None:
        await s.append(np.zeros(INPUT_RATE, np.float32))
        with pytest.raises(Invalid, match="wait for their commit"):
            await s.append(np.zeros(1, np.float32))

    alone(tiny_dir, work)
