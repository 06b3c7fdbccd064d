"""The vocoder's transformer by kernels against plain PyTorch, piece by piece and as a whole."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from stretto.kernels.reference.moe import swiglu
from stretto.kernels.reference.norm import rms_norm
from stretto.layers import streaming
from stretto.layers.capture import capture_graphs
from stretto.layers.streaming import Push, TailLayout
from stretto.layers.targets import targets
from stretto.models.qwen3_omni.code2wav import Code2Wav
from stretto.models.speech import vocoder as vocoding
from stretto.models.speech.config import VocoderConfig
from stretto.models.speech.vocoder import ConvNeXt
from stretto.models.speech.vocoder_state import VocoderState
from stretto.models.weights import build
from tests.kernels.triton.vocoders import noise, play

kernels = pytest.importorskip("stretto.kernels.triton.wave")

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
EPS = 1e-5
NOTHING = Push((), ())  # of the convolutions behind the transformer
CONFIG = VocoderConfig(
    codebook_size=16,
    num_quantizers=3,
    hidden_size=24,
    num_layers=2,
    num_heads=3,
    head_dim=8,
    ffn_size=40,
    window=5,
    rms_eps=EPS,
    rope_theta=1e4,
    upsampling_ratios=(1,),
    upsample_rates=(3, 2),
    decoder_dim=36,
)


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is the reference here, whatever is usable, until `by_kernels`; nothing is rounded
    to TF32."""
    monkeypatch.setattr(streaming, "usable", lambda x: False)
    monkeypatch.setattr(vocoding, "usable", lambda x: False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody takes the plain way unseen. (Only a test's second half wants this: it asks for the
    fixture by name.)"""
    switch(monkeypatch)


def switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocoding, "usable", lambda x: True)
    monkeypatch.setattr(Code2Wav, "timing", None)
    monkeypatch.setattr(vocoding.F, "layer_norm", None)


def close(found: torch.Tensor, wanted: torch.Tensor, limit: float = 1e-5) -> None:
    """In float32 to the last digits; in bfloat16, where the plain way rounds more often, on the
    whole."""
    assert found.dtype == wanted.dtype
    assert torch.isfinite(found).all()
    if found.dtype == torch.float32:
        torch.testing.assert_close(found, wanted, rtol=0, atol=limit)
    else:
        alike(found, wanted, 0.01)


def alike(found: torch.Tensor, wanted: torch.Tensor, limit: float) -> None:
    assert float((found - wanted).float().norm()) <= limit * float(wanted.float().norm())


def vocoder(
    device: torch.device, config: VocoderConfig = CONFIG, dtype: torch.dtype = torch.float32
) -> Code2Wav:
    """With weights under which every path matters and none amplifies what is rounded; samples are
    not clipped."""
    model = build(lambda: Code2Wav(config), device, dtype)
    g = torch.Generator().manual_seed(4)
    for name, view in targets(model, "").items():
        values = torch.randn(view.shape, generator=g)
        if view.dim() == 1:
            view.copy_(
                1 + 0.1 * values
                if name.endswith("norm.weight")
                else (0.5 if len(view) > 1 else 0.05) * values
            )
        else:
            gain = 0.05 if view.shape[0] == 1 else 0.3 if "conv2.conv" in name else 1.0
            gain = (
                2.0 if "q_proj" in name or "k_proj" in name else gain
            )  # so that attention is far from even
            view.copy_(gain * values * (1.0 if "embedding" in name else view[0].numel() ** -0.5))
    model.prepare()
    return model


def codes_of(*shape: int, seed: int, most: int = CONFIG.codebook_size) -> torch.Tensor:
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(seed))


def at_frames(model: Code2Wav, frames: list[int], max_frames: int, seed: int) -> VocoderState:
    """A state whose streams are so far along, with noise where frames were written and elsewhere
    alike."""
    state = model.state(len(frames), max_frames)
    state.window.copy_(noise(*state.window.shape, seed=seed))
    state.frames[:-1] = torch.tensor(frames)
    return state


@BOTH
@pytest.mark.parametrize("hidden", [16, 24, 1024])
def test_settle_equals_the_reference(hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    x, y = (noise(5, hidden, seed=i, scale=3.0).to(device, dtype) for i in (1, 2))
    scale, gain = (noise(hidden, seed=i).to(device, dtype) for i in (3, 4))
    before = x.clone()
    total, normed = kernels.settle(x, scale, y, (gain, EPS))
    wanted = torch.addcmul(x, scale, y)
    close(total, wanted)
    close(normed, rms_norm(wanted, gain, EPS))
    again, alone = kernels.settle(x, scale, y, (gain, EPS), keep=False)
    assert again is x
    assert torch.equal(x, before)
    assert torch.equal(alone, normed)
    assert torch.equal(kernels.add_scaled(x[None], scale, y[None])[0], total)


@BOTH
@pytest.mark.parametrize("size", [1, 40, 1025, 3072])
def test_swiglu_equals_the_reference(size: int, dtype: torch.dtype, device: torch.device) -> None:
    x = noise(3, 2 * size, seed=size, scale=4.0).to(device, dtype)
    close(kernels.swiglu(x), swiglu(x))


@BOTH
@pytest.mark.parametrize("rows", [1, 3])
def test_products_equal_the_reference(rows: int, dtype: torch.dtype, device: torch.device) -> None:
    """By the library or not."""
    x, w = (
        noise(rows, 128, seed=1).to(device, dtype),
        noise(96, 128, seed=2, scale=0.1).to(device, dtype),
    )
    close(kernels.product(x, w), F.linear(x, w))
    close(kernels.gated(x, w), swiglu(F.linear(x, w)))
    narrow = noise(rows, 24, seed=3).to(device, dtype)
    close(kernels.product(narrow, w[:, :24].contiguous()), F.linear(narrow, w[:, :24]))


@BOTH
@pytest.mark.parametrize(("slots", "time"), [(1, 1), (2, 3), (3, 5)])
def test_depthwise_equals_the_reference(
    slots: int, time: int, dtype: torch.dtype, device: torch.device
) -> None:
    for channels in (24, 1024):
        block = ConvNeXt(channels, TailLayout(), 1).to(device, dtype)
        weights = {
            **dict(block.dwconv.conv.named_parameters()),
            **dict(block.norm.named_parameters(prefix="norm")),
        }
        for i, p in enumerate(weights.values()):
            p.data.copy_(noise(*p.shape, seed=i))
        block.prepare()
        bias = block.norm.bias
        assert bias is not None
        x = noise(slots, 6 + time, channels, seed=9).to(device, dtype)
        found = kernels.depthwise(
            x, block.taps, block.dwconv.conv.bias, (block.norm.weight, bias, 1e-6)
        )
        close(
            found, F.layer_norm(block.dwconv(x), (channels,), block.norm.weight, bias, 1e-6), 2e-5
        )


@BOTH
@pytest.mark.parametrize(("slots", "time"), [(1, 1), (2, 3), (3, 5)])
def test_embed_equals_the_reference(
    slots: int, time: int, dtype: torch.dtype, device: torch.device
) -> None:
    model = vocoder(device, dtype=dtype)
    state = at_frames(model, [0, 7, 4000][:slots], 5, 1)
    codes = codes_of(slots, 3, time, seed=2, most=200).sub_(90).to(device)  # mostly out of range
    codes[0, 0, 0], codes[0, 1, 0] = 2**40, -(2**40)
    norm = model.pre_transformer.first_norm()
    x, normed, turn = kernels.embed(
        codes, model.code_embedding.weight, state.frames[:-1], model.inv_freq, norm
    )
    wanted = model.code_embedding(codes.clamp(0, 15) + model.code_offset).mean(1).flatten(0, 1)
    close(x, wanted)
    close(normed, rms_norm(wanted, *norm))
    lengths = torch.zeros(slots, dtype=torch.int64, device=device)
    timing = model.timing(state.part(), lengths, time, torch.float32)
    half = CONFIG.head_dim // 2
    torch.testing.assert_close(
        turn, torch.cat((timing.cos[:, :half], timing.sin[:, :half]), 1), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(
    ("time", "window"), [(1, 1), (1, 5), (2, 2), (2, 13), (3, 5), (5, 1), (5, 5), (5, 13)]
)
def test_attention_equals_the_reference(time: int, window: int, device: torch.device) -> None:
    """Streams of all ages, one of them idle and one at its beginning; then some go on while others
    stand still."""
    model = vocoder(device, replace(CONFIG, window=window))
    ages = [0, 3, 1000, 0, 8 * 125 - 1]
    ours, reference = (at_frames(model, ages, 5, 1) for _ in range(2))
    attention = model.pre_transformer.layers[1].self_attn
    rng = random.Random(time)
    for i in range(3):
        lengths = torch.tensor([time, 0, time, 0, rng.randint(0, time)], device=device)
        x = noise(len(ages), time, CONFIG.hidden_size, seed=i).to(device)
        wanted = attention(
            x, reference.window[1], model.timing(reference.part(), lengths, time, x.dtype)
        )
        before = ours.window.clone()
        found = attention.fused(
            x.flatten(0, 1), ours.window[1], moment_of(model, ours, lengths, time)
        )
        real = torch.arange(time, device=device) < lengths[:, None]
        assert torch.isfinite(found).all()
        close(found.view_as(wanted)[real], wanted[real])
        close(ours.window[1, :, 1:], reference.window[1, :, 1:])
        written = (ours.window != before).any(-1).any(-1)[1].any(0)  # [1 + slots, columns]
        assert written.sum(1).tolist() == [
            0,
            *lengths.tolist(),
        ]  # nothing else, not even for padding
        assert torch.equal(ours.window[0], before[0])
        for state in (ours, reference):
            state.frames[:-1] += lengths


@BOTH
@pytest.mark.parametrize(("head_dim", "window"), [(64, 72), (24, 10)], ids=["released", "odd"])
def test_attention_of_other_widths(
    head_dim: int, window: int, dtype: torch.dtype, device: torch.device
) -> None:
    config = replace(
        CONFIG,
        hidden_size=2 * head_dim,
        num_heads=2,
        head_dim=head_dim,
        window=window,
        num_layers=1,
    )
    model, time, ages = vocoder(device, config, dtype), 8, [1, 79, 160]
    attention = model.pre_transformer.layers[0].self_attn
    ours, reference = (at_frames(model, ages, time, 1) for _ in range(2))
    lengths = torch.tensor([8, 5, 8], device=device)
    x = noise(len(ages), time, config.hidden_size, seed=2).to(device, dtype)
    wanted = attention(x, reference.window[0], model.timing(reference.part(), lengths, time, dtype))
    found = attention.fused(
        x.flatten(0, 1), ours.window[0], moment_of(model, ours, lengths, time)
    ).view_as(wanted)
    real = torch.arange(time, device=device) < lengths[:, None]
    if dtype == torch.float32:
        close(found[real], wanted[real])
        close(ours.window[:, :, 1:], reference.window[:, :, 1:])
    alike(found[real], wanted[real], 0.03)
    alike(ours.window[:, :, 1:], reference.window[:, :, 1:], 0.01)


def moment_of(
    model: Code2Wav, state: VocoderState, lengths: torch.Tensor, time: int
) -> vocoding.Moment:
    codes = torch.zeros(state.num_slots, 3, time, dtype=torch.int64, device=lengths.device)
    weight, norm = model.code_embedding.weight, model.pre_transformer.first_norm()
    part = state.part()
    turn = kernels.embed(codes, weight, part.frames, model.inv_freq, norm)[2]
    return vocoding.Moment(part.slots, part.frames, lengths, turn, model.config.window)


def twin(model: Code2Wav) -> Code2Wav:
    """The same vocoder in float32."""
    exact = vocoder(model.code_embedding.weight.device, model.config)
    for mine, view in zip(targets(model, "").values(), targets(exact, "").values(), strict=True):
        view.copy_(mine)
    exact.prepare()
    return exact


def test_attention_in_bfloat16_is_closer_to_the_truth_than_the_plain_way(
    device: torch.device,
) -> None:
    """Whose cosines are rounded, and each of four products."""
    time, ages = 4, [3, 700, 40, 2000]
    model = vocoder(device, dtype=torch.bfloat16)
    exact = twin(model)
    lengths = torch.full((len(ages),), time, device=device)
    x = noise(len(ages), time, CONFIG.hidden_size, seed=1).to(device, torch.bfloat16)
    states = [at_frames(m, ages, time, 1) for m in (model, model, exact)]
    states[2].window.copy_(states[0].window)
    plain, truth = (
        m.pre_transformer.layers[0].self_attn(
            x.to(t), s.window[0], m.timing(s.part(), lengths, time, t)
        )
        for m, s, t in ((model, states[1], torch.bfloat16), (exact, states[2], torch.float32))
    )
    moment = moment_of(model, states[0], lengths, time)
    ours = model.pre_transformer.layers[0].self_attn.fused(
        x.flatten(0, 1), states[0].window[0], moment
    )
    ours_off, plain_off = (
        float((y.float().view_as(truth) - truth).norm() / truth.norm()) for y in (ours, plain)
    )
    assert ours_off < 0.02
    assert ours_off < plain_off
    kept, plainly, real = (s.window[0].float() for s in states)
    assert (kept - real).norm() < (plainly - real).norm()


def test_attention_never_looks_at_what_another_stream_left(device: torch.device) -> None:
    model = vocoder(device)
    state = at_frames(model, [0, 6, 40], 3, 1)
    columns = state.window.shape[3]
    out = []
    for left in (0.0, float("nan")):
        state.window[:, :, 1] = left  # of a stream that begins
        state.window[:, :, 2, 6:] = left  # beyond its frames
        gone = (
            torch.arange(40 - columns, 40 - (CONFIG.window - 1)) % columns
        )  # too old for the first new frame
        state.window[:, :, 3, gone] = left
        codes = codes_of(3, 3, 2, seed=3).to(device)
        weight, norm = model.code_embedding.weight, model.pre_transformer.first_norm()
        part = state.part()
        x, normed, turn = kernels.embed(codes, weight, part.frames, model.inv_freq, norm)
        lengths = torch.tensor([1, 2, 2], device=device)
        window = state.window.clone()
        moment = vocoding.Moment(part.slots, part.frames, lengths, turn, CONFIG.window)
        out.append(model.pre_transformer.fused(x, normed, window, moment))
    assert torch.isfinite(out[0]).all()
    assert torch.equal(out[0], out[1])


def pieces(seed: int) -> Iterator[tuple[int, list[int]]]:
    """Random ones of two streams, in steps of random sizes."""
    rng = random.Random(seed)
    while True:
        frames = rng.choice((1, 2, 3, 5, 5))
        yield frames, [rng.choice((0, 1, frames, frames, frames)) for _ in range(2)]


def test_streams_in_pieces_equal_one_decode_without_kernels(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = vocoder(device)
    streams = [codes_of(n, 3, seed=n).to(device) for n in (3, 19)]  # the state has 16 columns
    whole = [model.decode(s) for s in streams]
    state, slow = model.state(2, 5), model.state(2, 5)
    play(model, slow, streams, pieces(7))
    switch(monkeypatch)
    found = play(model, state, streams, pieces(7))
    for mine, wanted in zip(found, whole, strict=True):
        assert 0.01 < float(wanted.abs().max()) < 1.0
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-5)
    assert torch.equal(state.frames, slow.frames)
    torch.testing.assert_close(state.window[:, :, 1:], slow.window[:, :, 1:], rtol=0, atol=1e-4)
    torch.testing.assert_close(state.tails, slow.tails, rtol=0, atol=1e-4)


def test_a_whole_step_in_bfloat16_is_as_close_as_the_plain_way(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = vocoder(device, dtype=torch.bfloat16)
    exact = twin(model)
    streams = [codes_of(9, 3, seed=n).to(device) for n in range(2)]
    truth = torch.cat([exact.decode(s) for s in streams])
    errors = []
    for way in ("plain", "kernels"):
        if way == "kernels":
            switch(monkeypatch)
        found = torch.cat(play(model, model.state(2, 5), streams, pieces(3)))
        errors.append(float((found - truth).norm() / truth.norm()))
    assert errors[1] < 1.2 * errors[0] < 0.2


def test_one_frame_of_one_stream(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where products are ours, too: the library is not asked."""
    config = replace(CONFIG, hidden_size=64, num_heads=2, head_dim=32, ffn_size=128)
    model = vocoder(device, config)
    ours, reference = (at_frames(model, [30], 1, 3) for _ in range(2))
    for i in range(2):
        codes, lengths = (
            codes_of(1, 3, 1, seed=i).to(device),
            torch.ones(1, dtype=torch.int64, device=device),
        )
        wanted = model._transform(reference.part(), codes, lengths, NOTHING)
        with monkeypatch.context() as m:
            m.setattr(kernels.F, "linear", None)
            m.setattr(vocoding, "usable", lambda x: True)
            close(model._transform(ours.part(), codes, lengths, NOTHING), wanted)
        close(ours.window[:, :, 1:], reference.window[:, :, 1:])
        for state in (ours, reference):
            state.frames[:-1] += lengths


def test_an_idle_slot_keeps_every_bit(device: torch.device, by_kernels: None) -> None:
    model = vocoder(device)
    state = at_frames(model, [9, 9, 0], 3, 2)
    state.tails.copy_(noise(*state.tails.shape, seed=1))
    window, tails = state.window.clone(), state.tails.clone()
    model.step(state, codes_of(3, 3, 3, seed=1).to(device), torch.tensor([2, 0, 0], device=device))
    for slot in (1, 2):
        assert torch.equal(state.window[:, :, 1 + slot], window[:, :, 1 + slot])
        assert torch.equal(state.tails[slot], tails[slot])
    assert state.frames.tolist() == [11, 9, 0, 0]
    assert (
        (state.window[:, :, 1] != window[:, :, 1]).any(-1).any(-1).sum(-1).eq(2).all()
    )  # two columns, everywhere


def test_neighbours_and_slots_do_not_matter(device: torch.device, by_kernels: None) -> None:
    """Who is beside a stream in a step, padding too, and which slot it has make no difference to
    any bit of it."""
    model = vocoder(device)
    codes, found = codes_of(3, 3, 3, seed=4).to(device), []
    for slots, lengths, others in (
        ([0, 1, 2], [3, 2, 0], 5),
        ([3, -1, -1], [3, 0, 0], 6),
        ([2, 0, -1], [3, 3, 0], 7),
    ):
        state, mine = model.state(4, 3), slots[0]
        state.frames[mine], state.frames[0 if mine else 1] = 12, 40
        state.window[:, :, 1 + mine] = noise(*state.window[:, :, 0].shape, seed=1)
        state.tails[mine] = noise(*state.tails[0].shape, seed=2)
        given = codes.clone()
        given[1:] = codes_of(2, 3, 3, seed=others).to(device)
        before = state.frames.tolist()
        wav = model.step(
            state, given, torch.tensor(lengths, device=device), torch.tensor(slots, device=device)
        )
        for slot, n in zip(slots, lengths, strict=True):
            before[slot] += n
        assert state.frames.tolist() == before
        assert not state.tails[-1].any(), "padding remembers nothing"
        found.append((wav[0], state.window[:, :, 1 + mine].clone(), state.tails[mine].clone()))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_what_no_tile_holds_goes_the_plain_way(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kernels.fits(64, 256)
    assert not kernels.fits(65, 256)
    model = vocoder(device, replace(CONFIG, window=kernels.MOST_COLUMNS))
    codes = codes_of(2, 3, 2, seed=1).to(device)
    lengths = torch.tensor([2, 1], device=device)
    wanted = model.step(model.state(2, 2), codes, lengths)
    monkeypatch.setattr(vocoding, "usable", lambda x: True)
    monkeypatch.setattr(Code2Wav, "timing", spied := Spy(model.timing))
    torch.testing.assert_close(
        model.step(model.state(2, 2), codes, lengths), wanted, rtol=0, atol=1e-5
    )
    assert spied.calls == 1


class Spy:
    def __init__(self, inner: object) -> None:
        self.inner, self.calls = inner, 0

    def __call__(self, *args: object) -> object:
        self.calls += 1
        assert callable(self.inner)
        return self.inner(*args)


RELEASED = replace(
    CONFIG,
    codebook_size=2048,
    num_quantizers=16,
    hidden_size=1024,
    num_heads=16,
    head_dim=64,
    ffn_size=3072,
    window=72,
)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("slots", "frames"), [(1, 1), (1, 4), (8, 1), (32, 4), (2, 25)])
def test_real_sizes(
    slots: int,
    frames: int,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Step after step, beyond a window; the transformer alone, as nothing behind it differs."""
    model = vocoder(device, RELEASED, dtype)
    ours, reference = model.state(slots, 25), model.state(slots, 25)
    rng = random.Random(slots)
    for i in range(6 + 120 // frames):
        lengths = torch.tensor(
            [rng.choice((0, frames, frames)) for _ in range(slots)], device=device
        )
        codes = codes_of(slots, 16, frames, seed=i, most=2048).to(device)
        with monkeypatch.context() as m:
            wanted = model._transform(reference.part(), codes, lengths, NOTHING)
            m.setattr(vocoding, "usable", lambda x: True)
            found = model._transform(ours.part(), codes, lengths, NOTHING)
        real = torch.arange(frames, device=device) < lengths[:, None]
        assert torch.isfinite(found).all()
        if dtype == torch.float32:
            torch.testing.assert_close(found[real], wanted[real], rtol=0, atol=1e-4)
        else:
            alike(found[real], wanted[real], 0.05)
            ours.window.copy_(reference.window)  # else each would go its own way
        for state in (ours, reference):
            state.frames[:-1] += lengths


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [1, 3])
def test_a_captured_step_equals_an_eager_one(
    slots: int, device: torch.device, by_kernels: None
) -> None:
    """One slot and one frame is where all kernels of a layer are ours, each launched before the one
    in front ends."""
    model = vocoder(device, RELEASED, torch.bfloat16)
    eager, captured = model.state(slots), model.state(slots)
    codes = torch.zeros(slots, 16, 1, dtype=torch.int64, device=device)
    lengths = torch.zeros(slots, dtype=torch.int64, device=device)
    graphs = capture_graphs(
        [0], lambda _: lambda: model.step(captured, codes, lengths), torch.cuda.Stream()
    )
    captured.reset(torch.ones(slots, dtype=torch.bool, device=device))
    graph, wav = graphs[0]
    rng = random.Random(1)
    for i in range(120):
        codes.copy_(codes_of(slots, 16, 1, seed=i, most=2048))
        lengths.copy_(torch.tensor([rng.choice((0, 1, 1)) for _ in range(slots)]))
        graph.replay()
        wanted = model.step(eager, codes, lengths)
        alike(wav[lengths > 0], wanted[lengths > 0], 0.05)
    if slots == 1:  # no library chose a kernel here
        assert torch.equal(captured.window, eager.window)
    alike(captured.window, eager.window, 0.02)
    assert torch.equal(captured.frames, eager.frames)
