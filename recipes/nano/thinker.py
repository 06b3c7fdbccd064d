"""The thinker: a text model of the grammar, trained on answers only. It also fixes the word
embedding that the talker reads. Called by `__main__.py`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from recipes.nano import grammar, weights
from recipes.nano.decoder import Decoder, initialize, segment_mask
from recipes.nano.graph import Schedule, Trainer, device_of
from recipes.nano.report import gate, note, say
from recipes.nano.tokens import Text
from stretto.layers.config import DecoderConfig

FILE, ROWS, EMBEDDING = "thinker.safetensors", "thinker-rows.npz", "embedding.safetensors"
WIDTH = 256  # tokens per row of the batch
UNEVEN = 0.01  # weight of the experts' balance in the loss
Ints = npt.NDArray[np.int16]


class Thinker(nn.Module):
    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.model = Decoder(c)
        self.model.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        initialize(self, c.num_layers)

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        y: Tensor = self.model(self.model.embed_tokens(ids), positions, mask)
        return y


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Conversations side by side in rows of one width. [rows, WIDTH] each."""

    ids: Ints
    segments: Ints
    positions: Ints
    learn: npt.NDArray[np.bool_]  # the model has to say this token


@dataclass(frozen=True, slots=True, eq=False)
class Data:
    """Rows on the device."""

    ids: Tensor
    segments: Tensor
    positions: Tensor
    learn: Tensor

    @classmethod
    def place(cls, rows: Rows, device: torch.device) -> Data:
        given = (rows.ids, rows.segments, rows.positions, rows.learn)
        return cls(*(torch.from_numpy(a).to(device) for a in given))

    def loss(self, model: Thinker, count: int) -> Tensor:
        """Mean cross entropy of the tokens to be said, in so many random rows."""
        pick = torch.randint(0, len(self.ids), (count,), device=self.ids.device)
        row = self.ids[pick].long()
        hidden = model(row, self.positions[pick].long(), segment_mask(self.segments[pick]))
        logits = model.lm_head(hidden[:, :-1]).float()
        wrong = F.cross_entropy(logits.flatten(0, 1), row[:, 1:].flatten(), reduction="none")
        said = self.learn[pick][:, 1:].flatten().float()
        return (wrong * said).sum() / said.sum()


@dataclass(frozen=True, slots=True)
class Conversation:
    system: str | None
    pairs: list[grammar.Pair]


def conversation(rng: Random) -> Conversation:
    system = rng.choice(grammar.SYSTEMS) if rng.random() < 0.15 else None
    return Conversation(
        system, [grammar.pair(rng) for _ in range(rng.choices((1, 2, 3), (75, 18, 7))[0])]
    )


def encoded(text: Text, conversations: list[Conversation]) -> list[tuple[list[int], list[bool]]]:
    """Ids of each conversation, and which of them the model has to say."""
    asked = iter(text.encode_many([p.question for c in conversations for p in c.pairs]))
    said = iter(text.encode_many([p.answer for c in conversations for p in c.pairs]))
    found = []
    for c in conversations:
        ids = text.turn("system", text.encode(c.system)) if c.system is not None else []
        learn = [False] * len(ids)
        for _ in c.pairs:
            prompt = text.turn("user", next(asked)) + text.opening
            answer_ = [*next(said), text.config.tokens.im_end]
            ids += [*prompt, *answer_, text.newline]
            learn += [False] * len(prompt) + [True] * len(answer_) + [False]
        found.append((ids[:-1], learn[:-1]))
    return found


def rows(text: Text, count: int, seed: str, width: int = WIDTH) -> Rows:
    rng = Random(seed)
    ids, segments, positions = (np.zeros((count, width), np.int16) for _ in range(3))
    learn = np.zeros((count, width), np.bool_)
    row = used = 0
    segment = 1
    while row < count:
        for new, said in encoded(text, [conversation(rng) for _ in range(2000)]):
            if len(new) > width:
                continue
            if used + len(new) > width:
                row, used, segment = row + 1, 0, 1
                if row == count:
                    break
            part = slice(used, used + len(new))
            ids[row, part], segments[row, part], positions[row, part] = (
                new,
                segment,
                range(len(new)),
            )
            learn[row, part] = said
            used, segment = used + len(new), segment + 1
    return Rows(ids, segments, positions, learn)


def prepared(work: Path, text: Text, count: int) -> Rows:
    """Rows made earlier, or made now and kept: half a minute of one core."""
    path = work / ROWS
    if not path.exists():
        made = rows(text, count, "thinker")
        np.savez_compressed(
            path, ids=made.ids, segments=made.segments, positions=made.positions, learn=made.learn
        )
    with np.load(path) as file:
        return Rows(*(file[name][:count] for name in ("ids", "segments", "positions", "learn")))


def answer(model: Thinker, text: Text, questions: list[str], limit: int = 64) -> list[str]:
    """Greedy answers to all questions at once."""
    device = model.lm_head.weight.device
    prompts = [text.turn("user", text.encode(q)) + text.opening for q in questions]
    longest = max(map(len, prompts)) + limit
    ids = torch.zeros(len(prompts), longest, dtype=torch.long, device=device)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    for i, p in enumerate(prompts):
        ids[i, : len(p)] = torch.tensor(p)
    positions = torch.arange(longest, device=device).expand_as(ids)
    ends = torch.full_like(lengths, -1)
    every = torch.arange(len(prompts), device=device)
    with torch.no_grad():
        for _ in range(limit):
            width = int(lengths.max())
            hidden = model(ids[:, :width], positions[:, :width], None)[every, lengths - 1]
            token = model.lm_head(hidden).argmax(dim=-1)
            ends = torch.where((ends < 0) & (token == text.config.tokens.im_end), lengths, ends)
            ids[every, lengths] = token
            lengths = lengths + 1
            if bool((ends >= 0).all()):
                break
    ends = torch.where(ends < 0, lengths, ends)
    return [text.decode(ids[i, len(p) : int(ends[i])].tolist()) for i, p in enumerate(prompts)]


def quiz(count: int) -> list[grammar.Pair]:
    """Questions that training never saw: held-out combinations, and sentences to repeat."""
    rng = Random("quiz")
    held = [p for p in grammar.domain() if p.held_out]
    fixed = [p for p in grammar.domain() if p.kind in ("talk", "fact")]
    pairs = rng.sample(held, count // 2) + rng.sample(fixed, min(count // 8, len(fixed)))
    pairs += [grammar.say(rng, s) for s in grammar.held_out_sentences()[: count // 8]]
    return pairs + [grammar.say(rng) for _ in range(count // 4)]


def exactness(model: Thinker, text: Text, pairs: list[grammar.Pair]) -> dict[str, float]:
    answers: list[str] = []
    for i in range(0, len(pairs), 128):
        answers += answer(model, text, [p.question for p in pairs[i : i + 128]])
    right: dict[str, list[bool]] = {}
    for pair, said in zip(pairs, answers, strict=True):
        right.setdefault(pair.kind, []).append(pair.answer == said)
    return {kind: sum(v) / len(v) for kind, v in right.items()}


@dataclass(frozen=True, slots=True)
class Settings:
    seconds: float
    batch: int = 48
    rows: int = 24000
    quiz: int = 320  # held-out questions to check it with
    device: str | None = None
    steps: int | None = None  # tests
    eager: bool = False


def train(work: Path, s: Settings) -> None:
    started = time.monotonic()
    device, text = device_of(s.device), Text.open(work)
    torch.manual_seed(0)
    model = Thinker(text.config.thinker.text).to(device)
    data = Data.place(prepared(work, text, s.rows), device)
    share, took = data.learn.float().mean(), time.monotonic() - started
    say("thinker", f"{len(data.ids)} rows, {share:.2f} of the tokens are answers; {took:.0f} s")

    def loss(bfloat16: bool) -> tuple[Tensor, Tensor]:
        cross = data.loss(model, s.batch)
        uneven = model.model.unevenness()
        return cross + UNEVEN * uneven, torch.stack((cross, uneven))

    pairs = quiz(s.quiz)
    parameters = list(model.parameters())

    def validate() -> str:
        trainer.swap()
        found = exactness(model, text, pairs[::4])
        trainer.swap()
        return "exact " + " ".join(f"{k} {v:.2f}" for k, v in found.items())

    left = s.seconds - (time.monotonic() - started)
    schedule = Schedule(left, rate=1.5e-3, max_steps=s.steps, eager=s.eager)
    trainer = Trainer(
        "thinker", parameters, parameters, loss, schedule, ("cross", "uneven"), device, every=20.0
    )
    reached = trainer.run(validate)
    weights.save(model, work / FILE)
    weights.load(model, work / FILE)  # scored as it will be shipped
    exact = exactness(model, text, pairs)
    overall = sum(exact[p.kind] for p in pairs) / len(pairs)
    gate(
        "thinker",
        f"held-out questions answered exactly: {overall:.3f}, wanted above 0.95",
        overall > 0.95,
    )
    note(
        work,
        "thinker",
        minutes=round((time.monotonic() - started) / 60, 2),
        exact=exact,
        overall=overall,
        **reached,
    )


def embedding(work: Path, device: torch.device) -> Tensor:
    """The word embedding that the talker reads: all it needs of the thinker, and all that has to be
    carried."""
    whole = work / FILE
    name = "model.embed_tokens.weight"
    return load_file(whole if whole.exists() else work / EMBEDDING)[name].float().to(device)


def save_embedding(work: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    name = "model.embed_tokens.weight"
    save_file({name: load_file(work / FILE)[name]}, out / EMBEDDING)


def load(work: Path, text: Text, device: torch.device) -> Thinker:
    model = Thinker(text.config.thinker.text)
    weights.load(model, work / FILE)
    return model.to(device).eval()
