"""The overlap of the stages, seen in the order of events of one request. No time is asserted, only
what came first."""

from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np

from stretto.config.engine import HostSettings
from stretto.engine.engine import PipelineEngine
from stretto.engine.events import TimelineSpan
from stretto.messages.hosts import Ping, Stats
from stretto.messages.requests import Cancel, Ended, Pcm, Text, Working
from stretto.models.qwen3_omni.bridge import talker_prompt
from stretto.models.qwen3_omni.config import OPENING_S, OmniConfig
from stretto.models.qwen3_omni.load import Models
from stretto.models.qwen3_omni.params import RESIDUAL
from stretto.models.qwen3_omni.prompts import PromptBuilder
from stretto.models.speech.pacing import FrameTiming
from stretto.models.speech.talker_stage import FRAME_S
from stretto.observe.trace import TraceEvents
from stretto.params import ChunkSizes, Params
from stretto.preprocess.packed_prompt import pack
from stretto.types import GREEDY, RequestId
from tests.engine.common import CHATS, HandDriven, collect, expected, run, say, sound
from tests.pipeline import STAGES, announcement
from tests.solo import CODE0


def test_the_first_packet_is_out_before_the_last_token(tiny_dir: Path) -> None:
    params = Params(
        max_text_tokens=40,
        ignore_eos=True,
        min_frames=44,
        max_frames=44,
        greedy_speech=True,
        packets=ChunkSizes(1, 1),
    )

    async def work() -> tuple[TimelineSpan, ...]:
        async with PipelineEngine.open(tiny_dir) as engine:
            got = await collect(engine.generate(CHATS["text"], params=params))
            assert got.end is not None
            return got.end.timeline

    spans = run(work())
    outputs = [s for s in spans if s.name != "prompt"]
    lanes = {
        lane: sorted(s.stop for s in outputs if s.lane == lane) for lane in (*STAGES, "packets")
    }
    assert [len(lanes[lane]) for lane in ("thinker", "talker")] == [
        39,
        43,
    ]  # the first is its prompt's last chunk
    # The first output of each stage comes after the one before it in the pipeline ...
    prompts = [
        max(s.stop for s in spans if s.lane == lane and s.name == "prompt")
        for lane in ("thinker", "talker")
    ]
    first = [*prompts, lanes["code2wav"][0], lanes["packets"][0]]
    assert first == sorted(first)
    # ... and all of them come before the thinker's last token: three stages were at work at once.
    assert lanes["packets"][0] < lanes["thinker"][-1]
    heard = [t for t in lanes["packets"] if t < lanes["thinker"][-1]]
    assert len(heard) > 10

    events = TraceEvents().of(
        "request", [(s.lane, s.name, int(1e9 * s.start), int(1e9 * s.stop)) for s in spans]
    )
    drawn = {e["cat"]: e["ts"] for e in reversed(events) if e["ph"] == "X"}
    assert set(drawn) == {*STAGES, "packets"}
    assert drawn["packets"] < 1e6 * lanes["thinker"][-1]


def test_the_talkers_prompt_begins_before_the_thinkers_ends(tiny_dir: Path, models: Models) -> None:
    """Twenty seconds of sound: each chunk of rows that the thinker has done goes into the talker's
    prompt while the thinker is at the next."""
    chunk, config = 48, OmniConfig.read(tiny_dir)
    builder = PromptBuilder.open(tiny_dir, config)
    messages = [{"role": "user", "content": [sound(seconds=20.0), say("What was that?")]}]
    prompt, plan = builder.build(messages), talker_prompt(builder.build(messages), config, None)
    users = np.flatnonzero(plan.is_media)
    assert len(prompt.ids) > 4 * chunk
    params = Params(max_text_tokens=6, max_frames=7, greedy_speech=True)
    greedy = [replace(s, temperature=0.0) for s in (GREEDY, CODE0, RESIDUAL)]
    packed = pack(prompt)
    driven = HandDriven(tiny_dir, HostSettings(lone_prefill_chunk=chunk))
    try:
        driven.answer(
            announcement(RequestId("r"), packed, True, None, *greedy, 6, 7),
            packed.feature_bytes(),
        )
    finally:
        driven.host.close()

    # The timeline shows it too: chunks of the talker's prompt lie between those of the thinker's.
    ended = {m.stage: m for m, _ in driven.reports if isinstance(m, Ended)}
    assert len(ended["thinker"].chunks) >= 4
    assert any(t < ended["thinker"].marks[0] for t in ended["talker"].chunks[1:])

    order = driven.launched
    last = next(
        i
        for i, (stage, _, stop) in enumerate(order)
        if stage == "thinker" and stop == len(prompt.ids)
    )
    before = [(start, stop) for stage, start, stop in order[:last] if stage == "talker"]
    thinking = [(start, stop) for stage, start, stop in order[: last + 1] if stage == "thinker"]
    assert len(thinking) > 4, "the thinker's prompt must come in chunks"
    assert max(stop for _, stop in before) > users[0] + chunk, (
        "media rows go on before the prompt is complete"
    )
    # No row of the talker's runs before the thinker has launched the row that it is made of.
    done = 0
    for stage, start, stop in order:
        if stage == "thinker":
            done = max(done, stop)
        else:
            rows = users[(users >= start) & (users < stop)]
            assert all(plan.places[r] < done for r in rows)
    # And the overlap changes nothing in the answer.
    want = expected(models, builder, messages, params)
    assert [i for m, _ in driven.reports if isinstance(m, Text) for i in m.ids] == want.ids
    pcm = b"".join(blob for m, blob in driven.reports if isinstance(m, Pcm))
    np.testing.assert_allclose(np.frombuffer(pcm, np.float32), want.samples, atol=1e-5)


def test_tokens_leave_in_groups_that_grow(tiny_dir: Path, models: Models) -> None:
    """While no time passes only their number decides; the talker gets the same text as one by
    one."""
    builder = PromptBuilder.open(tiny_dir, OmniConfig.read(tiny_dir))
    prompt = builder.build(CHATS["text"])
    greedy = [replace(s, temperature=0.0) for s in (GREEDY, CODE0, RESIDUAL)]
    packed = pack(prompt)
    driven = HandDriven(tiny_dir, HostSettings())
    for stage in driven.host.stages.values():
        stage.clock = lambda: 1000.0
    assert driven.host.stages["talker"].frame_timing == FrameTiming.on_cpu(FRAME_S, OPENING_S)
    try:
        driven.answer(
            announcement(RequestId("r"), packed, True, None, *greedy, 20, 7, min_text_tokens=20),
            packed.feature_bytes(),
        )
    finally:
        driven.host.close()
    groups = [m.ids for m, _ in driven.reports if isinstance(m, Text)]
    assert [len(g) for g in groups] == [1, 1, 2, 3, 4, 4, 4, 1]
    params = Params(max_text_tokens=20, max_frames=7, greedy_speech=True)
    ids = [i for g in groups for i in g]
    want = expected(models, builder, CHATS["text"], params)
    assert ids[: len(want.ids) - 1] == want.ids[:-1]  # the plain driver may end sooner
    frames = [m.frames for m, _ in driven.reports if isinstance(m, Pcm)]
    assert frames[0] == 2, (
        "a CPU's first packet waits a while for a second frame until one was quick"
    )
    assert frames[-1] == 7


def test_a_long_video_does_not_hold_up_others(tiny_dir: Path, models: Models) -> None:
    """Its frames go through the encoder in parts: a question that came after it is answered in
    between. One that is cancelled meanwhile leaves nothing."""
    builder = PromptBuilder.open(tiny_dir, OmniConfig.read(tiny_dir))
    film = {"type": "video", "data": np.zeros((20, 320, 320, 3), np.uint8), "fps": 2.0}
    messages = [{"role": "user", "content": [film, say("What is it?")]}]
    seen, heard = builder.build(messages), builder.build(CHATS["text"])
    greedy = [replace(s, temperature=0.0) for s in (GREEDY, CODE0, RESIDUAL)]
    driven = HandDriven(tiny_dir, HostSettings())
    host, parts = (
        driven.host,
        sum(
            1
            for _ in models.thinker.visual.encoding(
                [v.values for v in seen.videos], [v.grid for v in seen.videos]
            )
        ),
    )
    assert parts > 4
    host.stages["thinker"].encoders.clock = count().__next__  # a part takes one tick
    try:
        for id, prompt in (("left", seen), ("video", seen), ("text", heard)):
            packed = pack(prompt)
            host.handle(
                announcement(RequestId(id), packed, False, None, *greedy, 3, 0),
                packed.feature_bytes(),
            )
        host.loop.round()
        host.handle(Cancel(RequestId("left")), b"")
        while len(ended := [m.request for m, _ in driven.reports if isinstance(m, Ended)]) < 2:
            worked = [m.request for m, _ in driven.reports if isinstance(m, Working)]
            assert "text" in ended or worked.count("video") < parts / 2, (
                "most of the time is the other request's"
            )
            host.loop.round()
        assert ended == ["text", "video"]
        assert not host.stages["thinker"].encoders.requests
        host.handle(Ping(1), b"")
        told = driven.reports[-1][0]
        assert isinstance(told, Stats)
        assert told.values['stretto_stage_requests{stage="thinker"}'] == 0
    finally:
        host.close()
    params = Params(max_text_tokens=3)
    for id, chat in (("text", CHATS["text"]), ("video", messages)):
        ids = [
            i for m, _ in driven.reports if isinstance(m, Text) and m.request == id for i in m.ids
        ]
        assert ids == expected(models, builder, chat, params, speak=False).ids
