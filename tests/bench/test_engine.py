"""What the pipeline's benchmarks share: checkpoints, events as measurements, variants, and the
baseline."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import pytest

from bench.ablation import DEFAULT, Found, bases, ratios, variants
from bench.ablation.plain import Plain
from bench.engine.load import first_times, pieces, stream
from bench.harness.checkpoint import checkpoint, host_fields
from stretto.config.engine import EngineConfig, HostSettings, OverlapSwitches
from stretto.engine.events import AudioChunk, Event, Finished, TextDelta, Usage
from stretto.errors import Busy, Invalid
from stretto.loadtest.player import Packet
from stretto.loadtest.runner import Sample, SystemClock
from stretto.loadtest.sse import Piece, RequestFailed, Sound, Used, Words
from stretto.models.qwen3_omni.config import OmniConfig, parse
from stretto.models.qwen3_omni.prompts import PromptBuilder
from stretto.params import Params
from stretto.testing.qwen3_omni import released_config
from tests.engine.common import CHATS, run
from tests.solo import Audio, Frame, TextToken


def test_the_released_shape_with_a_tokenizer_that_fits() -> None:
    with checkpoint("released") as directory:
        config = OmniConfig.read(directory)
        released = parse(released_config())
        assert replace(config, tokens=released.tokens) == released
        assert config.tokens != released.tokens
        assert not list(directory.glob("*.safetensors*"))
        assert len(PromptBuilder.open(directory, config).build(CHATS["audio"]).audios) == 1
    assert not directory.exists()


def test_events_become_measurements() -> None:
    sample = Sample(0, 0.0)
    usage = Usage(prompt_tokens=9, text_tokens=2, frames=1, samples=2400)
    end = Finished("length", "stop", usage, 0)
    events = [
        TextDelta((5,), ""),  # half a character is a token all the same
        TextDelta((), "rest"),  # held back text, not a token
        AudioChunk(0, np.zeros(2400, np.float32)),
        end,
    ]
    for at, event in enumerate(events):
        for piece in pieces(event):
            sample.take(float(at), piece)
    assert sample.words == [0.0]
    assert sample.packets == [Packet(2.0, 0.1)]
    assert (sample.prompt_tokens, sample.text_tokens, sample.finish) == (9, 2, "stop")


def test_a_refusal_is_counted_by_its_kind() -> None:
    async def refuse() -> AsyncIterator[Event]:
        raise Busy("full")
        yield

    async def work() -> list[tuple[float, Piece]]:
        return [piece async for piece in stream(refuse(), SystemClock())]

    with pytest.raises(RequestFailed, match="full") as caught:
        run(work())
    assert caught.value.reason == "Busy"


def test_settings_from_the_command_line() -> None:
    assert host_fields(["max_rows=64", 'switches={"async_d2h": false}']) == {
        "max_rows": 64,
        "switches": {"async_d2h": False},
    }
    for bad in ("rows=1", "max_rows=many"):
        with pytest.raises(Invalid):
            host_fields([bad])


def test_each_variant_changes_one_thing_and_every_switch_has_one() -> None:
    config = EngineConfig()
    bare = bases(config)
    switched = set()
    for v in variants(config, 125):
        base = bare[v.base]
        changed = [
            f.name
            for f in fields(HostSettings)
            if getattr(v.config.host, f.name) != getattr(base.host, f.name)
        ]
        changed += [
            n for n in ("placement", "connector") if getattr(v.config, n) != getattr(base, n)
        ]
        changed += ["packets"] if v.packets is not None else []
        assert len(changed) == (0 if v.control else 1), v.name
        off = [name for name, on in asdict(v.config.host.switches).items() if not on]
        assert len(off) <= 1
        switched.update(off)
    assert switched == {f.name for f in fields(OverlapSwitches)}


def test_ratios_are_of_medians() -> None:
    def sample(first: float, end: float) -> Sample:
        return Sample(0, 0.0, [first / 2], [Packet(first, 1.0)], end)

    slow = [sample(4.0, 6.0), sample(2.0, 3.0), sample(40.0, 60.0)]
    fast = [sample(1.0, 3.0), sample(2.0, 4.0), sample(3.0, 5.0)]
    found = ratios(Found("x", DEFAULT, slow, fast))
    assert found == {"first_text": 2.0, "first_audio": 2.0, "total": 1.5}


def test_the_baseline_gives_the_same_answer_later(tiny_dir: Path) -> None:
    driver = Plain.open(tiny_dir, HostSettings())
    params = Params(temperature=0.8, seed=3, max_text_tokens=9, max_frames=12)
    _, streamed = driver.timed(CHATS["audio"], params, streamed=True)
    sample, staged = driver.timed(CHATS["audio"], params, streamed=False)

    def of(kind: type, events: list) -> list:
        return [e for e in events if isinstance(e, kind)]

    assert [e.id for e in of(TextToken, streamed)] == [e.id for e in of(TextToken, staged)]
    assert len(of(TextToken, staged)) == 9
    for a, b in zip(of(Frame, streamed), of(Frame, staged), strict=True):
        assert a.codes.tolist() == b.codes.tolist()
    assert len(of(Frame, staged)) == 12
    whole = np.concatenate([e.samples for e in of(Audio, streamed)])
    (once,) = of(Audio, staged)
    np.testing.assert_allclose(once.samples, whole, atol=1e-5)
    order = [type(e) for e in staged]
    assert order == sorted(order, key=[TextToken, Frame, Audio].index)
    first = next(i for i, e in enumerate(streamed) if isinstance(e, Audio))
    assert of(TextToken, streamed[first:])
    assert len(sample.packets) == 1


def test_first_times_are_of_the_first_of_each_kind() -> None:
    class Clock(SystemClock):
        def now(self) -> float:
            return 10.0

    async def told() -> AsyncIterator[tuple[float, Piece]]:
        for at, piece in enumerate(
            [Words("a"), Sound(""), Words("b"), Sound(""), Used({})], start=11
        ):
            yield at, piece

    assert asyncio.run(first_times(told(), Clock())) == {"text": 1.0, "audio": 2.0, "end": 5.0}
