"""What an engine tells of itself after real requests: the numbers are the requests' own."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from stretto.config.engine import EngineConfig
from stretto.config.placement import Placement
from stretto.engine.engine import PipelineEngine
from stretto.engine.events import Finished
from stretto.params import Params
from tests.engine.common import CHATS, collect, run
from tests.pipeline import LINKS, STAGES

PARAMS = Params(max_text_tokens=6, ignore_eos=True, max_frames=9, min_frames=9, greedy_speech=True)
ANSWERS = 3
WARM_UP = 2
"""Tokens and frames of the one request that the engine sends before it is ready."""


async def told(
    engine: PipelineEngine, fulfilled: Callable[[Mapping[str, float]], bool]
) -> Mapping[str, float]:
    """Its numbers, once they are as they should be: hosts tell theirs when they are asked, maybe in
    between, and the threads of a link count a chunk after the other end has it."""
    while not fulfilled(values := engine.metrics()):
        await asyncio.sleep(0.01)
    return values


def ends(link: str) -> tuple[str, str]:
    """The labels of both ends."""
    return f'{{link="{link}",end="out"}}', f'{{link="{link}",end="in"}}'


def counted(values: Mapping[str, float]) -> bool:
    """Whether both ends of each link have counted the same chunks, in all their numbers."""
    for out, into in map(ends, LINKS):
        chunks = {values["stretto_link_chunks_total" + end] for end in (out, into)}
        chunks |= {
            values["stretto_link_put_seconds_count" + out],
            values["stretto_link_take_seconds_count" + into],
        }
        chunks |= {values["stretto_link_queue_seconds_count" + end] for end in (out, into)}
        sizes = {values["stretto_link_bytes_total" + end] for end in (out, into)}
        if len(chunks) > 1 or len(sizes) > 1 or min(chunks) < ANSWERS or min(sizes) == 0:
            return False
    return True


def steps(values: Mapping[str, float], stage: str, kind: str) -> float:
    return values[f'stretto_stage_steps_total{{stage="{stage}",kind="{kind}"}}']


@pytest.mark.parametrize("placement", ["one", "processes"])
def test_numbers_after_real_requests(tiny_dir: Path, tmp_path: Path, placement: Placement) -> None:
    async def work() -> None:
        config = EngineConfig(placement=placement, trace_dir=str(tmp_path))
        async with PipelineEngine.open(tiny_dir, config) as engine:
            first = engine.metrics()
            for stage in STAGES:
                assert steps(first, stage, "decode") == 0, "there from the first look on"
            for _ in range(ANSWERS):
                got = await collect(engine.generate(CHATS["text"], params=PARAMS))
                assert isinstance(got.end, Finished)
            expected = {
                'stretto_stage_frames_total{stage="code2wav"}': WARM_UP + 9.0 * ANSWERS,
                'stretto_stage_tokens_total{stage="thinker"}': WARM_UP + 6.0 * ANSWERS,
                'stretto_stage_tokens_total{stage="talker"}': (WARM_UP + 1)
                + (9.0 + 1) * ANSWERS,  # and the end of each
            }
            alone = placement == "one"
            values = await told(
                engine, lambda v: expected.items() <= v.items() and (alone or counted(v))
            )
        for stage in STAGES:
            assert values[f'stretto_stage_queue_seconds_count{{stage="{stage}"}}'] == 1 + ANSWERS
        assert 0 < values['stretto_stage_encoding{stage="thinker"}'] + 1 <= 1
        for stage in STAGES:
            for kind in ("decode", "prefill"):
                if (stage, kind) != ("code2wav", "prefill"):
                    made = steps(values, stage, kind)
                    labels = f'{{stage="{stage}",kind="{kind}"}}'
                    assert made > 0 or (stage, kind) == ("talker", "prefill")
                    assert values[f"stretto_stage_device_seconds_count{labels}"] == made
                    assert values[f"stretto_stage_launch_seconds_count{labels}"] == made
                    assert values[f"stretto_stage_device_seconds_sum{labels}"] > 0 or not made
        for link in LINKS:
            if alone:
                assert values[f'stretto_link_handed_total{{link="{link}"}}'] >= ANSWERS
                continue
            out, into = ends(link)
            for end in (out, into):
                assert (
                    values[f"stretto_link_queued{end}"]
                    == values[f"stretto_link_purged_total{end}"]
                    == 0
                )
            assert (
                values[f"stretto_link_errors_total{out}"]
                == values[f"stretto_link_errors_total{into}"]
                == 0
            )
        spans = [
            e for e in json.loads(next(tmp_path.glob("*.json")).read_text()) if e.get("ph") == "X"
        ]
        names: dict[str, list[str]] = {}
        for span in spans:
            names.setdefault(span["cat"], []).append(span["name"])
        hops = set() if alone else {f"{link} {end}" for link in LINKS for end in ("put", "take")}
        assert set(names) == {*STAGES, *hops, "loop"}
        assert all(
            re.fullmatch(r"decode of 1|(prefill|mixed) of 1, \d+ tokens", n)
            for n in names["thinker"]
        )
        assert all(re.fullmatch(r"1 streams of [1-8] frames", n) for n in names["code2wav"])
        loop = names["loop"]
        assert loop.count("admit") == (1 + ANSWERS) * (1 if alone else len(STAGES))
        for stage in STAGES:
            assert (
                loop.count(f"launch {stage}") == loop.count(f"retire {stage}") == len(names[stage])
            )

    run(work())
