"""Other families run through the real engine, in one host and in processes, without a change in the
package."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stretto import registry
from stretto.config.engine import EngineConfig
from stretto.config.placement import Placement
from stretto.engine.engine import PipelineEngine
from stretto.engine.events import AudioChunk, Event, Finished, TextDelta
from stretto.errors import Bug, CheckpointError, Invalid, StageDead
from stretto.params import Params
from stretto.preprocess.pool.jobs import Conversation
from stretto.preprocess.pool.pool import PoolSettings, PromptPool
from stretto.preprocess.template import Tokenizer
from tests.family.toys import CHANGES, SAMPLES

WORDS = "The rain in the garden is quiet this morning."


@pytest.fixture(params=["toy_two", "toy_four"])
def toy(
    request: pytest.FixtureRequest, tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A checkpoint of the family: a tokenizer, and a config that names it."""
    family = request.param
    opener = {"toy_two": "open_two", "toy_four": "open_four"}[family]
    monkeypatch.setitem(registry.FAMILIES, family, f"tests.family.toys:{opener}")
    directory = tmp_path / family
    directory.mkdir()
    shutil.copy(tiny_dir / "tokenizer.json", directory)
    (directory / "config.json").write_text(json.dumps({"model_type": family}))
    return directory


async def collect(engine: PipelineEngine, **given: Any) -> list[Event]:
    return [e async for e in engine.generate([{"role": "user", "content": WORDS}], **given)]


@pytest.mark.parametrize("placement", ["one", "two", "processes"])
def test_a_family_of_any_number_of_stages(toy: Path, placement: Placement) -> None:
    ids = Tokenizer.open(toy).encode(WORDS)[:7]
    stages = list(CHANGES[toy.name])

    async def work() -> None:
        config = EngineConfig(placement=placement, prompts=PoolSettings())
        async with PipelineEngine.open(toy, config) as engine:
            assert list(engine.progress.stages) == stages
            answers = await asyncio.gather(
                *(collect(engine, params=Params(max_text_tokens=7)) for _ in range(5))
            )
            for events in answers:
                check(events)
            [*text, end] = await collect(
                engine, params=Params(max_text_tokens=7), modalities=("text",)
            )
            assert isinstance(end, Finished)
            assert end.audio is None
            assert [i for e in text if isinstance(e, TextDelta) for i in e.ids] == ids
            with pytest.raises(Invalid, match="does not offer tts"):
                _ = [e async for e in engine.speak("aloud")]
            await engine.drain(10)
            metrics = engine.metrics()
            assert metrics["stretto_engine_running"] == 0
            assert {f'stretto_stage_memory_bytes{{stage="{s}"}}' for s in stages} <= set(metrics)

    def check(events: list[Event]) -> None:
        assert [i for e in events if isinstance(e, TextDelta) for i in e.ids] == ids
        numbers = ids
        for change in CHANGES[toy.name].values():
            numbers = [change(n) for n in numbers]
        heard = np.concatenate([e.samples for e in events if isinstance(e, AudioChunk)])
        np.testing.assert_array_equal(
            heard, np.repeat(np.array(numbers, np.float32) / np.float32(1e4), SAMPLES)
        )
        end = events[-1]
        assert isinstance(end, Finished)
        assert (end.text, end.audio, end.usage.frames) == ("stop", "stop", 7)
        assert {s.lane for s in end.timeline} == {*stages, "packets"}

    asyncio.run(work())


@pytest.mark.parametrize(
    ("opener", "message"),
    [
        (
            "open_wrong",
            r"stage voice receives by \['writer>horn'\]; the pipeline's links are "
            r"\['writer>voice'\]",
        ),
        ("open_too_few", r"build_too_few made the stages .*; the stages of this host are"),
    ],
)
@pytest.mark.parametrize("toy", ["toy_two"], indirect=True)
def test_stages_that_do_not_fit_the_pipeline_are_refused_at_the_start(
    toy: Path, opener: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.FAMILIES, toy.name, f"tests.family.toys:{opener}")

    async def work() -> None:
        async with PipelineEngine.open(toy, EngineConfig(restart=False)):
            raise AssertionError("it came up")

    with pytest.raises(StageDead, match=message):
        asyncio.run(work())


@pytest.mark.parametrize("toy", ["toy_two"], indirect=True)
def test_a_builder_that_breaks_on_a_request_fails_it_alone(
    toy: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The prompt worker lives on, whether it was doing the job itself or a child of it; the log
    says what broke."""

    async def work() -> None:
        pool = PromptPool(toy, "tests.family.toys:ToyBuilder", PoolSettings())
        await pool.start()
        try:
            for content in (
                7,
                [{"type": "image_url", "image_url": {"url": "data:"}}],
            ):  # the toy expects words
                with pytest.raises(Bug, match="the prompt cannot be built"):
                    await pool.build(
                        Conversation.of(json.dumps([{"role": "user", "content": content}]).encode())
                    )
                err = ""
                while "TypeError" not in err:  # the worker's log has a thread of its own
                    err += capfd.readouterr().err
                    await asyncio.sleep(0)
            built = await pool.build(
                Conversation.of(json.dumps([{"role": "user", "content": WORDS}]).encode())
            )
            assert list(built.ids) == Tokenizer.open(toy).encode(WORDS)
            assert pool.worker.restarts == 0
        finally:
            await pool.close()

    asyncio.run(work())


def test_a_checkpoint_of_no_known_family_is_named(tmp_path: Path) -> None:
    for text, message in (
        ("{}", "model_type must be text"),
        ("[]", "must be a JSON object"),
        (
            '{"model_type": "unheard_of"}',
            "no family for model_type 'unheard_of'; known are .*qwen3_omni_moe",
        ),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=message):
            registry.open_model(tmp_path)


def test_families_come_by_entry_points(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        name = toy.name

        def load(self) -> Any:
            return lambda directory: f"opened {directory.name}"

    monkeypatch.delitem(registry.FAMILIES, toy.name)

    def found(group: str, name: str | None = None) -> list[Entry]:
        return [Entry()] if group == "stretto.families" and name in (None, toy.name) else []

    monkeypatch.setattr(registry, "entry_points", found)
    assert registry.open_model(toy) == f"opened {toy.name}"
