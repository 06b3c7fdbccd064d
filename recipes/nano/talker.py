"""The talker and its code predictor, trained together on the codes of the teacher's speech.

Teacher-forced in the released layout (`layout.py`), with the thinker's embedding frozen. Some input codes are replaced
by chance, so that the model survives its own mistakes. The predictor learns on a sample of the frames of a step.
Called by `__main__.py`, `speech.py` and the tests."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from recipes.nano import codes, corpus, grammar, layout, thinker
from recipes.nano.decoder import Decoder, initialize, segment_mask
from recipes.nano.graph import Schedule, Trainer, device_of
from recipes.nano.report import gate, note, say
from recipes.nano.shape import CODES, GROUPS
from recipes.nano.tokens import Text
from stretto.models.qwen3_omni.config import OmniConfig

FILE = "talker.safetensors"
WIDTH = 256
NOISE = 0.07  # share of input codes replaced by chance
LOST = 0.02  # share of input frames replaced as a whole
DROPOUT = 0.05
END_WEIGHT = 3.0
RESIDUAL_WEIGHT = 2.0  # of the predictor's mean cross entropy against that of code 0
UNEVEN = 0.01


class Projection(nn.Module):
    def __init__(self, size: int, inner: int, out: int) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = nn.Linear(size, inner), nn.Linear(inner, out)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear_fc2(F.silu(self.linear_fc1(x)))
        return y


class Predictor(nn.Module):
    def __init__(self, config: OmniConfig) -> None:
        super().__init__()
        c = config.talker.predictor
        self.model = Decoder(c, positions=GROUPS, dropout=DROPOUT)
        self.model.codec_embedding = nn.ModuleList(nn.Embedding(CODES, c.hidden_size) for _ in range(GROUPS - 1))
        self.lm_head = nn.ModuleList(nn.Linear(c.hidden_size, CODES, bias=False) for _ in range(GROUPS - 1))
        initialize(self, c.num_layers)

    def tables(self) -> Tensor:
        """Embeddings of codes 1..15 as one table [15 * 512, H]."""
        return torch.cat([e.weight for e in self.model.codec_embedding])

    def forward(self, hidden: Tensor, first: Tensor, others: Tensor) -> Tensor:
        """Talker states [N, H], embedded code 0 [N, H], embedded codes 1..14 [N, 14, H] -> logits [N, 15, 512]."""
        x = torch.cat((hidden[:, None], first[:, None], others), dim=1)
        positions = torch.arange(GROUPS, device=x.device)[None]
        y = self.model(x, positions, None)[:, 1:]
        heads = torch.stack([h.weight for h in self.lm_head])
        return torch.einsum("ngh,gch->ngc", y, heads.to(y.dtype))


class Talker(nn.Module):
    def __init__(self, config: OmniConfig) -> None:
        super().__init__()
        t = config.talker
        self.model = Decoder(t.text, dropout=DROPOUT)
        self.model.codec_embedding = nn.Embedding(t.text.vocab_size, t.text.hidden_size)
        self.codec_head = nn.Linear(t.text.hidden_size, t.text.vocab_size, bias=False)
        initialize(self, t.text.num_layers)
        self.text_projection = Projection(t.thinker_hidden_size, t.projection_size, t.text.hidden_size)
        self.hidden_projection = Projection(t.thinker_hidden_size, t.projection_size, t.text.hidden_size)
        self.code_predictor = Predictor(config)
        self.end = t.codec.eos

    def inputs(self, embedding: Tensor, text: Tensor, mark: Tensor, before: Tensor) -> Tensor:
        """Input rows [B, T, H]. `before` [B, T, 15]: codes 1..15 of the previous frame, NONE where there is none."""
        x = self.text_projection(F.embedding(text, embedding))
        x = x + self.model.codec_embedding(mark.clamp_min(0)) * (mark >= 0)[..., None]
        places = before.clamp_min(0) + torch.arange(GROUPS - 1, device=before.device) * CODES
        residual = F.embedding(places, self.code_predictor.tables()).sum(dim=-2)
        return x + residual * (before[..., :1] >= 0)

    def trained(self) -> list[nn.Parameter]:
        """All but the projection of the media rows: nothing is heard in training."""
        return [p for n, p in self.named_parameters() if not n.startswith("hidden_projection.")]


@dataclass(frozen=True, slots=True, eq=False)
class Data:
    """Rows and codes on the device."""

    table: Tensor  # [frames, 16]
    text: Tensor
    mark: Tensor
    before: Tensor
    frame: Tensor
    end: Tensor
    segments: Tensor
    positions: Tensor

    @classmethod
    def place(cls, batch: layout.Batch, table: codes.Codes, device: torch.device) -> Data:
        def put(a: np.ndarray) -> Tensor:  # type: ignore[type-arg]
            return torch.from_numpy(a).to(device)

        return cls(put(table.astype(np.int16)), put(batch.text.astype(np.int16)), put(batch.mark.astype(np.int16)),
                   put(batch.before), put(batch.frame), put(batch.end), put(batch.segments.astype(np.int16)),
                   put(batch.positions.astype(np.int16)))  # fmt: skip

    def __len__(self) -> int:
        return len(self.text)


@dataclass(frozen=True, slots=True)
class Losses:
    code0: Tensor
    residual: Tensor  # [15]
    end: Tensor  # cross entropy of the end code where it is due
    uneven: Tensor

    def total(self) -> Tensor:
        return self.code0 + RESIDUAL_WEIGHT * self.residual.mean() + UNEVEN * self.uneven


def losses(model: Talker, embedding: Tensor, data: Data, pick: Tensor, sampled: int, noise: bool) -> Losses:
    """Losses on the rows `pick`, the predictor's on so many sampled frames."""
    text, mark, before = data.text[pick].long(), data.mark[pick].long(), data.before[pick].long()
    frame, end = data.frame[pick].long(), data.end[pick]
    past = data.table[before.clamp_min(0)].long()  # [B, T, 16]
    if noise:
        past = _noisy(past)
    has_past = before >= 0
    mark = torch.where(has_past, past[..., 0], mark)
    past = torch.where(has_past[..., None], past[..., 1:], layout.NONE)
    x = model.inputs(embedding, text, mark, past)
    hidden = model.model(x, data.positions[pick].long(), segment_mask(data.segments[pick]))
    now = data.table[frame.clamp_min(0)].long()
    target = torch.where(frame >= 0, now[..., 0], torch.where(end, model.end, -100))
    wrong = F.cross_entropy(model.codec_head(hidden).float().flatten(0, 1), target.flatten(), reduction="none")
    ends = end.flatten().float()
    weight = (target.flatten() >= 0).float() + ends * (END_WEIGHT - 1)
    keys = torch.where(frame >= 0, torch.rand_like(frame, dtype=torch.float32), -1.0).flatten()
    chosen = keys.topk(sampled).indices  # more than there are: the surplus has key -1 and weighs nothing
    counts = (keys[chosen] >= 0).float()
    codes_ = now.flatten(0, 1)[chosen]
    fed = _noisy(codes_[:, None])[:, 0] if noise else codes_
    places = fed[:, 1:-1] + torch.arange(GROUPS - 2, device=fed.device) * CODES
    logits = model.code_predictor(
        hidden.flatten(0, 1).index_select(0, chosen),
        model.model.codec_embedding(codes_[:, 0]),
        F.embedding(places, model.code_predictor.tables()),
    )
    residual = F.cross_entropy(logits.float().flatten(0, 1), codes_[:, 1:].flatten(), reduction="none").view(
        -1, GROUPS - 1
    )
    return Losses(
        (wrong * weight).sum() / weight.sum(),
        (residual * counts[:, None]).sum(dim=0) / counts.sum(),
        (wrong * ends).sum() / ends.sum().clamp_min(1),
        model.model.unevenness(),
    )


def _noisy(codes_: Tensor) -> Tensor:
    """Some codes and some whole frames replaced by chance."""
    any_ = torch.randint_like(codes_, 0, CODES)
    one = torch.rand_like(codes_, dtype=torch.float32) < NOISE
    whole = torch.rand_like(codes_[..., :1], dtype=torch.float32) < LOST
    return torch.where(one | whole, any_, codes_)


def examples(text: Text, spoken: codes.Spoken, seed: str, epochs: int) -> list[tuple[layout.Example, int]]:
    """Every utterance `epochs` times, each time asked for in another way."""
    rng = Random(seed)
    asked: dict[str, list[grammar.Pair]] = {}
    for pair in grammar.domain():
        if not pair.held_out:
            asked.setdefault(pair.answer, []).append(pair)
    jobs: list[tuple[str, list[str], int]] = []  # answer, questions, utterance
    for number, words in enumerate(spoken.texts):
        for _ in range(epochs * (2 if words in asked else 1)):
            answer, question = _asked(rng, words, asked)
            earlier = [grammar.pair(rng).question for _ in range(rng.choices((0, 1, 2), (80, 15, 5))[0])]
            jobs.append((answer, [*earlier, question], number))
    rng.shuffle(jobs)
    answers = text.encode_many([a for a, _, _ in jobs])
    questions = iter(text.encode_many([q for _, qs, _ in jobs for q in qs]))
    found, starts = [], spoken.starts
    for (_, qs, number), ids in zip(jobs, answers, strict=True):
        user = [i for _ in qs for i in text.turn("user", next(questions))]
        e = layout.example(text.config, user, text.opening, ids, spoken.frames[number], "nano")
        found.append((e, starts[number]))
    return found


def _asked(rng: Random, words: str, asked: dict[str, list[grammar.Pair]]) -> tuple[str, str]:
    """(answer as written, question) for an utterance."""
    chance = rng.random()
    if words in asked:
        if chance < 0.75:
            return words, grammar.typed(rng, rng.choice(asked[words]).question)
    elif rng.random() < 0.35:
        words = words.rstrip(".")
        if rng.random() < 0.8 and not words.startswith("I "):
            words = words[0].lower() + words[1:]
    if chance < 0.85:
        return words, grammar.say(rng, words).question
    return words, grammar.pair(rng).question


@dataclass(frozen=True, slots=True)
class Settings:
    seconds: float
    batch: int = 32
    sampled: int = 2048
    epochs: int = 4
    hours: float | None = None  # of speech; None: all there is
    device: str | None = None
    steps: int | None = None  # tests
    rate: float = 1.2e-3
    go_on: bool = False  # from the weights of an earlier run
    eager: bool = False


def train(work: Path, s: Settings) -> None:
    started = time.monotonic()
    device, text = device_of(s.device), Text.open(work)
    torch.manual_seed(0)
    spoken = codes.read(work, s.hours)
    score, rest = spoken.split(corpus.chunk_texts(0))
    data = Data.place(layout.side_by_side(examples(text, rest, "talker", s.epochs), WIDTH), rest.codes, device)
    held = Data.place(layout.side_by_side(examples(text, score, "held", 1), WIDTH), score.codes, device)
    embedding = thinker.load(work, text, device).model.embed_tokens.weight.detach()
    model = load(work, text, device).train() if s.go_on else Talker(text.config).to(device)
    say(
        "talker",
        f"{rest.hours:.1f} h, {len(rest.texts)} utterances, {len(data)} rows; {time.monotonic() - started:.0f} s",
    )

    def loss(bfloat16: bool) -> tuple[Tensor, Tensor]:
        pick = torch.randint(0, len(data), (s.batch,), device=device)
        found = losses(model, embedding, data, pick, s.sampled, noise=True)
        r = found.residual
        return found.total(), torch.stack((found.code0, found.end, r[:3].mean(), r.mean(), found.uneven))

    def validate() -> str:
        trainer.swap()
        model.eval()
        with torch.no_grad():
            pick = torch.arange(len(held), device=device)
            v = losses(model, embedding, held, pick, min(s.sampled, len(score.codes)), noise=False)
        trainer.swap()
        model.train()
        reached["held"] = float(v.code0)
        few, all_ = v.residual[:3].mean(), v.residual.mean()
        return f"held-out code0 {v.code0:.4f} end {v.end:.4f} codes1-3 {few:.4f} all {all_:.4f}"

    reached: dict[str, float] = {}
    trained = model.trained()
    left = s.seconds - (time.monotonic() - started)
    schedule = Schedule(left, rate=s.rate, max_steps=s.steps, eager=s.eager)
    labels = ("code0", "end", "codes1-3", "codes1-15", "uneven")
    trainer = Trainer("talker", trained, trained, loss, schedule, labels, device, every=20.0)
    reached |= trainer.run(validate)
    save_file({k: v.detach().to(torch.bfloat16).cpu().contiguous() for k, v in model.state_dict().items()}, work / FILE)
    gate(
        "talker",
        f"cross entropy of code 0 on held-out sentences {reached['held']:.3f}, wanted below 3.5",
        reached["held"] < 3.5,
    )
    note(work, "talker", minutes=round((time.monotonic() - started) / 60, 2), hours=round(rest.hours, 2), **reached)


def load(work: Path, text: Text, device: torch.device) -> Talker:
    model = Talker(text.config)
    model.load_state_dict({k: v.float() for k, v in load_file(work / FILE).items()})
    return model.to(device).eval()
