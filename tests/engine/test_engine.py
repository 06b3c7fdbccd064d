"""The whole pipeline in its processes: whatever the placement, the connector, the packets and the
company, a request gets the text, codes and samples of the plain driver (which equals
`transformers`)."""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stretto import Engine
from stretto.config.engine import EngineConfig, HostSettings
from stretto.config.placement import HostPlace, parse_placement, places
from stretto.engine.engine import PipelineEngine
from stretto.engine.events import Finished, TextDelta
from stretto.errors import Busy, Gone, Invalid, StageDead, StrettoError
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.load import Models, Source
from stretto.models.qwen3_omni.prompts import PromptBuilder
from stretto.params import ChunkSizes, Params
from tests.engine.common import CHATS, collect, expected, run, same, say, sound, stats
from tests.pipeline import ONE_HOST, PROCESSES, STAGES, TWO_HOSTS

PARAMS = Params(max_text_tokens=8, max_frames=10, seed=3, want_codes=True)
PACKETS = {
    "1 frame": ChunkSizes(1, 1),
    "4 then 25": ChunkSizes(4, 25, None),
    "ramp": ChunkSizes(1, 8, 2),
    "whole": ChunkSizes(4000, 4000, None),
}


@pytest.fixture(scope="module")
def builder(tiny_dir: Path) -> PromptBuilder:
    return PromptBuilder.open(tiny_dir, OmniConfig.read(tiny_dir))


@pytest.mark.parametrize(
    ("placement", "connector"),
    [(ONE_HOST, "shm"), (PROCESSES, "shm"), (TWO_HOSTS, "tcp")],
    ids=["one", "shm", "tcp"],
)
def test_exact_in_every_placement(
    placement, connector, tiny_dir: Path, models: Models, builder: PromptBuilder
) -> None:
    """All kinds of prompt, all kinds of packet, greedy and seeded; one by one, then eight at
    once."""
    cases = []
    for i, (kind, messages) in enumerate(CHATS.items()):
        for j, packets in enumerate(PACKETS.values()):
            if placement is not ONE_HOST and (i + j) % 2:
                continue  # half of the product in the slower placements
            params = replace(
                PARAMS,
                packets=packets,
                seed=i,
                max_frames=[10, 9, 8, 11][j],
                temperature=[0.0, 0.8][j % 2],
            )
            cases.append((kind, messages, replace(params, greedy_speech=j == 1)))
    wanted = [expected(models, builder, m, p) for _, m, p in cases]

    async def work() -> None:
        config = EngineConfig(placement=placement, connector=connector)
        async with PipelineEngine.open(tiny_dir, config) as engine:
            assert engine.progress.state == "ready"
            for (_, messages, params), want in list(zip(cases, wanted, strict=True))[:4]:
                got = await collect(engine.generate(messages, params=params))
                same(got, want)
                assert got.end is not None
                assert got.end.usage.frames == len(want.codes)
                check_packets(got.packets, len(want.codes), params.packets)
            together = [collect(engine.generate(m, params=p)) for _, m, p in cases[-8:]]
            for got, want in zip(await asyncio.gather(*together), wanted[-8:], strict=True):
                same(got, want)
            silent = await collect(
                engine.generate(CHATS["text"], modalities=["text"], params=PARAMS)
            )
            assert silent.finish is not None
            assert silent.finish[1] is None
            assert len(silent.samples) == 0
            assert engine.metrics()["stretto_engine_running"] == 0

    run(work())


def test_exact_with_float8_experts(tiny_dir: Path, builder: PromptBuilder) -> None:
    """Streamed by the stages as the plain driver has it, alone and beside each other."""
    models = Models.open(Source.open(tiny_dir, progress=False, expert_weights="float8"))
    cases = [
        (m, replace(PARAMS, seed=i, temperature=0.8 * (i % 2), packets=p))
        for i, (m, p) in enumerate(zip(CHATS.values(), PACKETS.values(), strict=True))
    ]
    wanted = [expected(models, builder, m, p) for m, p in cases]

    async def work() -> None:
        config = EngineConfig(host=HostSettings(expert_weights="float8"))
        async with PipelineEngine.open(tiny_dir, config) as engine:
            same(await collect(engine.generate(cases[0][0], params=cases[0][1])), wanted[0])
            together = [collect(engine.generate(m, params=p)) for m, p in cases]
            for got, want in zip(await asyncio.gather(*together), wanted, strict=True):
                same(got, want)

    run(work())


def check_packets(samples: list[int], frames: int, sizes: ChunkSizes) -> None:
    """Packets hold whole frames; the first lacks what the vocoder does not sound. How many frames
    are in one is not certain: a vocoder that is behind joins those that wait."""
    if sizes.each == 1:
        ends = np.cumsum(samples) + 555
        assert not (ends % 1920).any()
    assert sum(samples) == 1920 * frames - 555


def test_overlap_order_cancel_and_errors(
    tiny_dir: Path, models: Models, builder: PromptBuilder
) -> None:
    async def work() -> None:
        async with PipelineEngine.open(tiny_dir, EngineConfig(max_requests=3)) as engine:
            # The first sound is out before the thinker has finished.
            long = replace(PARAMS, max_text_tokens=30, ignore_eos=True, max_frames=40)
            got = await collect(engine.generate(CHATS["text"], params=long))
            first_audio = got.order.index("AudioChunk")
            assert "TextDelta" in got.order[first_audio:]
            assert len(got.ids) == 30
            assert got.end is not None
            lanes = {s.lane for s in got.end.timeline}
            assert lanes == {"thinker", "talker", "code2wav", "packets"}
            talker = min(s.start for s in got.end.timeline if s.lane == "talker")
            assert talker < max(s.stop for s in got.end.timeline if s.lane == "thinker")
            assert all(s.name != "encode" for s in got.end.timeline)
            assert engine.info.random_weights
            assert list(engine.info.stages) == ["thinker", "talker", "code2wav"]

            # Of a prompt with media, it is told when they were encoded: before it was read.
            got = await collect(
                engine.generate(CHATS["audio"], params=replace(PARAMS, seed=77), owner="other")
            )
            assert got.end is not None
            (encoded,) = (s for s in got.end.timeline if s.name == "encode")
            read = [s for s in got.end.timeline if (s.lane, s.name) == (encoded.lane, "prompt")]
            assert 0 <= encoded.start < encoded.stop == read[0].start

            # Asked again, the prompt comes from the prefix caches of both stages, and the answer is
            # the same.
            for kind in ("audio", "image"):
                want = expected(models, builder, CHATS[kind], PARAMS)
                for i in range(2):
                    got = await collect(engine.generate(CHATS[kind], params=PARAMS))
                    same(got, want)
                    assert got.end is not None
                    assert (got.end.usage.cached_tokens > 0) == (i > 0)
            louder = [{"role": "user", "content": [sound(seed=9), say("What was that?")]}]
            same(
                await collect(engine.generate(louder, params=PARAMS)),
                expected(models, builder, louder, PARAMS),
            )

            # Fixed lengths on any weights.
            fixed = replace(
                PARAMS, min_frames=12, max_frames=12, max_text_tokens=3, min_text_tokens=3
            )
            got = await collect(engine.generate(CHATS["text"], params=fixed))
            assert len(got.codes) == 12
            assert len(got.ids) == 3

            # Closing the iterator cancels everywhere; the slots come back.
            for _ in range(3):
                events = engine.generate(CHATS["text"], params=long)
                async for e in events:
                    if not isinstance(e, TextDelta):
                        break
                await events.aclose()  # type: ignore[attr-defined]
            assert engine.metrics()["stretto_engine_running"] == 0

            # Reading a text aloud needs no thinker.
            read = await collect(engine.speak("Good morning.", params=PARAMS))
            assert len(read.codes) > 0
            assert read.ids == []

            # A stop string ends the text before it, and the speech with it.
            whole = await collect(engine.generate(CHATS["text"], params=long))
            stop = whole.text.split()[4]
            cut = await collect(
                engine.generate(CHATS["text"], params=replace(long, stop=(stop,), ignore_eos=False))
            )
            assert cut.text == whole.text[: whole.text.index(stop)]
            assert cut.finish == ("stop", "length") or cut.finish == ("stop", "stop")

            # Bad input is refused, and the engine lives.
            bad = [
                {"voice": "nobody"},
                {"modalities": []},
                {"params": replace(PARAMS, logit_bias={10**6: 1.0})},
            ]
            for kwargs in bad:
                with pytest.raises(Invalid):
                    await collect(engine.generate(CHATS["text"], **kwargs))
            with pytest.raises(Invalid):
                await collect(engine.generate([]))
            with pytest.raises(Invalid):
                await collect(engine.generate([{"role": "user", "content": [{"type": "text"}]}]))
            biased = replace(PARAMS, logit_bias={whole.ids[0]: -100.0})
            other = await collect(engine.generate(CHATS["text"], params=biased))
            assert other.ids[0] != whole.ids[0]

            # Full means Busy, not waiting.
            running = [engine.generate(CHATS["text"], params=long) for _ in range(3)]
            for events in running:
                await anext(events)
            with pytest.raises(Busy):
                await anext(engine.generate(CHATS["text"], params=long))
            for events in running:
                await events.aclose()  # type: ignore[attr-defined]
            same(
                await collect(engine.generate(CHATS["text"], params=PARAMS)),
                expected(models, builder, CHATS["text"], PARAMS),
            )

    run(work())


def test_a_slow_listener_is_throttled_and_loses_nothing(
    tiny_dir: Path, models: Models, builder: PromptBuilder
) -> None:
    # far more than are on their way when it is throttled, however late the hosts hear of it
    frames = 300
    params = replace(PARAMS, max_text_tokens=6, min_frames=frames, max_frames=frames)
    steps = 'stretto_stage_steps_total{stage="talker",kind="decode"}'

    async def work() -> None:
        async with PipelineEngine.open(tiny_dir, EngineConfig(max_buffered_s=0.5)) as engine:
            events = engine.generate(CHATS["text"], params=params)
            first = await anext(events)
            ticket = next(iter(engine.requests.running.values()))
            while not ticket.throttled:  # nobody reads meanwhile
                await asyncio.sleep(0.01)
            # Steps and chunks that were on their way still arrive; then it stands still.
            made = -1.0
            while made != (made := (await stats(engine))[steps]):
                await asyncio.sleep(0.2)
            assert ticket.throttled
            assert made < frames
            assert ticket.samples < frames * 1920 - 555

            async def rest():
                yield first
                async for e in events:
                    yield e

            got = await collect(rest())
            assert len(got.codes) == frames

    run(work())


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_host_fails_its_requests_at_once_and_comes_back(
    victim: int, tiny_dir: Path, models: Models, builder: PromptBuilder
) -> None:
    """Eight requests in flight, one host killed: every caller gets an error or its exact output,
    text-only requests go on if the thinker lives, and after the restart all is as before."""
    params = replace(PARAMS, max_text_tokens=24, ignore_eos=True, min_frames=100, max_frames=100)
    endless = replace(PARAMS, max_text_tokens=8000, ignore_eos=True)
    want = expected(models, builder, CHATS["text"], PARAMS)

    async def work() -> None:
        config = EngineConfig(placement=PROCESSES, host=HostSettings(max_rows=16))
        async with PipelineEngine.open(tiny_dir, config) as engine:
            silent = [
                engine.generate(CHATS["text"], modalities=["text"], params=endless)
                for _ in range(2)
            ]
            for events in silent:
                await anext(events)
            requests = list(engine.requests.running.values())
            speaking = [
                asyncio.create_task(collect(engine.generate(CHATS["text"], params=params)))
                for _ in range(6)
            ]
            while not any(t.frames for t in engine.requests.running.values()):
                await asyncio.sleep(0.005)
            pid = engine.pids[victim]
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            done, _ = await asyncio.wait(speaking)
            for task in done:
                error = task.exception()
                assert error is None or isinstance(error, StageDead), error
            assert any(task.exception() for task in done)
            # Those that need no more than the thinker have seen it all, and are far from their end.
            for events, request in zip(silent, requests):
                if not victim:
                    with pytest.raises(StageDead):
                        await collect(events)
                    continue
                before = request.text.num_tokens
                while request.text.num_tokens < before + 40:  # tokens that are made now
                    assert isinstance(await anext(events), TextDelta)
                await events.aclose()  # type: ignore[attr-defined]
            assert engine.metrics()["stretto_engine_running"] == 0
            while not engine.pipelines[0].ready(STAGES):
                await asyncio.sleep(0.05)
            assert engine.pids[victim] != pid
            same(await collect(engine.generate(CHATS["text"], params=PARAMS)), want)

    run(work())


def test_more_frames_than_one_decode_of_the_reference(
    tiny_dir: Path, models: Models, builder: PromptBuilder
) -> None:
    params = replace(PARAMS, max_text_tokens=5, min_frames=310, max_frames=310, greedy_speech=True)

    async def work() -> None:
        async with PipelineEngine.open(tiny_dir) as engine:
            got = await collect(engine.generate(CHATS["text"], params=params))
            assert len(got.codes) == 310
            import numpy as np
            import torch

            whole = models.code2wav.decode(torch.tensor(got.codes)).numpy()
            np.testing.assert_allclose(got.samples, whole, atol=1e-5)

    run(work())


def test_the_sync_wrapper(tiny_dir: Path, models: Models, builder: PromptBuilder) -> None:
    with Engine(tiny_dir, device="cpu") as engine:
        events = list(engine.stream(CHATS["text"], params=PARAMS))
        assert isinstance(events[-1], Finished)
        ids = [i for e in events if isinstance(e, TextDelta) for i in e.ids]
        assert ids == expected(models, builder, CHATS["text"], PARAMS).ids
        with pytest.raises(Invalid):
            list(
                engine.stream(
                    [
                        {
                            "role": "user",
                            "content": [
                                say("hm"),
                                {**sound(), "input_audio": {"data": "!", "format": "wav"}},
                            ],
                        }
                    ]
                )
            )


def test_a_checkpoint_that_cannot_be_loaded_is_one_clear_error(
    tiny_dir: Path, tmp_path: Path
) -> None:
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(tiny_dir, broken)
    shard = sorted(broken.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-1000])

    async def work() -> None:
        with pytest.raises(StrettoError, match=shard.name):
            async with PipelineEngine.open(broken):
                pass

    run(work())


def test_closing_ends_what_is_running(tiny_dir: Path) -> None:
    async def work() -> None:
        async with PipelineEngine.open(tiny_dir) as engine:
            long = replace(PARAMS, max_text_tokens=200, ignore_eos=True, max_frames=400)
            task = asyncio.create_task(collect(engine.generate(CHATS["text"], params=long)))
            while not engine.requests.running:
                await asyncio.sleep(0.01)
            await engine.close()
            with pytest.raises((Gone, StageDead)):
                await task
            with pytest.raises(Busy):
                engine.generate(CHATS["text"])

    run(work())


def test_placements_are_checked(tiny_dir: Path) -> None:
    assert parse_placement("one") == "one"
    thinker, rest = HostPlace(("thinker",)), HostPlace(("talker", "code2wav"))
    assert parse_placement("thinker,talker+code2wav") == (thinker, rest) == places("two", STAGES)
    apart = parse_placement("thinker@cuda:0, code2wav + talker@cuda:1")
    assert places(apart, STAGES) == (
        replace(thinker, device="cuda:0"),
        replace(rest, device="cuda:1"),
    )
    assert [p.stages for p in places("processes", STAGES)] == [(s,) for s in STAGES]
    assert places("one", STAGES) == (HostPlace(STAGES),)
    for text in ("thinker,talker", "thinker,thinker,talker+code2wav", "thinker,talker+vocoder", ""):
        with pytest.raises(Invalid, match="placement"):
            PipelineEngine(tiny_dir, EngineConfig(placement=parse_placement(text)))
