"""The talker and its code predictor, trained together on the codes of the teacher's speech.

Teacher-forced in the released layout (`layout.py`), with the thinker's embedding frozen. Much of
the past is hidden (`hide.py`), and two more losses say where the talker is in the text (`aids.py`).
The predictor learns on a sample of the frames of a step; the first codes weigh most, for they
decide what is understood. Kept are the averaged weights at the best value on held-out sentences,
and those at the end: the score decides. Called by `__main__.py`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.nano import codes, corpus, grammar, hide, layout, thinker, weights
from recipes.nano.aids import Aids
from recipes.nano.decoder import Decoder, initialize, segment_mask
from recipes.nano.graph import Schedule, Trainer, device_of
from recipes.nano.grow import WIDTH, Data, Growing
from recipes.nano.report import gate, note, say
from recipes.nano.shape import CODES, GROUPS
from recipes.nano.tokens import Text
from stretto.models.qwen3_omni.config import OmniConfig

FILE = "talker.safetensors"
# at the end: worse on held-out sentences, but surer of the domain's answers
LAST = "talker-last.safetensors"
DROPOUT = 0.1
END_WEIGHT = 3.0
RARE = 5
HEARD = 0.12  # share of questions that are sound: rows of zeros, 13 a second
RESIDUAL_WEIGHT = 3.0  # of the predictor's cross entropy against that of code 0
FALL = 0.75  # weight of a code against the one before it
PHONE_WEIGHT, WHERE_WEIGHT = 0.5, 0.3
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
        self.model.codec_embedding = nn.ModuleList(
            nn.Embedding(CODES, c.hidden_size) for _ in range(GROUPS - 1)
        )
        self.lm_head = nn.ModuleList(
            nn.Linear(c.hidden_size, CODES, bias=False) for _ in range(GROUPS - 1)
        )
        initialize(self, c.num_layers)

    def tables(self) -> Tensor:
        """Embeddings of codes 1..15 as one table [15 * 512, H]."""
        return torch.cat([e.weight for e in self.model.codec_embedding])

    def forward(self, hidden: Tensor, first: Tensor, others: Tensor) -> Tensor:
        """Talker states [N, H], embedded code 0 [N, H], embedded codes 1..14 [N, 14, H] -> logits
        [N, 15, 512]."""
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
        self.text_projection = Projection(
            t.thinker_hidden_size, t.projection_size, t.text.hidden_size
        )
        self.hidden_projection = Projection(
            t.thinker_hidden_size, t.projection_size, t.text.hidden_size
        )
        for p in self.hidden_projection.linear_fc2.parameters():
            nn.init.zeros_(p)  # the talker is told nothing of what was heard
        self.code_predictor = Predictor(config)
        self.end = t.codec.eos
        self.unseen = t.codec.pad  # stands for a frame that is hidden in training

    def inputs(self, embedding: Tensor, text: Tensor, mark: Tensor, before: Tensor) -> Tensor:
        """Input rows [B, T, H]. `before` [B, T, 15]: codes 1..15 of the previous frame, NONE where
        there is none."""
        x = self.text_projection(F.embedding(text.clamp_min(0), embedding)) * (text >= 0)[..., None]
        x = x + self.model.codec_embedding(mark.clamp_min(0)) * (mark >= 0)[..., None]
        places = before.clamp_min(0) + torch.arange(GROUPS - 1, device=before.device) * CODES
        residual = F.embedding(places, self.code_predictor.tables()).sum(dim=-2)
        return x + residual * (before[..., :1] >= 0)

    def trained(self) -> list[nn.Parameter]:
        """All but the projection of the media rows: it gives zeros, which is what training
        shows."""
        return [p for n, p in self.named_parameters() if not n.startswith("hidden_projection.")]


@dataclass(frozen=True, slots=True)
class Losses:
    code0: Tensor
    residual: Tensor  # [15]
    end: Tensor  # cross entropy of the end code where it is due
    uneven: Tensor
    phone: Tensor
    where: Tensor
    heard: Tensor  # share of phones that are right
    looked: Tensor  # share of attention on the word

    def total(self) -> Tensor:
        weights = FALL ** torch.arange(GROUPS - 1, device=self.residual.device)
        residual = (self.residual * weights).sum() / weights.sum()
        aids = PHONE_WEIGHT * self.phone + WHERE_WEIGHT * self.where
        return self.code0 + RESIDUAL_WEIGHT * residual + UNEVEN * self.uneven + aids

    def numbers(self) -> Tensor:
        """As `LABELS` names them."""
        r = self.residual
        return torch.stack(
            (self.code0, self.end, r[:3].mean(), r.mean(), self.uneven, self.heard, self.looked)
        )


LABELS = ("code0", "end", "codes1-3", "codes1-15", "uneven", "phones", "looked")


@dataclass(frozen=True, slots=True)
class View:
    """How much of the past may be seen: all of it, a part, or as training hides it (`done` says how
    far that is)."""

    rate: float = 0.0  # share of frames that are hidden
    done: Tensor | None = None


def losses(
    model: Talker, aids: Aids, embedding: Tensor, data: Data, pick: Tensor, sampled: int, view: View
) -> Losses:
    """Losses on the rows `pick`, the predictor's on so many sampled frames."""
    text, mark, before = data.text[pick].long(), data.mark[pick].long(), data.before[pick].long()
    frame, end = data.frame[pick].long(), data.end[pick]
    rows, width = before.shape
    unseen = torch.rand(rows, width, device=before.device) < view.rate
    if view.done is not None:
        unseen = hide.hidden(rows, width, view.done, before.device)
        past = hide.noisy(data.table[hide.elsewhere(before, data.size[1]).clamp_min(0)].long())
    else:
        past = data.table[before.clamp_min(0)].long()  # [B, T, 16]
    has_past, seen = before >= 0, (before >= 0) & ~unseen
    mark = torch.where(has_past, torch.where(unseen, model.unseen, past[..., 0]), mark)
    past = torch.where(seen[..., None], past[..., 1:], layout.NONE)
    x = model.inputs(embedding, text, mark, past)
    mask = segment_mask(data.segments[pick])
    hidden = model.model(x, data.positions[pick].long(), mask)
    now = data.table[frame.clamp_min(0)].long()
    target = torch.where(frame >= 0, now[..., 0], torch.where(end, model.end, -100))
    wrong = F.cross_entropy(
        model.codec_head(hidden).float().flatten(0, 1), target.flatten(), reduction="none"
    )
    ends = end.flatten().float()
    weight = (target.flatten() >= 0).float() + ends * (END_WEIGHT - 1)
    said = data.labels[frame.clamp_min(0)].long()
    phone, heard = aids.phones(hidden, said[..., :2], frame >= 0)
    where, looked = aids.where(data.low[pick].long(), data.high[pick].long(), mask)
    return Losses(
        (wrong * weight).sum() / weight.sum(),
        _residual(model, hidden, now, frame, sampled, noise=view.done is not None),
        (wrong * ends).sum() / ends.sum().clamp_min(1),
        model.model.unevenness(),
        phone,
        where,
        heard,
        looked,
    )


def _residual(
    model: Talker, hidden: Tensor, now: Tensor, frame: Tensor, sampled: int, noise: bool
) -> Tensor:
    """Cross entropy of codes 1..15 on so many of the frames. [15]"""
    keys = torch.where(frame >= 0, torch.rand_like(frame, dtype=torch.float32), -1.0).flatten()
    chosen = keys.topk(
        sampled
    ).indices  # more than there are: the surplus has key -1 and weighs nothing
    counts = (keys[chosen] >= 0).float()
    codes_ = now.flatten(0, 1)[chosen]
    fed = hide.noisy(codes_) if noise else codes_
    places = fed[:, 1:-1] + torch.arange(GROUPS - 2, device=fed.device) * CODES
    logits = model.code_predictor(
        hidden.flatten(0, 1).index_select(0, chosen),
        model.model.codec_embedding(codes_[:, 0]),
        F.embedding(places, model.code_predictor.tables()),
    )
    wrong = F.cross_entropy(logits.float().flatten(0, 1), codes_[:, 1:].flatten(), reduction="none")
    return (wrong.view(-1, GROUPS - 1) * counts[:, None]).sum(dim=0) / counts.sum()


def examples(
    text: Text, spoken: codes.Spoken, seed: str, epochs: int, domain: int = 2
) -> list[tuple[layout.Example, int]]:
    """Every utterance `epochs` times, each time asked for in another way; the domain's answers
    `domain` times that, and those whose words come nowhere else `RARE` times as often again."""
    rng = Random(seed)
    asked = _questions()
    jobs: list[tuple[str, list[str], int]] = []  # answer, questions, utterance
    for number, words in enumerate(spoken.texts):
        for _ in range(
            epochs * (1 if words not in asked else domain if words in _common() else domain * RARE)
        ):
            answer, question = _asked(rng, words, asked)
            earlier = [
                grammar.pair(rng).question for _ in range(rng.choices((0, 1, 2), (80, 15, 5))[0])
            ]
            jobs.append((answer, [*earlier, question], number))
    rng.shuffle(jobs)
    answers, words_ = text.encode_many([a for a, _, _ in jobs]), text.words([a for a, _, _ in jobs])
    questions = iter(text.encode_many([q for _, qs, _ in jobs for q in qs]))
    found, starts = [], spoken.starts
    for (_, qs, number), ids, of in zip(jobs, answers, words_, strict=True):
        user = [i for _ in qs for i in text.turn("user", next(questions))]
        if rng.random() < HEARD:
            user = text.turn("user", [layout.NONE] * rng.randint(10, 45))
        start, count = starts[number], spoken.frames[number]
        said = layout.Said(of, spoken.labels[start : start + count, 2].astype(np.int64))
        found.append(
            (layout.example(text.config, user, text.opening, ids, count, "nano", said), start)
        )
    return found


@cache
def _questions() -> dict[str, list[grammar.Pair]]:
    """The questions of the domain by their answers, without those held out."""
    found: dict[str, list[grammar.Pair]] = {}
    for pair in grammar.domain():
        if not pair.held_out:
            found.setdefault(pair.answer, []).append(pair)
    return found


@cache
def _common() -> frozenset[str]:
    """Sums and counting: many answers out of few words."""
    kinds = grammar.domain_kinds()
    return frozenset(p.answer for kind in ("sum", "count") for p in kinds[kind])


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
    rate: float = 1e-3
    go_on: bool = False  # from the weights of an earlier run
    audio: Path | None = None  # where the teacher speaks on meanwhile
    more_hours: float = 32.0  # of such speech to make room for
    eager: bool = False
    domain: int = 2  # times that answers of the domain come for each time that a reading comes


# chunk that training does not hear, to know when it is best; the score's own is not used for that
HELD = 2


def train(work: Path, s: Settings) -> None:
    started = time.monotonic()
    device, text = device_of(s.device), Text.open(work)
    torch.manual_seed(0)
    domain = _questions()
    _, rest = codes.read(work, s.hours).split([t for t in corpus.chunk_texts(0) if t not in domain])
    held, rest = rest.split([t for t in corpus.chunk_texts(HELD) if t not in domain])
    rows = _rows(text, rest, "talker", s.epochs, s.domain)
    more = s.more_hours if s.audio is not None else 0.0
    share = 1 + more / rest.hours
    data = Data.room(int(len(rows.text) * share), int(len(rest.codes) * share), device)
    data.add(rows, rest.codes, rest.labels)
    check = Data.place(_rows(text, held, "held", 1), held.codes, held.labels, device)
    growing = None
    if s.audio is not None:
        growing = Growing(
            work, s.audio, data, lambda said: _rows(text, said, said.texts[0], s.epochs), device
        )
    embedding = thinker.embedding(work, device)
    model = load(work, text, device).train() if s.go_on else Talker(text.config).to(device)
    aids = Aids(model.model, text.config.talker.text.hidden_size).to(device)
    took = time.monotonic() - started
    say(
        "talker",
        f"{rest.hours:.1f} h, {len(rest.texts)} utterances, {len(data)} rows; {took:.0f} s",
    )

    def loss(bfloat16: bool) -> tuple[Tensor, Tensor]:
        pick = (torch.rand(s.batch, device=device, dtype=torch.float64) * data.size[0]).long()
        found = losses(model, aids, embedding, data, pick, s.sampled, View(done=trainer.done))
        return found.total(), found.numbers()

    best = Best(model)

    def validate() -> str:
        trainer.swap()
        model.eval()
        found = [
            _checked(model, aids, embedding, check, rate, s.sampled) for rate in (0.0, 0.5, 1.0)
        ]
        seen, half, blind = found
        mean = (
            float(seen.code0 + half.code0 + seen.residual[:3].mean() + half.residual[:3].mean()) / 4
        )
        best.offer(mean, {"seen": float(seen.code0), "half": float(half.code0),
            "blind": float(blind.code0),
                          "codes1-3": float(seen.residual[:3].mean()), "phones": float(seen.heard),
                          "phones_half": float(half.heard), "mean": mean,
                          "step": trainer.step})  # fmt: skip
        trainer.swap()
        model.train()
        hours = "" if growing is None else f"{growing.hours:.1f} h more; "
        return f"{hours}held-out, past seen/half/hidden: " + " | ".join(
            f"code0 {v.code0:.3f} 1-3 {v.residual[:3].mean():.3f} phones {v.heard:.3f} looked "
            f"{v.looked:.3f}"
            for v in found
        ) + (" *" if best.mean == mean else "")  # fmt: skip

    trained = [*model.trained(), *aids.parameters()]
    left = s.seconds - (time.monotonic() - started)
    schedule = Schedule(left, rate=s.rate, max_steps=s.steps, eager=s.eager)
    after = None if growing is None else lambda step: growing.look()
    trainer = Trainer(
        "talker", trained, trained, loss, schedule, LABELS, device, every=20.0, after_block=after
    )
    reached = trainer.run(validate)
    if growing is not None:
        growing.save()
    weights.save(model, work / LAST)
    best.put_back()
    weights.save(model, work / FILE)
    held_ = {k: round(v, 4) for k, v in best.reached.items()}
    gate("talker", f"phones right with half of the past hidden {held_['phones_half']}, wanted "
                   f"above 0.8",
         held_["phones_half"] > 0.8)  # fmt: skip
    minutes = round((time.monotonic() - started) / 60, 2)
    note(work, "talker", minutes=minutes, hours=round(rest.hours, 2), best=held_, **reached)


def _rows(
    text: Text, spoken: codes.Spoken, seed: str, epochs: int, domain: int = 2
) -> layout.Batch:
    return layout.side_by_side(examples(text, spoken, seed, epochs, domain), WIDTH)


@torch.no_grad()
def _checked(
    model: Talker, aids: Aids, embedding: Tensor, data: Data, rate: float, sampled: int
) -> Losses:
    pick = torch.arange(len(data), device=embedding.device)
    return losses(model, aids, embedding, data, pick, min(sampled, len(data.table)), View(rate))


class Best:
    """The weights at the best value so far."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.mean = model, float("inf")
        self.weights: dict[str, Tensor] = {}
        self.reached: dict[str, float] = {}

    def offer(self, mean: float, reached: dict[str, float]) -> None:
        if mean < self.mean:
            self.mean, self.reached = mean, reached
            self.weights = {k: v.detach().clone() for k, v in self.model.state_dict().items()}

    def put_back(self) -> None:
        self.model.load_state_dict(self.weights)


def load(work: Path, text: Text, device: torch.device) -> Talker:
    model = Talker(text.config)
    weights.load(model, work / FILE)
    return model.to(device).eval()
