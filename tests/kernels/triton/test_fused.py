"""Fused layers and frames against the plain modules, on small decoders of the same make."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from stretto.kernels.formats import FLOAT8_ROWS
from stretto.kernels.reference.sampling import SamplingRows
from stretto.layers.config import DecoderConfig, MoeConfig
from stretto.layers.decoder import Decoder, PagedPass
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.talker import Talker
from stretto.models.speech.adapter import SpeechAdapter
from stretto.models.speech.config import FrameConfig
from stretto.models.speech.talker import FrameRows, FrameTalker, TalkerModel
from stretto.models.weights import build
from stretto.stage.runner.adapter import decode_step
from stretto.stage.runner.columns import SamplingMode
from stretto.stage.runner.rows import DeviceRows
from stretto.types import SamplingParams
from tests.kernels.triton.layers import DENSE, MOE, close, filled

fused = pytest.importorskip("stretto.layers.fused")
linear = pytest.importorskip("stretto.kernels.triton.linear")

SHARED = dataclasses.replace(MOE, moe=MoeConfig(8, 2, 32, True, 64))
FLOAT8 = dataclasses.replace(MOE, moe=MoeConfig(8, 2, 32, True, None, FLOAT8_ROWS))


@pytest.mark.parametrize(
    "config", [DENSE, MOE, SHARED, FLOAT8], ids=["dense", "moe", "shared", "float8"]
)
@pytest.mark.parametrize("rows", [1, 3])
def test_layers_equal_the_plain_decoder(
    device: torch.device, config: DecoderConfig, rows: int
) -> None:
    assert fused.fits(config)
    decoder = build(lambda: Decoder(config), device, torch.float32)
    filled(decoder, device, rows)
    decoder.prepare(device)
    decoder.fused = None  # the plain way, whatever is usable here
    plain, ours = (decoder.cache(12, 16, device, torch.float32) for _ in range(2))
    past = torch.randn(plain.data.shape, generator=torch.Generator().manual_seed(9)).to(device)
    plain.data.copy_(past)
    ours.data.copy_(past)
    lengths = [40, 1, 17][:rows]
    tables = [[1, 2, 3], [4], [5, 6]][:rows]
    paging = plain.page([(t, n - 1, 1) for t, n in zip(tables, lengths, strict=True)])
    x = torch.randn(rows, config.hidden_size, generator=torch.Generator().manual_seed(3)).to(device)
    positions = torch.tensor([n - 1.0 for n in lengths], device=device)
    if config.mrope_section is not None:
        positions = positions.expand(3, -1)
    kept = x.clone()

    def after(layer: int, stream: torch.Tensor) -> torch.Tensor:
        return stream + 0.1 * layer

    wanted = decoder(x, positions, PagedPass(plain, paging), after)
    cos, sin = decoder.rope(positions, x.dtype)
    found = fused.FusedLayers(decoder, device).paged(x, cos, sin, ours, paging, after=after)
    assert close(found, wanted)
    assert close(ours.data, plain.data)
    assert torch.equal(x, kept)  # the caller's


@pytest.mark.parametrize("summed", [False, True], ids=["word", "sum"])
def test_begin_equals_the_plain_lookups(device: torch.device, summed: bool) -> None:
    from stretto.kernels.triton.begin import begin

    generator = torch.Generator().manual_seed(4)
    decoder = build(lambda: Decoder(MOE), device, torch.float32)
    decoder.prepare(device)
    state = DeviceRows(4, 6, 64, decoder.cache(40, 16, device, torch.float32))
    state.tables.copy_(torch.randperm(30, generator=generator).view(5, 6))
    state.offset.copy_(torch.tensor([0.0, 3.0, -2.0, 100.0, 0.0]))
    words = torch.randn(50, 64, generator=generator).to(device)
    rows, positions = (
        torch.tensor([3, 0, 4], device=device),
        torch.tensor([0, 95, 16], device=device),
    )
    values = torch.tensor([7, 49, 0], device=device)
    if summed:
        own = torch.randn(5, 64, generator=generator).to(device)
        x = own[rows] + words[values]
    else:
        own = torch.tensor([1, 2, 3, 4, 5], device=device)
        x = words[own[rows]]
    assert decoder.rope.inv_freq is not None
    begun = begin(
        rows, positions, values, words, own, state.tables, state.offset, decoder.rope.inv_freq, 16
    )
    paging = state.decode_paging(rows, positions)
    cos, sin = decoder.rope((positions + state.offset[rows]).expand(3, -1), torch.float32)
    assert torch.equal(begun.x, x)
    assert torch.equal(begun.slots, paging.slots)
    assert torch.equal(begun.lengths, paging.lengths)
    assert begun.idle.tolist() == [0, 0, 1], "the last row is the sink"
    for m, row in enumerate(rows.tolist()):
        used = int(positions[m]) // 16 + 1
        assert torch.equal(begun.tables[m, :used], state.tables[row, :used])
    assert torch.allclose(begun.cos, cos, atol=1e-5)
    assert torch.allclose(begun.sin, sin, atol=1e-5)


def test_a_padded_step_reads_no_expert_for_its_padding(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the other rows come out as without it."""
    generator = torch.Generator().manual_seed(6)
    decoder = build(lambda: Decoder(MOE), device, torch.float32)
    filled(decoder, device, 6)
    decoder.prepare(device)
    decoder.fused = fused.FusedLayers(decoder, device)
    state = DeviceRows(4, 6, 64, decoder.cache(40, 16, device, torch.float32))
    state.tables[:4] = torch.randperm(24, generator=generator).view(4, 6) + 1
    words = torch.randn(50, 64, generator=generator).to(device)
    tables: list[torch.Tensor] = []
    choose = fused.experts_many.choose

    def watched(*given: Any) -> Any:
        choice = choose(*given)
        tables.append(choice.table)
        return choice

    monkeypatch.setattr(fused.experts_many, "choose", watched)
    own = torch.tensor([1, 2, 3, 4, 5], device=device)
    found = []
    for rows in ([2, 0], [2, 0, state.sink, state.sink]):
        state.cache.data.copy_(
            torch.randn(state.cache.data.shape, generator=torch.Generator().manual_seed(7))
        )
        at = torch.tensor(rows, device=device)
        positions = torch.where(at == state.sink, 0, 30)
        zeros = torch.zeros_like(at)
        found.append(
            decoder.fused_step(
                at, positions, zeros, words, own, state.tables, state.offset, state.cache
            )
        )
    few, many = tables[: len(tables) // 2], tables[len(tables) // 2 :]
    assert all((t[:, 2:] == -1).all() for t in many)
    assert all(torch.equal(t[:, :2], alone) for t, alone in zip(many, few, strict=True))
    assert close(found[1][:2], found[0])


def omni_talker(config: OmniConfig, device: torch.device) -> FrameTalker:
    shape = {"hidden_size": 64, "head_dim": 16}
    t = dataclasses.replace(
        config.talker,
        text=dataclasses.replace(config.talker.text, moe=MoeConfig(8, 2, 32, True, 64), **shape),
        predictor=dataclasses.replace(config.talker.predictor, **shape),
    )
    wide = dataclasses.replace(config, talker=t)
    model = build(lambda: Talker(wide), device, torch.float32)
    filled(model, device, 1)
    model.prepare(torch.randn(config.thinker.text.vocab_size, t.thinker_hidden_size).to(device))
    return model


def projecting_talker(device: torch.device) -> FrameTalker:
    """Whose predictor is narrower than itself, as that of Qwen3-TTS's larger size."""
    wide = dataclasses.replace(
        DENSE, hidden_size=128, head_dim=16, vocab_size=1100, mrope_section=(3, 3, 2)
    )
    frames = FrameConfig(
        wide, dataclasses.replace(DENSE, head_dim=16), 4, bos=80, eos=90, text_end=1, text_pad=2
    )
    model = build(lambda: FrameTalker(frames, TalkerModel(wide)), device, torch.float32)
    filled(model, device, 1)
    assert model.code_predictor.small_to_mtp_projection is not None
    model.prepare_frames()
    return model


@pytest.mark.parametrize("kind", ["alike", "projected"])
@pytest.mark.parametrize("batch", [1, 3])
def test_frame_equals_the_plain_talker(
    device: torch.device,
    tiny_config: OmniConfig,
    batch: int,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All codes, greedy and drawn, and the sum of their embeddings."""
    model = omni_talker(tiny_config, device) if kind == "alike" else projecting_talker(device)
    check_frame(device, model, batch, monkeypatch)


def test_a_frame_of_many_rows_takes_its_first_two_positions_apart(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stretto.models.speech.fused_frame.MAX_ROWS", 4)
    check_frame(device, projecting_talker(device), 3, monkeypatch)


def check_frame(
    device: torch.device, model: FrameTalker, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cpu":  # the interpreter takes its time for each program: a few large ones
        defaults = linear.matrix_defaults
        monkeypatch.setattr(
            linear, "matrix_defaults", lambda *sizes: defaults(*sizes) | {"BN": 128}
        )
    from stretto.kernels.triton.sampling import Columns
    from stretto.models.speech.fused_frame import FusedFrame

    c = model.frames.decoder
    assert fused.fits(model.frames.predictor)
    assert fused.fits(c)
    hidden = torch.randn(batch, c.hidden_size, generator=torch.Generator().manual_seed(batch)).to(
        device
    )
    at = [2, 0, 1][:batch]  # rows of the persistent state
    picks = [
        SamplingParams(temperature=0.0),
        SamplingParams(0.9, top_k=5, seed=3),
        SamplingParams(1.0, seed=4),
    ]
    params = SamplingRows.of([picks[i] for i in range(batch)], device)
    positions = torch.tensor([7, 11, 30][:batch], device=device)
    rows = FrameRows(
        params,
        params,
        positions + 1,
        torch.zeros(batch, c.vocab_size, dtype=torch.bool, device=device),
    )
    wanted = model.frame(hidden, rows, model.frame_cache(4))

    floats = torch.ones(3, 4, device=device)
    ints = torch.zeros(2, 4, dtype=torch.int64, device=device)
    for i, row in enumerate(at):
        floats[:, row] = torch.stack((params.temperature[i], params.top_p[i], params.penalty[i]))
        ints[:, row] = torch.stack((params.top_k[i], params.seed[i]))
    columns = Columns(floats, ints)
    seen = torch.zeros(4, c.vocab_size, dtype=torch.bool, device=device)
    floor = torch.zeros(4, dtype=torch.int64, device=device)
    layers = fused.FusedLayers(model.code_predictor.model, device)
    frame = FusedFrame(model, layers, seen, floor, columns, columns)
    total = torch.full((4, c.hidden_size), float("nan"), device=device)
    place, pair = frame.places(batch)
    pair.fill_(float("nan"))
    place.copy_(hidden)
    codes = frame(
        place, pair, torch.tensor(at, device=device), positions, model.frame_cache(4), total
    )
    assert codes.tolist() == wanted.codes.tolist()
    assert close(total[at], wanted.embedding)
    assert [seen[row].nonzero().flatten().tolist() for row in at] == [
        [c] for c in codes[:, 0].tolist()
    ]


def test_a_lane_steps_as_the_plain_one(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole step of rows of persistent state, with a projecting predictor; and a pick behind a
    plain pass."""
    if device.type == "cpu":
        defaults = linear.matrix_defaults
        monkeypatch.setattr(
            linear, "matrix_defaults", lambda *sizes: defaults(*sizes) | {"BN": 128}
        )
    model = projecting_talker(device)
    model.text_table = torch.randn(8, 128, generator=torch.Generator().manual_seed(2)).to(device)
    model.model.fused = model.code_predictor.model.fused = None
    plain: SpeechAdapter[Any, Any] = SpeechAdapter(model, model.cache(5), 3, 32)
    decoders = model.model, model.code_predictor.model
    for decoder in decoders:
        decoder.fused = fused.FusedLayers(decoder, device)
    fast: SpeechAdapter[Any, Any] = SpeechAdapter(model, model.cache(5), 3, 32)
    assert fast.fused
    assert not plain.fused
    rows, positions, values = torch.tensor([[2, 0], [0, 0], [5, 1]], device=device)
    for adapter in (plain, fast):
        adapter.rows.tables.copy_(torch.arange(8).view(4, 2) % 5)
        adapter.embedding.copy_(torch.randn(4, 128, generator=torch.Generator().manual_seed(3)))
        adapter.code0.write(2, SamplingParams(0.9, top_k=9, seed=5))
    found = decode_step(fast, rows, positions, values, SamplingMode(True, True))
    for decoder in decoders:
        decoder.fused = None
    wanted = decode_step(plain, rows, positions, values, SamplingMode(True, True))
    assert found.tokens.tolist() == wanted.tokens.tolist()
    assert close(fast.embedding, plain.embedding)
    assert torch.equal(fast.rows.seen, plain.rows.seen)
    hidden = torch.randn(2, 128, generator=torch.Generator().manual_seed(4)).to(device)
    for adapter in (plain, fast):
        adapter.rows.seen.zero_()
    again = [
        adapter.pick(rows, positions + 1, hidden, SamplingMode(True, True)).tokens
        for adapter in (plain, fast)
    ]
    assert again[0].tolist() == again[1].tolist()
    assert close(fast.embedding, plain.embedding)
