"""Code2wav against one full decode by the reference: however a stream is cut, and whoever is beside
it."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from stretto.errors import Bug
from stretto.layers.capture import capture_graphs
from stretto.layers.targets import targets
from stretto.models.qwen3_omni.code2wav import Code2Wav
from stretto.models.speech.config import VocoderConfig
from stretto.models.speech.vocoder import VocoderStream
from stretto.models.speech.vocoder_state import VocoderState

SMALL = {
    "codebook_size": 64,
    "num_quantizers": 4,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "decoder_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
RELEASED = {
    "codebook_size": 2048,
    "num_quantizers": 16,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "sliding_window": 72,
    "decoder_dim": 1536,
    "upsample_rates": (8, 5, 4, 3),
    "upsampling_ratios": (2, 2),
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


@dataclass(slots=True)
class Pair:
    """The reference and ours with the same weights."""

    reference: Any
    model: Code2Wav
    tolerance: float = 2e-6

    @property
    def device(self) -> torch.device:
        return self.model.code_embedding.weight.device

    def codes(self, frames: int, seed: int) -> torch.Tensor:
        c, g = self.model.config, torch.Generator().manual_seed(seed)
        return torch.randint(0, c.codebook_size, (frames, c.num_quantizers), generator=g).to(
            self.device
        )

    def whole(self, codes: torch.Tensor) -> torch.Tensor:
        """The oracle: one decode of all frames."""
        with torch.no_grad():
            wav: torch.Tensor = self.reference(codes.T[None])[0, 0]
        return wav

    def check(self, wav: torch.Tensor, codes: torch.Tensor) -> None:
        """These are all the samples of these frames."""
        torch.testing.assert_close(wav, self.whole(codes), rtol=0, atol=self.tolerance)


def reference(seed: int = 0, **fields: Any) -> Any:
    """The reference vocoder with weights under which no path is numerically dead and the output is
    not clipped."""
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
        Qwen3OmniMoeCode2WavConfig,
    )
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

    model = Qwen3OmniMoeCode2Wav(Qwen3OmniMoeCode2WavConfig(**fields)).eval()
    if model.device.type == "meta":
        return model
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=g)
            if name.endswith(("norm.weight", "layernorm.weight")):
                p.copy_(1 + 0.2 * noise)
            elif name.endswith(("scale", "gamma")):
                p.copy_(0.5 + 0.1 * noise)
            elif p.dim() == 1:
                p.copy_(0.2 * noise)
            elif "embedding" in name:
                p.copy_(noise)
            elif name.endswith(
                "conv2.conv.weight"
            ):  # at full strength the units amplify rounding errors, too
                p.copy_(0.3 * noise / p[0].numel() ** 0.5)
            else:
                p.copy_(noise / p[0].numel() ** 0.5)
        last = model.decoder[-1].conv
        codes = torch.randint(
            0, fields["codebook_size"], (1, fields["num_quantizers"], 12), generator=g
        )
        quiet = 0.06 / model(codes).std()
        last.weight.mul_(quiet)
        last.bias.mul_(quiet)
    return model


def config_of(model: Any) -> VocoderConfig:
    c = model.config
    return VocoderConfig(
        codebook_size=c.codebook_size,
        num_quantizers=c.num_quantizers,
        hidden_size=c.hidden_size,
        num_layers=c.num_hidden_layers,
        num_heads=c.num_attention_heads,
        head_dim=c.hidden_size // c.num_attention_heads,
        ffn_size=c.intermediate_size,
        window=c.sliding_window,
        rms_eps=c.rms_norm_eps,
        rope_theta=c.rope_parameters["rope_theta"],
        upsampling_ratios=tuple(c.upsampling_ratios),
        upsample_rates=tuple(c.upsample_rates),
        decoder_dim=c.decoder_dim,
    )


def ours(model: Any) -> Code2Wav:
    made = Code2Wav(config_of(model)).to(model.device, model.dtype)
    weights = {f"code2wav.{name}": w for name, w in model.state_dict().items()}
    views = targets(made, "code2wav.")
    assert views.keys() == weights.keys()
    for name, view in views.items():
        assert view.shape == weights[name].shape, name
        view.copy_(weights[name])
    made.prepare()
    return made


@pytest.fixture(scope="module", autouse=True)
def full_precision() -> Iterator[None]:
    """On a GPU float32 convolutions are rounded to TF32 unless told otherwise."""
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.fixture(scope="module")
def pair(oracle: Any) -> Pair:
    """The tiny checkpoint's vocoder. Its weights amplify rounding errors: the reference in float32
    is itself up to 4e-6 from the reference in float64, and so are we."""
    return Pair(oracle.code2wav, ours(oracle.code2wav), 1e-5)


@pytest.fixture(scope="module")
def calm(device: torch.device) -> Pair:
    """The released topology (1920 samples a frame, window 72), narrow, with weights that do not
    amplify. (A GPU adds up in other orders: 3e-6 was seen there.)"""
    made = reference(**{**RELEASED, **SMALL, "num_hidden_layers": 3}).to(device)
    return Pair(made, ours(made), 2e-6 if device.type == "cpu" else 5e-6)


@pytest.fixture(scope="module")
def small(device: torch.device) -> Pair:
    """48 samples a frame and a window of 5, so that long histories cost nothing."""
    made = reference(**SMALL, sliding_window=5, upsample_rates=(4, 3), upsampling_ratios=(2, 2)).to(
        device
    )
    return Pair(made, ours(made))


def cuts(total: int, rng: random.Random, sizes: tuple[int, ...]) -> Iterator[int]:
    while total > 0:
        n = min(total, rng.choice(sizes))
        yield n
        total -= n


def pushed(
    stream: VocoderStream, codes: torch.Tensor, sizes: Iterator[int] | list[int]
) -> torch.Tensor:
    """Feed a stream piece by piece and check that each piece settles as many samples as it
    should."""
    parts: list[torch.Tensor] = []
    taken = made = 0
    for n in sizes:
        parts.append(stream.push(codes[taken : taken + n]))
        taken, made = taken + n, made + len(parts[-1])
        assert made == stream.model.num_samples(taken)
    assert taken == len(codes)
    return torch.cat(parts)


@pytest.mark.parametrize("which", ["pair", "calm"])
def test_whole_decode_beyond_the_window(which: str, request: pytest.FixtureRequest) -> None:
    pair: Pair = request.getfixturevalue(which)
    codes = pair.codes(330, 1)
    wav = pair.model.decode(codes)
    assert wav.dtype == torch.float32
    assert wav.shape == (330 * 1920 - 555,)
    expected = pair.whole(codes)
    assert 0.02 < expected.std() < 0.3, "the oracle's output should be neither dead nor clipped"
    torch.testing.assert_close(wav, expected, rtol=0, atol=pair.tolerance)


@pytest.mark.parametrize("seed", range(3))
def test_random_pushes_equal_the_whole(pair: Pair, seed: int) -> None:
    rng = random.Random(seed)
    codes = pair.codes(rng.randint(80, 120), seed)
    sizes = cuts(len(codes), rng, (0, 1, 1, 2, 3, 4, 8, 25, 26, 60))
    wav = pushed(VocoderStream(pair.model), codes, sizes)
    pair.check(wav, codes)


def test_pushes_of_one_frame(calm: Pair) -> None:
    codes = calm.codes(90, 5)
    calm.check(pushed(VocoderStream(calm.model), codes, [1] * 90), codes)


def test_thousands_of_frames(small: Pair) -> None:
    codes = small.codes(3000, 6)
    wav = pushed(
        VocoderStream(small.model), codes, cuts(3000, random.Random(6), (1, 10, 25, 100, 300))
    )
    small.check(wav, codes)


@pytest.mark.parametrize(
    "fields",
    [
        {"sliding_window": 1, "upsample_rates": (2,), "upsampling_ratios": (3,)},
        {"sliding_window": 2, "upsample_rates": (2, 3), "upsampling_ratios": (2,)},
        {
            "sliding_window": 9,
            "upsample_rates": (2, 2, 2),
            "upsampling_ratios": (1,),
        },  # drops more than one frame
    ],
    ids=str,
)
@pytest.mark.parametrize("max_frames", [1, 3, 64])
def test_other_topologies(fields: dict[str, Any], max_frames: int, device: torch.device) -> None:
    made = reference(**SMALL, **fields).to(device)
    pair = Pair(made, ours(made))
    codes = pair.codes(60, 3)
    stream = VocoderStream(pair.model, pair.model.state(2, max_frames), slot=1)
    pair.check(pushed(stream, codes, cuts(60, random.Random(1), (1, 2, 5, 20))), codes)


@dataclass(slots=True)
class Job:
    codes: torch.Tensor
    taken: int = 0
    parts: list[torch.Tensor] = field(default_factory=list)


def garbage(model: Code2Wav, state: VocoderState, frames: int, rng: random.Random) -> torch.Tensor:
    """Codes to pad with: padding is whatever was in the buffer before."""
    shape = (state.num_slots, model.config.num_quantizers, frames)
    g = torch.Generator().manual_seed(rng.randrange(2**31))
    return torch.randint(-(10**6), 10**6, shape, generator=g).to(state.frames.device)


def advance(
    model: Code2Wav,
    state: VocoderState,
    jobs: list[Job | None],
    frames: int,
    rng: random.Random,
    stall: float = 0.3,
) -> None:
    """One step with a random share of frames per slot."""
    codes = garbage(model, state, frames, rng)
    lengths = [0] * state.num_slots
    for slot, job in enumerate(jobs):
        if job is not None and rng.random() >= stall:
            lengths[slot] = n = min(rng.randint(0, frames), len(job.codes) - job.taken)
            codes[slot, :, :n] = job.codes[job.taken : job.taken + n].T
    wav = model.step(state, codes, torch.tensor(lengths, device=codes.device))
    for slot, job in enumerate(jobs):
        if job is not None:
            span = model.valid(job.taken, lengths[slot])
            job.parts.append(wav[slot, span.start : span.stop])
            job.taken += lengths[slot]


@pytest.mark.parametrize(
    ("which", "slots", "streams", "longest"), [("pair", 3, 6, 40), ("small", 5, 25, 120)]
)
def test_slots_start_stop_stall_and_restart(
    which: str, slots: int, streams: int, longest: int, request: pytest.FixtureRequest
) -> None:
    pair: Pair = request.getfixturevalue(which)
    rng = random.Random(11)
    state = pair.model.state(slots, 12)
    waiting = [Job(pair.codes(rng.randint(1, longest), 100 + i)) for i in range(streams)]
    jobs: list[Job | None] = [None] * slots
    done: list[Job] = []
    while waiting or any(jobs):
        starting = [
            s for s, job in enumerate(jobs) if job is None and waiting and rng.random() < 0.5
        ]
        for slot in starting:
            jobs[slot] = waiting.pop() if waiting else None
        if rng.random() < 0.5:
            state.reset(
                torch.tensor([slot in starting for slot in range(slots)], device=pair.device)
            )
        else:
            for slot in starting:
                state.reset(slot)
        advance(pair.model, state, jobs, rng.randint(1, 12), rng, stall=0.3)
        for slot, job in enumerate(jobs):
            if job is not None and job.taken == len(job.codes):
                done.append(job)
                jobs[slot] = None
    assert len(done) == streams
    for job in done:
        pair.check(torch.cat(job.parts), job.codes)


def slot_bits(state: VocoderState, slot: int) -> list[torch.Tensor]:
    return [
        state.frames[slot].clone(),
        state.window[:, :, 1 + slot].clone(),
        state.tails[slot].clone(),
    ]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_an_idle_slot_keeps_every_bit(small: Pair) -> None:
    rng = random.Random(3)
    state = small.model.state(3, 8)
    jobs: list[Job | None] = [Job(small.codes(500, i)) for i in range(3)]
    for _ in range(10):
        advance(small.model, state, jobs, 8, rng, stall=0.0)
    before, moving = slot_bits(state, 1), slot_bits(state, 0)
    jobs[1] = None
    for frames in (1, 3, 8, 8, 8):
        advance(small.model, state, jobs, frames, rng, stall=0.0)
    assert same(before, slot_bits(state, 1))
    assert not same(moving, slot_bits(state, 0))


def test_padding_leaves_no_trace(small: Pair) -> None:
    """Same valid frames, other padding: the same samples and the same state, bit for bit."""
    runs = []
    for seed in (1, 2):
        rng, pad = random.Random(0), random.Random(seed)
        state, samples = small.model.state(2, 8), []
        for _ in range(12):
            codes = garbage(small.model, state, 8, pad)
            lengths = [rng.randint(0, 8), rng.randint(0, 8)]
            for slot, n in enumerate(lengths):
                codes[slot, :, :n] = small.codes(n, rng.randrange(10**6)).T
            wav = small.model.step(
                state, codes, torch.tensor(lengths, dtype=torch.int32, device=codes.device)
            )
            samples += [wav[slot, : n * 48] for slot, n in enumerate(lengths)]
        runs.append((samples, slot_bits(state, 0) + slot_bits(state, 1)))
    assert same(runs[0][0], runs[1][0])
    assert same(runs[0][1], runs[1][1])


def test_neighbours_do_not_matter(pair: Pair) -> None:
    """Slot 1 plays the same stream beside idle, busy and restarting neighbours: the very same bits
    come out."""
    mine = pair.codes(24, 8)
    outs = []
    for mood in ("idle", "busy", "restarting"):
        rng = random.Random(mood)
        state = pair.model.state(3, 4)
        parts, taken = [], 0
        for n in (4, 0, 3, 1, 4, 4, 0, 4, 4):
            codes = garbage(pair.model, state, 4, rng)
            lengths = [0, n, 0] if mood == "idle" else [rng.randint(1, 4), n, 4]
            if mood == "restarting":
                again = [rng.random() < 0.5, False, rng.random() < 0.5]
                state.reset(torch.tensor(again, device=pair.device))
            codes[1, :, :n] = mine[taken : taken + n].T
            wav = pair.model.step(state, codes, torch.tensor(lengths, device=pair.device))
            span = pair.model.valid(taken, n)
            parts.append(wav[1, span.start : span.stop])
            taken += n
        outs.append(torch.cat(parts))
        assert taken == len(mine)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    pair.check(outs[0], mine)


def test_a_used_slot_is_as_good_as_new(pair: Pair) -> None:
    codes = pair.codes(10, 9)
    fresh = pair.model.decode(codes)
    state = pair.model.state(1)
    VocoderStream(pair.model, state).push(pair.codes(90, 10))
    assert torch.equal(pushed(VocoderStream(pair.model, state), codes, [10]), fresh)


def test_streams_may_share_a_state(small: Pair) -> None:
    state = small.model.state(2)
    streams = [VocoderStream(small.model, state, slot) for slot in range(2)]
    codes = [small.codes(30, 20 + i) for i in range(2)]
    parts: list[list[torch.Tensor]] = [[], []]
    for start in range(0, 30, 5):
        for slot in (0, 1):
            parts[slot].append(streams[slot].push(codes[slot][start : start + 5]))
    for slot in (0, 1):
        small.check(torch.cat(parts[slot]), codes[slot])


def test_valid_samples_tile_the_stream(pair: Pair) -> None:
    model = pair.model
    assert model.num_samples(0) == 0
    assert model.num_samples(1) == 1365
    assert (model.valid(0, 1).start, model.valid(0, 1).stop) == (555, 1920)
    assert (model.valid(7, 2).start, model.valid(7, 2).stop) == (0, 3840)
    for before in range(3):
        assert len(model.valid(before, 0)) == 0
        for n in range(4):
            assert len(model.valid(before, n)) == model.num_samples(before + n) - model.num_samples(
                before
            )


def test_nothing_in_nothing_out(pair: Pair) -> None:
    assert pair.model.decode(pair.codes(0, 0)).shape == (0,)


def test_codes_out_of_range_are_clamped(small: Pair) -> None:
    codes = small.codes(6, 1)
    wrong = codes.clone()
    wrong[2, 1], wrong[4, 0] = 10**9, -7
    nearest = codes.clone()
    nearest[2, 1], nearest[4, 0] = small.model.config.codebook_size - 1, 0
    assert torch.equal(small.model.decode(wrong), small.model.decode(nearest))


def test_misuse_is_refused(small: Pair) -> None:
    with pytest.raises(Bug, match="prepare"):
        Code2Wav(small.model.config).state(1)
    with pytest.raises(ValueError, match="slots=0"):
        small.model.state(0)
    state = small.model.state(2, 4)
    with pytest.raises(AssertionError, match="at most 4"):
        small.model.step(
            state, torch.zeros(2, 4, 5, dtype=torch.long), torch.zeros(2, dtype=torch.long)
        )
    with pytest.raises(AssertionError, match="codes"):
        small.model.step(
            state, torch.zeros(1, 4, 1, dtype=torch.long), torch.zeros(1, dtype=torch.long)
        )


def test_state_outlives_inference_mode(small: Pair) -> None:
    codes = small.codes(9, 2)
    with torch.inference_mode():
        stream = VocoderStream(small.model)
        first = stream.push(codes[:4]).clone()
    wav = torch.cat([first, stream.push(codes[4:])])
    small.check(wav, codes)


def test_released_size_on_meta() -> None:
    """Names and shapes of the released checkpoint; and since a meta tensor has no values, a step
    that runs on it cannot read one: no wait for the device, no shape that depends on data."""
    with torch.device("meta"):
        made = reference(**RELEASED)
        model = Code2Wav(config_of(made))
    views = targets(model, "code2wav.")
    expected = {f"code2wav.{name}": w.shape for name, w in made.state_dict().items()}
    assert {name: view.shape for name, view in views.items()} == expected
    assert sum(v.numel() for v in views.values()) == sum(p.numel() for p in model.parameters())
    assert views["code2wav.decoder.1.block.1.conv.weight"].shape == (1536, 768, 16)
    assert views["code2wav.pre_transformer.layers.7.self_attn.k_proj.weight"].shape == (1024, 1024)
    model.prepare()
    state = model.state(4)
    assert state.tails.shape == (5, 134_208)
    assert state.window.shape == (8, 2, 5, 96, 16, 64)
    state.reset(torch.ones(4, dtype=torch.bool, device="meta"))
    state.reset(2)
    codes = torch.zeros(4, 16, 3, dtype=torch.long, device="meta")
    wav = model.step(state, codes, torch.zeros(4, dtype=torch.long, device="meta"))
    assert wav.shape == (4, 3 * 1920)
    assert wav.dtype == torch.float32


def test_bfloat16_is_as_close_as_the_reference(pair: Pair) -> None:
    """Both are rounded at every layer; ours must not add noise of its own."""
    codes = pair.codes(60, 4)
    exact = pair.whole(codes)
    half = copy.deepcopy(pair.reference).to(torch.bfloat16)
    theirs = Pair(half, pair.model).whole(codes).float()
    mine = pushed(VocoderStream(ours(half)), codes, cuts(60, random.Random(0), (1, 2, 7)))
    assert mine.dtype == torch.float32
    assert (mine - exact).square().mean() < 1.5 * (theirs - exact).square().mean()


@pytest.mark.gpu
def test_a_captured_step_equals_an_eager_one() -> None:
    """Nothing waits for the device, and one graph serves all lengths, stalls and restarts of its
    shape."""
    made = reference(**{**RELEASED, **SMALL}).to("cuda")
    model = ours(made)
    pair, slots, frames = Pair(made, model), 3, 4
    eager, captured = model.state(slots), model.state(slots)
    codes = torch.zeros(slots, 4, frames, dtype=torch.long, device="cuda")
    lengths = torch.zeros(slots, dtype=torch.long, device="cuda")
    graphs = capture_graphs(
        [0], lambda _: lambda: model.step(captured, codes, lengths), torch.cuda.Stream()
    )
    graph, wav = graphs[0]

    rng = random.Random(0)
    for i in range(40):
        codes.copy_(pair.codes(slots * frames, i).view(codes.shape))
        lengths.copy_(torch.tensor([rng.randint(0, frames) for _ in range(slots)]))
        again = torch.tensor([rng.random() < 0.05 for _ in range(slots)], device="cuda")
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for state in (eager, captured):
                state.reset(again)
            expected = model.step(eager, codes, lengths)
            graph.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for slot, n in enumerate(lengths.tolist()):
            torch.testing.assert_close(
                wav[slot, : n * 1920], expected[slot, : n * 1920], rtol=0, atol=1e-5
            )
    assert torch.equal(eager.frames, captured.frames)


@pytest.mark.parametrize("slots", [[1, 3], [3, 1], [2, -1], [-1, 0, -1, 3], [3, 2, 1, 0]], ids=str)
def test_a_step_may_have_any_of_the_streams(
    slots: list[int], device: torch.device, small: Pair
) -> None:
    """It moves those and no others, wherever they are, and mixes freely with steps of all; padding
    leaves no trace."""
    ours = small.model
    g = torch.Generator().manual_seed(5)
    codes = torch.randint(
        0, ours.config.codebook_size, (4, ours.config.num_quantizers, 6), generator=g
    ).to(device)
    one, two = ours.state(4), ours.state(4)
    for lengths in ([2, 1, 2, 1], [1, 2, 1, 2]):
        ours.step(one, codes[:, :, :2], torch.tensor(lengths, device=device))
        ours.step(two, codes[:, :, :2], torch.tensor(lengths, device=device))
    there = [s for s in slots if s >= 0]
    lengths = [3 - s % 2 if s in there else 0 for s in range(4)]
    a = ours.step(one, codes[:, :, 2:5], torch.tensor(lengths, device=device))
    some = torch.tensor([lengths[s] if s >= 0 else 0 for s in slots], device=device)
    b = ours.step(two, codes[slots, :, 2:5], some, torch.tensor(slots, device=device))
    for i, slot in enumerate(slots):
        if slot >= 0:
            torch.testing.assert_close(
                a[slot, : lengths[slot] * 48], b[i, : lengths[slot] * 48], atol=1e-5, rtol=0
            )
    assert one.frames.tolist() == two.frames.tolist()
    torch.testing.assert_close(one.tails, two.tails, atol=1e-5, rtol=0)
    torch.testing.assert_close(one.window[:, :, 1:], two.window[:, :, 1:], atol=1e-5, rtol=0)
