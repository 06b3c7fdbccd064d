"""Each overlap can be switched off on its own, and nothing but time changes: the same text, codes
and samples."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from stretto.config.engine import EngineConfig, HostSettings, OverlapSwitches
from stretto.engine.engine import PipelineEngine
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.load import Models
from stretto.models.qwen3_omni.prompts import PromptBuilder
from stretto.params import ChunkSizes, Params
from tests.engine.common import CHATS, Answer, collect, expected, run, same
from tests.pipeline import ONE_HOST, PROCESSES

PARAMS = Params(max_text_tokens=8, max_frames=10, seed=5, want_codes=True)
CASES = {
    "text": replace(PARAMS, packets=ChunkSizes(1, 4, 2)),
    "multi-turn": replace(PARAMS, temperature=0.8, max_frames=9),
    "audio": replace(PARAMS, packets=ChunkSizes(4, 25, None), max_frames=11),
    "image": replace(PARAMS, greedy_speech=True, packets=ChunkSizes(4000, 4000, None)),
}
# links exist only between processes; on a CPU the three about copies must still be accepted and
# harmless
OFF = {
    "zero_copy_encode": (PROCESSES, HostSettings(switches=OverlapSwitches(zero_copy_encode=False))),
    "copies": (
        PROCESSES,
        HostSettings(
            switches=OverlapSwitches(async_d2h=False, async_h2d=False, payload_stream=False)
        ),
    ),
    "overlap_depth": (ONE_HOST, HostSettings(overlap_depth=1)),
    "prefix_cache": (ONE_HOST, HostSettings(prefix_cache=False)),
}


@pytest.fixture(scope="module")
def wanted(tiny_dir: Path, models: Models) -> dict[str, Answer]:
    """What the engine gives with everything on, which is what the plain driver gives."""
    builder = PromptBuilder.open(tiny_dir, OmniConfig.read(tiny_dir))
    return {kind: expected(models, builder, CHATS[kind], params) for kind, params in CASES.items()}


@pytest.mark.parametrize("off", OFF)
def test_the_output_is_the_same_without_it(
    off: str, tiny_dir: Path, wanted: dict[str, Answer]
) -> None:
    placement, host = OFF[off]

    async def work() -> None:
        async with PipelineEngine.open(
            tiny_dir, EngineConfig(placement=placement, host=host)
        ) as engine:
            kinds = list(CASES)
            together = [collect(engine.generate(CHATS[k], params=CASES[k])) for k in kinds]
            for kind, got in zip(kinds, await asyncio.gather(*together), strict=True):
                same(got, wanted[kind])
            # Alone, and with a prompt that was seen before: only the switch decides whether it is
            # reused.
            again = await collect(engine.generate(CHATS["audio"], params=CASES["audio"]))
            same(again, wanted["audio"])
            assert again.end is not None
            assert (again.end.usage.cached_tokens > 0) == host.prefix_cache

    run(work())
