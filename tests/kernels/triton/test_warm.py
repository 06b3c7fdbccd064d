"""Processes that compile ahead may fail in any way, and the note that they are done is believed
only if it is whole."""

import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.kernels.triton import linear
from stretto.kernels.triton.compile_ahead import Marker, Workers, digest, python, sources
from stretto.layers import decoder
from stretto.models import compile_ahead as shared
from stretto.models.qwen3_omni.build import BUILD
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.load import Source
from stretto.models.qwen3_omni.talker import TalkerAdapter
from stretto.models.qwen3_omni.thinker import ThinkerAdapter
from stretto.models.qwen3_tts.build import BUILD as SPEECH_BUILD
from stretto.models.qwen3_tts.config import TtsConfig
from stretto.models.qwen3_tts.load import Source as SpeechSource
from stretto.models.qwen3_tts.talker import TalkerAdapter as SpeechLane
from stretto.stage.runner import graphs, prefill_graphs
from stretto.stage.runner.adapter import decode_step
from stretto.stage.runner.columns import SamplingMode
from stretto.testing import qwen3_tts as speaking
from stretto.types import ExpertWeights

ABOUT = {
    "sources": "a",
    "tuning": "b",
    "torch": "2",
    "triton": "3",
    "gpu": "x",
    "tasks": [["thinker", [1, 2]]],
}


def code(text: str) -> list[str]:
    return [sys.executable, "-c", text]


@pytest.mark.parametrize("key", sorted(ABOUT))
def test_another_ingredient_is_another_marker(key: str, tmp_path: Path) -> None:
    Marker.of(tmp_path, ABOUT).write()
    assert Marker.of(tmp_path, dict(reversed(ABOUT.items()))).there
    assert not Marker.of(tmp_path, {**ABOUT, key: "other"}).there


@pytest.mark.parametrize("text", [b"", b"{", b'{"sources": "z"}', b"\xff\x00"])
def test_a_broken_marker_counts_for_nothing_and_is_replaced(text: bytes, tmp_path: Path) -> None:
    marker = Marker.of(tmp_path / "cache", ABOUT)
    assert not marker.there
    marker.write()
    assert marker.there
    marker.path.write_bytes(text)
    assert not marker.there
    marker.write()
    assert marker.there
    assert [p.name for p in marker.path.parent.iterdir()] == [marker.path.name]


def test_a_marker_that_cannot_be_written_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    marker = Marker.of(tmp_path / "file" / "cache", ABOUT)
    marker.write()
    assert "cannot be written" in caplog.text
    assert not marker.there


def test_digest_sees_content_names_and_absence(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_text("1")
    seen = {digest([a]), digest([a, b])}
    b.write_text("")
    seen |= {digest([a, b]), digest([b])}
    a.write_text("2")
    seen |= {digest([a]), digest([a, b])}
    assert len(seen) == 6
    assert digest([a, b]) == digest([b, a])


def test_sources_are_there() -> None:
    found = sources()
    assert all(p.is_file() for p in found)
    assert {
        "compile_ahead.py",
        "linear.py",
        "fused.py",
        "fused_frame.py",
        "adapter.py",
        "building.py",
    } <= {p.name for p in found}


def test_all_is_well_if_all_end_well() -> None:
    workers = Workers([code("pass"), code("import sys; sys.stderr.write('a warning')")])
    assert workers.wait(60)
    assert not workers.running


def test_who_dies_is_told_of_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    dead = code("raise MemoryError('none left')")
    killed = code("import os; os.kill(os.getpid(), 9)")
    workers = Workers([dead, code("pass"), killed, ["/no/such/program"]])
    assert not workers.wait(60)
    assert workers.failed == 3
    assert "none left" in caplog.text
    assert "ended with -9" in caplog.text
    assert "did not start" in caplog.text


def test_who_hangs_is_ended() -> None:
    workers = Workers([code("import signal; signal.pause()")])
    assert workers.running
    assert not workers.wait(0)
    assert not workers.running


def test_close_ends_them() -> None:
    workers = Workers([code("import signal; signal.pause()")])
    process = workers._running[0][0]
    workers.close()
    assert process.poll() == -9


def test_python_runs_modules() -> None:
    assert Workers([python("compileall", "-h")]).wait(60)


# -- what is compiled ahead is what will be launched


def kind_of(value: object) -> object:
    """What a kernel is specialised by: of a number, whether it is 1 or divisible by 16; of a
    tensor, its type and whether it is aligned."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int) and not isinstance(value, bool):
        return "one" if value == 1 else ("int", value % 16 == 0)
    return type(value)


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> set[object]:
    """Variants of kernels that are launched, on a CPU; nothing is computed."""
    interpreted = type(linear._matrix)
    if interpreted.__name__ != "InterpretedFunction":
        pytest.skip("kernels are compiled for real here")
    found: set[object] = set()

    def launch(self: Any, *args: object, grid: object, warmup: bool, **constants: object) -> None:
        plain = self.kwargs["do_not_specialize"] or ()
        given = [
            None if name in plain else kind_of(a)
            for name, a in zip(self.arg_names, args, strict=False)
        ]
        found.add((self.fn.__name__, tuple(given), tuple(sorted(constants.items()))))

    monkeypatch.setattr(interpreted, "run", launch)
    monkeypatch.setattr(decoder, "usable", lambda x: True)
    return found


def wide(c: OmniConfig, layers: int) -> OmniConfig:
    """A configuration that there are kernels for."""
    text, talker, predictor = c.thinker.text, c.talker.text, c.talker.predictor
    assert talker.moe is not None
    speech = replace(
        talker,
        hidden_size=64,
        num_layers=layers,
        moe=replace(talker.moe, expert_size=32, shared_size=64),
    )
    predictor = replace(predictor, hidden_size=64, num_layers=layers)
    thinker = replace(c.thinker, text=replace(text, num_layers=layers))
    return replace(c, thinker=thinker, talker=replace(c.talker, text=speech, predictor=predictor))


@pytest.mark.parametrize(
    ("stage", "experts"), [("thinker", "full"), ("thinker", "float8"), ("talker", "full")]
)
@pytest.mark.parametrize(("blocks", "rows"), [(1000, 33), (1023, 32)])
def test_no_captured_step_launches_anything_else(
    stage: str,
    experts: ExpertWeights,
    blocks: int,
    rows: int,
    variants: set[Any],
    tiny_config: OmniConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Deep models with a large pool launch the variants that the processes launched before them,
    and no others."""
    config = wide(tiny_config, 5)
    monkeypatch.setattr(OmniConfig, "read", lambda model: config)
    sizes = [n for n in graphs.SIZES if n <= rows]
    tasks = shared.tasks_of(stage, sizes, prefill_graphs.SIZES)
    for share in shared.share_out(tasks, 3):
        pool = shared.blocks_alike(blocks)
        assert BUILD.compile_ahead is not None
        shared.run(
            shared.CompileJob(
                BUILD.compile_ahead.adapter,
                "",
                "cpu",
                "bfloat16",
                rows,
                2048,
                16,
                pool,
                tuple(share),
                experts,
            )
        )
    ahead = set(variants)
    variants.clear()

    source = Source.open(
        config, "cpu", torch.bfloat16, "dummy", progress=False, expert_weights=experts
    )
    adapter: Any
    if stage == "thinker":
        thinker = source.thinker()
        adapter = ThinkerAdapter(thinker, thinker.cache(blocks + 1), rows, 2048)
    else:
        talker = source.talker()
        adapter = TalkerAdapter(talker, talker.cache(blocks + 1), rows, 2048)
    capture(adapter, sizes)
    assert len(variants) > 30
    assert variants <= ahead, variants - ahead


@pytest.mark.parametrize(("blocks", "rows"), [(1000, 33), (1023, 32)])
@pytest.mark.parametrize("width", [64, 128], ids=["alike", "projected"])
def test_nor_does_one_of_a_speech_model(
    width: int,
    blocks: int,
    rows: int,
    variants: set[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    speaking.write_tiny(tmp_path)
    small = TtsConfig.read(tmp_path)
    t = small.talker
    decoder, predictor = (
        replace(
            c, hidden_size=size, head_dim=16, num_layers=5, dense_size=96, mrope_section=section
        )
        for c, size, section in ((t.decoder, width, (3, 3, 2)), (t.predictor, 64, None))
    )
    config = replace(small, talker=replace(t, decoder=decoder, predictor=predictor))
    monkeypatch.setattr(TtsConfig, "read", lambda model: config)
    sizes = [n for n in graphs.SIZES if n <= rows]
    for share in shared.share_out(shared.tasks_of("talker", sizes, prefill_graphs.SIZES), 3):
        pool = shared.blocks_alike(blocks)
        assert SPEECH_BUILD.compile_ahead is not None
        shared.run(
            shared.CompileJob(
                SPEECH_BUILD.compile_ahead.adapter,
                "",
                "cpu",
                "bfloat16",
                rows,
                2048,
                16,
                pool,
                tuple(share),
            )
        )
    ahead = set(variants)
    variants.clear()
    talker = SpeechSource.open("", "cpu", torch.bfloat16, "dummy", progress=False).talker()
    assert (talker.code_predictor.small_to_mtp_projection is not None) == (width == 128)
    capture(SpeechLane(talker, talker.cache(blocks + 1), rows, 2048), sizes)
    assert len(variants) > 30
    assert variants <= ahead, variants - ahead


def capture(adapter: Any, sizes: list[int]) -> None:
    """All that a host captures of a adapter, and what its runner launches beside that."""
    assert adapter.fused
    decoding = graphs.DecodeGraphs(adapter, sizes)
    prompts = adapter.prompts
    assert prompts is not None
    with torch.inference_mode():
        for size in decoding.sizes:
            inputs = decoding.inputs(size)
            decode_step(adapter, inputs[0], inputs[1], inputs[2], decoding.modes[0])
        for size in prompts.sizes:
            prompts.forward(size)
        for n in range(1, 9):  # as `Runner` does after a pass over prompts
            hidden = torch.zeros(n, adapter.model.model.config.hidden_size, dtype=torch.bfloat16)
            pick, numbers, positions = torch.zeros(3, n, dtype=torch.int64)
            adapter.pick(numbers, positions, hidden[pick], SamplingMode(True, True))
