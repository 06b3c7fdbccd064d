"""The codec: an encoder (not shipped), a residual vector quantizer of 16 x 512, and the released
code2wav as decoder.

The decoder is the module of `transformers`; it sees the mean of 16 embeddings, each 16 times the
projected vector of its code, which is the projected sum of the quantizer's vectors. So the trained
quantizer becomes the embedding table of the checkpoint and nothing is approximated. Long crops are
encoded (the codebooks need many vectors), short ones of them decoded. Called by `__main__.py`."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as released
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeCode2WavConfig,
)

from recipes.nano import codes, corpus, weights
from recipes.nano.audio import HOP, RATE, frames
from recipes.nano.graph import Schedule, Trainer, device_of, finite
from recipes.nano.report import gate, note, say
from recipes.nano.shape import CODES, GROUPS, config_json
from recipes.nano.spectra import SpectralLoss, Spectrum

DECODER, ENCODER = "code2wav.safetensors", "encoder.safetensors"
LATENT = 64
MISSING = 555  # samples that the decoder does not give at the end
CONTEXT = 3  # frames at the start of a decoded crop that only warm the decoder up
DEAD, REVIVED = (
    0.05,
    0.3,
)  # use of a code (mean 1) below which it is replaced, and what it starts with


def snake(x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """The released activation in fewer kernels."""
    return (
        x
        + torch.exp(-beta)[None, :, None] * torch.sin(x * torch.exp(alpha)[None, :, None]).square()
    )


class FrameNorm(nn.Module):
    """Over channels, frame by frame: independent of the crop's length."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return y


class Residual(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = (
            FrameNorm(size),
            nn.Conv1d(size, size, 5, padding=2),
            nn.Conv1d(size, size, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.narrow(F.gelu(self.wide(self.norm(x))))
        return y


class Encoder(nn.Module):
    """100 mels and 64 low bins (pitch) at 100 Hz -> a latent of unit variance at 12.5 Hz."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.spectrum = Spectrum(1024, 240, 100)
        parts: list[nn.Module] = [nn.Conv1d(164, size, 7, padding=3)]
        for depth in (2, 3, 3):
            parts += [Residual(size) for _ in range(depth)] + [nn.Conv1d(size, size, 4, 2, 1)]
        self.net = nn.Sequential(
            *parts, *(Residual(size) for _ in range(3)), FrameNorm(size), nn.Conv1d(size, LATENT, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        a = self.spectrum(x)[..., : x.shape[-1] // 240]
        low = torch.log(a[:, :64].clamp_min(1e-3))
        features = torch.cat(((self.spectrum.mel(a, 1e-5) + 5) / 3, (low + 1) / 3), dim=1)
        return F.layer_norm(self.net(features).transpose(1, 2), (LATENT,))


class Quantizer(nn.Module):
    """16 codebooks, kept as running means of the vectors they stand for."""

    vectors: Tensor
    use: Tensor
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("vectors", torch.zeros(GROUPS, CODES, LATENT))
        self.register_buffer("use", torch.ones(GROUPS, CODES))
        self.register_buffer("total", torch.zeros(GROUPS, CODES, LATENT))

    def nearest(self, rest: Tensor, level: int) -> Tensor:
        book = self.vectors[level]
        return torch.addmm(0.5 * book.square().sum(-1)[None], rest, book.t(), alpha=-1).argmin(-1)

    @torch.no_grad()
    def encode(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[N, d] -> codes [16, N], what each level had to code [16, N, d], its vectors [16, N,
        d]."""
        rest, codes_, rests, vectors = z, [], [], []
        for level in range(GROUPS):
            code = self.nearest(rest, level)
            vector = self.vectors[level].index_select(0, code)
            codes_.append(code)
            rests.append(rest)
            vectors.append(vector)
            rest = rest - vector
        return torch.stack(codes_), torch.stack(rests), torch.stack(vectors)

    @torch.no_grad()
    def learn(self, codes_: Tensor, rests: Tensor, keep: float) -> None:
        """Move the means; codes that nothing uses start anew at a random vector."""
        n, scale = codes_.shape[1], CODES / codes_.shape[1]
        flat = (codes_ + torch.arange(GROUPS, device=codes_.device)[:, None] * CODES).view(-1)
        ones = torch.ones(GROUPS * n, device=flat.device)
        count = (
            torch.zeros(GROUPS * CODES, device=flat.device)
            .index_add_(0, flat, ones)
            .view(GROUPS, CODES)
            * scale
        )
        summed = torch.zeros(GROUPS * CODES, LATENT, device=flat.device).index_add_(
            0, flat, rests.reshape(-1, LATENT)
        )
        use = self.use * keep + (1 - keep) * count
        total = self.total * keep + (1 - keep) * summed.view(GROUPS, CODES, LATENT) * scale
        chance = torch.randint(0, n, (GROUPS, CODES, 1), device=flat.device).expand(-1, -1, LATENT)
        dead = use < DEAD
        use = torch.where(dead, torch.full_like(use, REVIVED), use)
        total = torch.where(dead[..., None], rests.gather(1, chance) * REVIVED, total)
        self.use.copy_(use)
        self.total.copy_(total)
        self.vectors.copy_(total / use[..., None])

    @torch.no_grad()
    def cluster(self, z: Tensor, rounds: int = 8) -> None:
        """Start anew by k-means, level by level."""
        rest = z
        for level in range(GROUPS):
            book = rest[torch.randperm(len(rest), device=rest.device)[:CODES]]
            for _ in range(rounds):
                self.vectors[level] = book
                code = self.nearest(rest, level)
                count = torch.zeros(CODES, device=rest.device).index_add_(
                    0, code, torch.ones_like(rest[:, 0])
                )
                mean = (
                    torch.zeros_like(book).index_add_(0, code, rest) / count.clamp_min(1)[:, None]
                )
                chance = rest[torch.randint(0, len(rest), (CODES,), device=rest.device)]
                book = torch.where(count[:, None] > 0, mean, chance)
            self.vectors[level] = book
            self.use[level], self.total[level] = 1.0, book
            rest = rest - book[self.nearest(rest, level)]


class Codec(nn.Module):
    def __init__(self, tiny: bool = False) -> None:
        super().__init__()
        raw = dict(config_json({"system": 0, "user": 1, "assistant": 2})["code2wav_config"])
        if tiny:
            raw |= {"num_hidden_layers": 1, "decoder_dim": 64}
        config = Qwen3OmniMoeCode2WavConfig(**raw)
        config.layer_scale_initial_scale = 0.1
        config._attn_implementation = "sdpa"
        self.encoder = Encoder(64 if tiny else 256)
        self.quantizer = Quantizer()
        self.project = nn.Linear(LATENT, config.hidden_size, bias=False)
        self.decoder = released.Qwen3OmniMoeCode2Wav(config)
        self.window: int = config.sliding_window
        for stage in self.decoder.upsample:
            nn.init.constant_(stage[1].gamma, 0.1)

    def context(self, h: Tensor) -> Tensor:
        """The decoder's transformer, for sequences no longer than its window."""
        assert h.shape[1] <= self.window
        plain: dict[str, None] = {"full_attention": None, "sliding_attention": None}  # causal
        positions = torch.arange(h.shape[1], device=h.device)[None]
        y: Tensor = self.decoder.pre_transformer(
            inputs_embeds=h, attention_mask=plain, position_ids=positions, use_cache=False
        ).last_hidden_state
        return y

    def wave(self, h: Tensor) -> Tensor:
        """[B, T, H] -> [B, T * 1920 - 555]."""
        h = h.permute(0, 2, 1)
        for stage in self.decoder.upsample:
            for block in stage:
                h = block(h)
        for block in self.decoder.decoder:
            h = block(h)
        return h[:, 0]

    @torch.no_grad()
    def bake(self) -> None:
        """Write the quantizer into the decoder's embedding table."""
        rows = self.quantizer.vectors.reshape(-1, LATENT)
        self.decoder.code_embedding.weight.copy_(self.project(rows) * GROUPS)

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        """[B, T * 1920] -> codes [B, T, 16]."""
        z = self.encoder(x)
        found = self.quantizer.encode(z.reshape(-1, LATENT))[0]
        return found.t().reshape(*z.shape[:2], GROUPS)


@dataclass(slots=True, eq=False)
class Sound:
    """The corpus on the device, growing while the teacher still speaks."""

    folder: Path
    device: torch.device
    limit: int  # samples
    samples: Tensor = field(init=False)
    starts: Tensor = field(init=False)
    ends: Tensor = field(
        init=False
    )  # [2]: samples and sentences so far, as floats that a graph can read
    used: int = 0
    count: int = 0
    have: set[int] = field(default_factory=lambda: {0})  # chunk 0 is for the score
    looked: float = 0.0

    def __post_init__(self) -> None:
        self.samples = torch.zeros(self.limit, dtype=torch.int16, device=self.device)
        self.starts = torch.zeros(200_000, dtype=torch.long, device=self.device)
        self.ends = torch.zeros(2, dtype=torch.float64, device=self.device)

    def look(self) -> None:
        """Take in chunks that are new, now and then."""
        if time.monotonic() - self.looked < 3:
            return
        for chunk in corpus.made(self.folder):
            if chunk in self.have:
                continue
            self.have.add(chunk)
            spoken = corpus.load(self.folder, chunk)
            gap = np.zeros(2 * HOP, np.int16)
            flat = np.concatenate([part for s in spoken for part in (s, gap)])
            if self.used + len(flat) > self.limit:
                break
            offsets = self.used + np.cumsum([0, *(len(s) + len(gap) for s in spoken[:-1])])
            self.samples[self.used : self.used + len(flat)] = torch.from_numpy(flat).to(self.device)
            self.starts[self.count : self.count + len(spoken)] = torch.from_numpy(offsets).to(
                self.device
            )
            self.used, self.count = self.used + len(flat), self.count + len(spoken)
        self.ends.copy_(torch.tensor([self.used, self.count], dtype=torch.float64))
        self.looked = time.monotonic()

    def crops(self, count: int, at_start: int, length: int) -> Tensor:
        """Random crops [count, length]; the first `at_start` begin where a sentence begins."""
        chance = torch.rand(count, device=self.device, dtype=torch.float64)
        places = (chance * (self.ends[0] - length)).long()
        sentence = self.starts[(chance * self.ends[1]).long()].clamp_max(
            (self.ends[0] - length).long()
        )
        first = torch.arange(count, device=self.device) < at_start
        where = torch.where(first, sentence, places)[:, None] + torch.arange(
            length, device=self.device
        )
        return self.samples[where].float() / 32768


@dataclass(frozen=True, slots=True)
class Settings:
    seconds: float
    audio: Path
    first_hours: float = 1.0  # of speech that must be there to begin
    max_hours: float = 12.0  # of speech to train on
    encode_hours: float = 26.0  # of speech to encode for the talker
    batch: int = 8
    long: int = 64  # frames encoded
    short: int = 19  # of them decoded
    reserve: float = 35.0  # seconds kept for encoding and saving
    compile: bool = True
    tiny: bool = False
    device: str | None = None
    steps: int | None = None
    eager: bool = False


def train(work: Path, s: Settings) -> None:
    started = time.monotonic()
    device = device_of(s.device)
    torch.manual_seed(0)
    activation = (
        torch.compile(snake, dynamic=True) if s.compile and device.type == "cuda" else snake
    )

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return (activation if self.training else snake)(x, self.alpha, self.beta)

    released.Qwen3OmniMoeSnakeBeta.forward = forward
    sound = Sound(s.audio, device, int(s.max_hours * 3600 * RATE))
    while sound.used < s.first_hours * 3600 * RATE or 0 not in corpus.made(s.audio):
        time.sleep(0.5)
        sound.looked = 0.0
        sound.look()
    model = Codec(s.tiny).to(device).train()
    spectral = SpectralLoss().to(device)
    held = [torch.from_numpy(a).to(device).float() / 32768 for a in corpus.load(s.audio, 0)]
    say(
        "codec",
        f"{sound.used / RATE / 3600:.2f} h of speech to begin with; "
        f"{time.monotonic() - started:.0f} s",
    )

    given = (s.short - CONTEXT) * HOP - MISSING
    at_start = max(1, s.batch // 8)
    window = torch.arange(s.short, device=device)
    output = torch.arange(given, device=device)
    warm = (torch.arange(s.batch, device=device) >= at_start).long() * CONTEXT

    def loss(bfloat16: bool) -> tuple[Tensor, Tensor]:
        x = sound.crops(s.batch, at_start, s.long * HOP)
        z = model.encoder(x)
        flat = z.detach().reshape(-1, LATENT)
        found, rests, vectors = model.quantizer.encode(flat)
        # A quarter of the crops do without the last levels, so that the first ones carry most.
        few = torch.randint(2, GROUPS, (s.batch,), device=device)
        levels = torch.where(torch.rand(s.batch, device=device) < 0.25, few, GROUPS)[
            :, None
        ].expand(-1, s.long)
        kept = (torch.arange(GROUPS, device=device)[:, None] < levels.reshape(-1)).to(z.dtype)[
            ..., None
        ]
        quantized = (vectors * kept).sum(dim=0).view_as(z)
        model.quantizer.learn(found, rests, 0.995)
        commit = F.mse_loss(z, quantized)
        h = model.context(model.project(z + (quantized - z).detach()))
        start = torch.randint(1, s.long - s.short - 1, (s.batch,), device=device)
        start = torch.where(warm > 0, start, 0)
        part = h.gather(1, (start[:, None] + window)[..., None].expand(-1, -1, h.shape[-1]))
        y = model.wave(part)
        y = torch.cat((y[:at_start, :given], y[at_start:, CONTEXT * HOP :]))
        wanted = x.gather(1, ((start + warm) * HOP)[:, None] + output)
        far = spectral(y, wanted)
        return far + 0.25 * commit, torch.stack((far, commit))

    @torch.no_grad()
    def cluster() -> None:
        parts = [
            model.encoder(sound.crops(32, 0, s.long * HOP))
            for _ in range(8 if s.steps is None else 1)
        ]
        model.quantizer.cluster(torch.cat(parts).reshape(-1, LATENT))

    renew = [100, 300, 800, 2000]

    def after_block(step: int) -> None:
        sound.look()
        while renew and step >= renew[0]:
            renew.pop(0)
            cluster()

    def validate() -> str:
        trainer.swap()
        distance = _distance(model, spectral, held[:16])
        trainer.swap()
        return f"held-out {distance:.4f} on {sound.used / RATE / 3600:.1f} h"

    cluster()
    table = "decoder.code_embedding"
    trained = [p for n, p in model.named_parameters() if not n.startswith(table)]
    left = s.seconds - s.reserve - (time.monotonic() - started)
    schedule = Schedule(
        left, rate=1e-3, floor=0.05, betas=(0.8, 0.99), decay=0.01, max_steps=s.steps, eager=s.eager
    )
    trainer = Trainer("codec", trained, trained, loss, schedule, ("spectral", "commit"), device,
        bfloat16=False,
                      exact_products=True, after_block=after_block)  # fmt: skip
    reached = trainer.run(validate)
    with torch.no_grad():  # the codebooks follow the averaged encoder
        for _ in range(200 if s.steps is None else 1):
            flat = model.encoder(sound.crops(32, 0, s.long * HOP)).reshape(-1, LATENT)
            found, rests, _ = model.quantizer.encode(flat)
            model.quantizer.learn(found, rests, 0.99)
    _save(work, model)
    distance = _distance(model, spectral, held)
    hours, used = _encode_all(work, model, s.audio, s.encode_hours, device)
    good = finite(model.state_dict().values())
    gate(
        "codec",
        f"spectral distance on held-out sentences {distance:.3f}, wanted below 1.15; finite: "
        f"{good}",
        good and distance < 1.15,
    )
    note(
        work,
        "codec",
        minutes=round((time.monotonic() - started) / 60, 2),
        distance=distance,
        hours_trained=round(sound.used / RATE / 3600, 2),
        hours_encoded=round(hours, 2),
        codes_used=used,
        **reached,
    )


@torch.no_grad()
def _distance(model: Codec, spectral: SpectralLoss, held: list[Tensor]) -> float:
    """Mean spectral loss of whole sentences through the codec as it will be shipped."""
    model.eval()
    tf32 = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    model.bake()
    found = []
    for x in held:
        padded = F.pad(x, (0, frames(len(x)) * HOP - len(x)))[None]
        y = model.decoder(model.encode(padded).transpose(1, 2))[:, 0]
        size = min(y.shape[1], len(x))
        found.append(spectral(y[:, :size], padded[:, :size]))
    torch.backends.cudnn.allow_tf32 = tf32
    model.train()
    return float(torch.stack(found).mean())


def _save(work: Path, model: Codec) -> None:
    """Round to what is stored, and store it: the decoder as shipped, the encoder for later runs."""
    with torch.no_grad():
        for p in model.state_dict().values():
            if p.is_floating_point():
                p.copy_(p.to(torch.float16).float())
        model.bake()
        for p in model.decoder.state_dict().values():
            p.copy_(p.to(torch.bfloat16).float())
    weights.save(model.decoder, work / DECODER)
    rest = {
        k: v.half().cpu().contiguous()
        for k, v in model.state_dict().items()
        if not k.startswith("decoder.")
    }
    save_file(
        {k: v for k, v in rest.items() if k not in ("quantizer.use", "quantizer.total")},
        work / ENCODER,
    )


@torch.no_grad()
def _encode_all(
    work: Path, model: Codec, audio: Path, hours: float, device: torch.device
) -> tuple[float, list[int]]:
    """Codes of every chunk that exists, up to the limit. Hours, and how many codes of each book are
    used."""
    model.eval()
    tables, labels, counts, chunks, total = [], [], [], [], 0
    for chunk in corpus.made(audio):
        spoken = corpus.load(audio, chunk)
        sizes = [frames(len(a)) for a in spoken]
        if total + sum(sizes) > hours * 3600 * RATE / HOP:
            break
        found, _ = encode_chunk(model, spoken, device)
        tables.append(found)
        labels.append(corpus.load_labels(audio, chunk))
        counts += sizes
        chunks.append(chunk)
        total += sum(sizes)
    table = np.concatenate(tables)
    codes.write(work, chunks, counts, table, np.concatenate(labels))
    say("codec", f"{len(chunks)} chunks, {total} frames encoded")
    return total * HOP / RATE / 3600, [len(np.unique(table[:, g])) for g in range(GROUPS)]


@torch.no_grad()
def encode_chunk(
    model: Codec, spoken: corpus.Utterances, device: torch.device
) -> tuple[codes.Codes, list[int]]:
    """Codes of utterances one after the other, and the frames of each."""
    sizes = [frames(len(a)) for a in spoken]
    x = np.zeros((len(spoken), max(sizes) * HOP), np.int16)
    for i, a in enumerate(spoken):
        x[i, : len(a)] = a
    tf32 = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    found = (
        model.encode(torch.from_numpy(x).to(device).float() / 32768).to(torch.int16).cpu().numpy()
    )
    torch.backends.cudnn.allow_tf32 = tf32
    return np.concatenate([found[i, :n].astype(np.uint16) for i, n in enumerate(sizes)]), sizes


def load_encoder(work: Path, device: torch.device) -> Codec:
    """The encoder and quantizer of an earlier run, for the codes of further speech."""
    model = Codec()
    stored = {k: v.float() for k, v in load_file(work / ENCODER).items()}
    missing, unknown = model.load_state_dict(stored, strict=False)
    left = [
        k for k in missing if not k.startswith(("decoder.", "quantizer.use", "quantizer.total"))
    ]
    if left or unknown:
        raise SystemExit(f"not the weights of this encoder: {left[:3]} {unknown[:3]}")
    return model.to(device).eval()


def load_decoder(work: Path, device: torch.device) -> nn.Module:
    """code2wav with the trained weights."""
    config = Qwen3OmniMoeCode2WavConfig(
        **config_json({"system": 0, "user": 1, "assistant": 2})["code2wav_config"]
    )
    model = released.Qwen3OmniMoeCode2Wav(config)
    model.load_state_dict({k: v.float() for k, v in load_file(work / DECODER).items()})
    return model.to(device).eval()
