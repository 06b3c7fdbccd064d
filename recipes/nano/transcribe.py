"""Transcription, taught to a finished checkpoint on a CPU: only the thinker learns, and its answers
are held to those of the checkpoint that training begins from, the teacher.

The encoder stays as it is, so `encode` computes its rows of each clip once. A clip is one sequence
with two branches that share the rows of the sound: one is the answer (loss: KL divergence from the
teacher), one the transcript (cross entropy). Neither branch attends to the other. Typed
conversations are held to the teacher too. Sequences are packed into rows of one width, which makes
a step cheap on a CPU. Called by `__main__.py`, in one process or in several that `torchrun`
starts."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from recipes.nano import encoded, listen, shape, thinker, voices, weights
from recipes.nano.encoded import Encoded
from recipes.nano.graph import Schedule, Trainer
from recipes.nano.heard import SILENCES
from recipes.nano.listen import PROMPT_SHARES, PROMPTS, Clips, Listener
from recipes.nano.report import note, say
from recipes.nano.thinker import Thinker
from recipes.nano.tokens import Text
from recipes.nano.tower import Tower

TEACHER = "teacher.safetensors"
WIDTH = thinker.WIDTH  # tokens of a row of the batch
SHARED, ANSWER, TRANSCRIPT = 0, 1, 2  # branches of a sequence
TYPED = 3  # stands in `learn` for a token of a typed conversation
HEAD = 4  # tokens before the sound: the opening of a turn and the mark of a sound
SOUND = -1  # stands among the ids for a row of the encoder
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Settings:
    seconds: float
    voices: Path
    clips: int = 26000  # to make room for
    batch: int = 32
    text_rows: int = 1  # of typed conversations, each step
    rate: float = 6e-4
    hold: float = 20.0  # weight of the divergence of spoken answers
    hold_typed: float = 4.0  # and of typed ones
    noise: float = 0.4  # at most, of the size of the encoder's rows
    mix: float = 0.8  # at most, the share of another clip in the rows
    warm_up: int = 100  # steps
    first: int = 2000  # clips that must be there to begin
    every: float = 420.0  # seconds between evaluations, which also keep the weights
    quiz: int = 60  # questions in each held-out voice to evaluate with
    rows: int = 24000
    bfloat16: bool = True
    steps: int | None = None  # tests


# ---- sequences


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """The tokens of one clip: all arrays have one length."""

    clip: int  # which of the batch
    ids: Ints
    branch: Ints
    position: Ints
    learn: Ints  # 0, or the branch in which the model has to predict this token

    def alone(self, branch: int) -> Turn:
        """One branch with what is shared."""
        keep = (self.branch == SHARED) | (self.branch == branch)
        arrays = (self.ids, self.branch, self.position, self.learn)
        return Turn(self.clip, *(a[keep] for a in arrays))


class Layout:
    """How a clip becomes tokens."""

    def __init__(self, text: Text) -> None:
        special = shape.special_ids()
        turn = text.turn("user", [])
        self.head = [*turn[:3], special["<|audio_start|>"]]
        self.tail = [special["<|audio_end|>"]]
        self.foot = [*turn[3:], *text.opening]
        self.prompts = [text.encode(p) for p in PROMPTS]

    def turn(
        self, clip: int, rows: int, answer: list[int], transcript: list[int], prompt: int
    ) -> Turn:
        """`answer` or `transcript` may be empty: that branch is then left out."""
        ids = [*self.head, *[SOUND] * rows, *self.tail]
        shared = len(ids)
        branch, position, learn = [SHARED] * shared, [*range(shared)], [0] * shared
        for number, before, target in (
            (ANSWER, self.foot, answer),
            (TRANSCRIPT, [*self.prompts[prompt], *self.foot], transcript),
        ):
            if not target:
                continue
            size = len(before) + len(target)
            ids += [*before, *target]
            branch += [number] * size
            position += range(shared, shared + size)
            learn += [0] * len(before) + [number] * len(target)
        return Turn(clip, *(np.array(a, np.int64) for a in (ids, branch, position, learn)))


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Rows of packed sequences [R, WIDTH]."""

    ids: Tensor
    segment: Tensor  # of a clip: its number and 1; 0: nothing
    branch: Tensor
    position: Tensor
    learn: Tensor

    def mask(self) -> Tensor:
        """A token sees earlier ones of its own sequence: those that are shared and those of its
        branch."""
        t = self.ids.shape[1]
        causal = torch.ones(t, t, dtype=torch.bool).tril()
        same = self.segment[:, :, None] == self.segment[:, None, :]
        key = self.branch[:, None, :]
        visible = (key == SHARED) | (key == self.branch[:, :, None])
        return (causal & same & visible)[:, None]

    def join(self, other: Batch) -> Batch:
        return Batch(
            torch.cat((self.ids, other.ids)),
            torch.cat((self.segment, other.segment)),
            torch.cat((self.branch, other.branch)),
            torch.cat((self.position, other.position)),
            torch.cat((self.learn, other.learn)),
        )


def pack(turns: Sequence[Turn]) -> tuple[Batch, list[tuple[int, int]]]:
    """The sequences side by side, the longest placed first; and the row and column of each."""
    free: list[int] = []
    places = [(0, 0)] * len(turns)
    for i in sorted(range(len(turns)), key=lambda i: -len(turns[i].ids)):
        size = len(turns[i].ids)
        row = next((r for r, room in enumerate(free) if room >= size), len(free))
        if row == len(free):
            free.append(WIDTH)
        places[i] = row, WIDTH - free[row]
        free[row] -= size
    table = np.zeros((5, len(free), WIDTH), np.int64)
    for t, (row, column) in zip(turns, places, strict=True):
        part = slice(column, column + len(t.ids))
        segment = np.full(len(t.ids), t.clip + 1)
        table[:, row, part] = (t.ids, segment, t.branch, t.position, t.learn)
    return Batch(*torch.from_numpy(table)), places


def conversations(data: thinker.Data, count: int) -> Batch:
    """Random rows of typed conversations."""
    pick = torch.randint(0, len(data.ids), (count,))
    segment = data.segments[pick].long()
    learn = data.learn[pick].long() * TYPED
    branch = torch.full_like(segment, SHARED)
    return Batch(data.ids[pick].long(), segment, branch, data.positions[pick].long(), learn)


# ---- the loss


def states(model: Thinker, batch: Batch, rows: Tensor) -> Tensor:
    """Hidden states of a batch; `rows` are the encoder's of the clips [clips, longest, H]."""
    sound = batch.ids == SOUND
    x = model.model.embed_tokens(batch.ids.clamp_min(0)).clone()
    x[sound] = rows[batch.segment[sound] - 1, batch.position[sound] - HEAD].to(x.dtype)
    y: Tensor = model.model(x, batch.position, batch.mask())
    return y


def predict(
    model: Thinker, batch: Batch, rows: Tensor, kinds: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """Of each kind of token: logits and tokens, sequence by sequence whatever the packing is."""
    hidden = states(model, batch, rows)
    found = []
    for kind in kinds:
        r, c = (batch.learn[:, 1:] == kind).nonzero(as_tuple=True)
        order = (batch.segment[r, c + 1] * WIDTH + batch.position[r, c + 1]).argsort(stable=True)
        r, c = r[order], c[order]
        found.append((model.lm_head(hidden[r, c]).float(), batch.ids[r, c + 1]))
    return found


def divergence(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean KL divergence of the model from the teacher."""
    return F.kl_div(
        logits.log_softmax(-1), targets.log_softmax(-1), log_target=True, reduction="batchmean"
    )


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """The loss of one step."""

    model: Thinker
    teacher: Thinker
    layout: Layout
    clips: Clips
    texts: thinker.Data
    s: Settings

    def __call__(self, bfloat16: bool) -> tuple[Tensor, Tensor]:
        rows, turns = self.draw(torch.randint(0, len(self.clips), (self.s.batch,)))
        typed = conversations(self.texts, self.s.text_rows)
        asked = [t.alone(ANSWER) for t in turns if (t.learn == ANSWER).any()]
        with torch.no_grad():
            batch = pack(asked)[0].join(typed)
            targets = predict(self.teacher, batch, rows, (ANSWER, TYPED))
        batch = pack(turns)[0].join(typed)
        *answers, transcripts = predict(self.model, batch, rows, (ANSWER, TYPED, TRANSCRIPT))
        spoken_kl, typed_kl = (
            divergence(a[0], b[0]) for a, b in zip(answers, targets, strict=True)
        )
        cross = F.cross_entropy(*transcripts)
        loss = cross + self.s.hold * spoken_kl + self.s.hold_typed * typed_kl
        agree = (answers[0][0].argmax(-1) == targets[0][0].argmax(-1)).float().mean()
        right = (transcripts[0].argmax(-1) == transcripts[1]).float().mean()
        return loss, torch.stack((cross, spoken_kl, typed_kl, right, agree)).detach()

    def draw(self, pick: Tensor) -> tuple[Tensor, list[Turn]]:
        """The encoder's rows of clips, disturbed, and their turns."""
        assert self.clips.encoded is not None
        rows, counts = self.clips.encoded.draw(pick)
        prompts = torch.tensor(PROMPT_SHARES).multinomial(len(pick), replacement=True)
        turns = []
        for i, at in enumerate(pick.tolist()):
            answer = self.clips.answer[at, : int(self.clips.num_answer[at])].tolist()
            transcript = self.clips.transcript[at, : int(self.clips.num_transcript[at])].tolist()
            turn = self.layout.turn(i, int(counts[i]), answer, transcript, int(prompts[i]))
            turns.append(turn)
        return self.disturb(rows, counts), turns

    def disturb(self, rows: Tensor, counts: Tensor) -> Tensor:
        """With noise, and with rows of other clips mixed in: the encoder understands a voice that
        it never heard less well, and there the answers must stay as they are too."""
        b, t, _ = rows.shape
        noise = self.s.noise * torch.rand(b, 1, 1) * rows.square().mean().sqrt()
        real = rows[torch.arange(t) < counts[:, None]]
        other = real[torch.randint(0, len(real), (b, t))]
        share = self.s.mix * torch.rand(b, 1, 1) * torch.rand(b, t, 1)
        return rows * (1 - share) + other * share + torch.randn_like(rows) * noise


# ---- the encoder's rows


def listener(work: Path, text: Text, model: Thinker) -> Listener:
    m = Listener(text, Tower(text.config.thinker.audio), model).eval()
    weights.load(m.tower, work / listen.FILE)
    return m


@torch.no_grad()
def encode(
    m: Listener, clips: Clips, takes: int, batch: int = 25, bfloat16: bool = False
) -> dict[str, Tensor]:
    """The rows of versions of the clips, every other of which is changed but a little; where those
    of each begin, and how many they are [clips, takes]."""
    n, found, used = len(clips), [], 0
    starts, counts = (torch.zeros(n, takes, dtype=torch.long) for _ in range(2))
    order = clips.lengths[:n].argsort()
    for take in range(takes):
        change = m.ears.shifted if take % 2 else m.ears.changed
        for pick in order.split(batch):
            mel, frames = change(clips.cropped(pick), clips.lengths[pick])
            with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
                rows, sizes = listen.heard(m, mel, frames)
            real = torch.arange(rows.shape[1]) < sizes[:, None]
            found.append(rows[real].to(torch.bfloat16))
            starts[pick, take] = used + sizes.cumsum(0) - sizes
            counts[pick, take] = sizes
            used += int(sizes.sum())
    return {"rows": torch.cat(found), "starts": starts, "counts": counts}


def encode_all(work: Path, folder: Path, takes: int) -> None:
    """A file of each chunk that has none; other processes may do the same to other chunks."""
    text, cpu = Text.open(work), torch.device("cpu")
    m = listener(work, text, thinker.load(work, text, cpu))
    files = Encoded(work / encoded.FOLDER, 0)
    files.folder.mkdir(exist_ok=True)
    numbers = [n for n in voices.made(folder) if not voices.held_out(n)]
    Random("order").shuffle(numbers)
    for number in numbers:
        path = files.path(number)
        if path.exists():
            continue
        torch.manual_seed(number)
        clips = Clips(text, folder, voices.CHUNK, cpu)
        clips.add(number)
        # bfloat16: four times as fast, and 0.3 % off
        save_file(encode(m, clips, takes, bfloat16=True), path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
        say("encode", f"chunk {number}: {len(clips)} clips")


# ---- evaluation


@dataclass(frozen=True, slots=True, eq=False)
class Quiz:
    """Questions in one held-out voice, as the encoder gives them."""

    voice: str
    rows: Tensor
    turns: list[Turn]


@torch.no_grad()
def quizzes(
    m: Listener, text: Text, folder: Path, count: int, silences: Sequence[float] = SILENCES
) -> list[Quiz]:
    layout, end = Layout(text), text.config.tokens.im_end
    found = []
    for number in range(voices.HELD_CHUNKS):
        asked, clips = voices.chunk(number)[:count], voices.load(folder, number)[:count]
        rows: list[Tensor] = []
        turns: list[Turn] = []
        for around in silences:
            for a, clip in zip(asked, clips, strict=True):
                rows.append(_rows(m, clip, around))
                answer = [*text.encode(a.pair.answer), end]
                transcript = [*text.encode(a.pair.question), end]
                turns.append(layout.turn(len(turns), len(rows[-1]), answer, transcript, 0))
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        found.append(Quiz(asked[0].voice, padded, turns))
    return found


def _rows(m: Listener, clip: npt.NDArray[np.int16], around: float) -> Tensor:
    """The encoder's rows of a clip with so many seconds of silence around it."""
    pad = np.zeros(int(around * voices.RATE), np.int16)
    samples = np.concatenate((pad, clip, pad))[: listen.SAMPLES]
    sound = torch.from_numpy(samples.astype(np.float32) / 32768)
    sound = F.pad(sound, (0, -len(samples) % voices.RATE))
    rows, counts = listen.heard(m, *m.ears(sound[None], torch.tensor([len(samples)])))
    return rows[0, : int(counts)]


@torch.no_grad()
def score(model: Thinker, quiz: Quiz, batch: int = 64) -> tuple[float, float, float]:
    """The share of answers that are right word for word, the same of transcripts, and the share of
    wrong tokens of transcripts, each behind right ones.

    Greedy text is right if and only if each of its tokens is the likeliest behind the right ones,
    so that one pass tells."""
    right: dict[int, list[bool]] = {ANSWER: [], TRANSCRIPT: []}
    wrong: list[bool] = []
    for first in range(0, len(quiz.turns), batch):
        turns = quiz.turns[first : first + batch]
        packed, places = pack(turns)
        with torch.autocast("cpu", torch.bfloat16):
            best = model.lm_head(states(model, packed, quiz.rows)).argmax(-1)
        hit = torch.zeros_like(best, dtype=torch.bool)
        hit[:, 1:] = best[:, :-1] == packed.ids[:, 1:]
        for (row, column), t in zip(places, turns, strict=True):
            ok = hit[row, column : column + len(t.ids)].numpy()
            for kind in right:
                right[kind].append(bool(ok[t.learn == kind].all()))
            wrong += (~ok[t.learn == TRANSCRIPT]).tolist()
    return float(np.mean(right[ANSWER])), float(np.mean(right[TRANSCRIPT])), float(np.mean(wrong))


def scores(model: Thinker, asked: list[Quiz]) -> str:
    parts = []
    for quiz in asked:
        answers, transcripts, wrong = score(model, quiz)
        parts.append(f"{quiz.voice} {answers:.3f}, transcripts {transcripts:.3f}, "
                     f"wrong tokens {wrong:.3f}")  # fmt: skip
    return "; ".join(parts)


# ---- training


def train(work: Path, s: Settings) -> None:
    """From the weights in WORK; `TEACHER` are those of the first time."""
    started = time.monotonic()
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(rank)
    cpu, text = torch.device("cpu"), Text.open(work)
    if not (work / TEACHER).exists():
        shutil.copy(work / thinker.FILE, work / TEACHER)
    model, teacher = (thinker.load(work, text, cpu) for _ in range(2))
    weights.load(teacher, work / TEACHER)
    model.train().model.embed_tokens.weight.requires_grad_(False)
    texts = thinker.Data.place(thinker.prepared(work, text, s.rows), cpu)
    clips = Clips(text, s.voices, s.clips, cpu, Encoded(work / encoded.FOLDER, s.clips))
    while len(clips) < s.first:
        clips.look()
        time.sleep(0.5)
    asked: list[Quiz] = []
    if rank == 0:
        some = SILENCES[1::2]
        asked = quizzes(listener(work, text, teacher), text, s.voices, s.quiz, some)
        say("transcribe", f"the teacher: {scores(teacher, asked)}")

    def validate() -> str:
        trainer.swap()
        weights.save(model, work / f"thinker-{trainer.step:05d}.safetensors")
        found = scores(model, asked)
        trainer.swap()
        return f"{len(clips)} clips; {found}"

    parameters = [p for p in model.parameters() if p.requires_grad]
    left = s.seconds - (time.monotonic() - started)
    schedule = Schedule(left, rate=s.rate, floor=0.0, warm_up=s.warm_up, decay=0.0, average=0.998,
        max_steps=s.steps)  # fmt: skip
    labels = ("transcripts", "spoken", "typed", "right", "agree")
    step = Step(model, teacher, Layout(text), clips, texts, s)
    trainer = Trainer("transcribe", parameters, parameters, step, schedule, labels, cpu, s.bfloat16,
        every=s.every, after_block=lambda _: clips.look())  # fmt: skip
    reached = trainer.run(validate if rank == 0 else None)
    if rank > 0:
        return
    weights.save(model, work / thinker.FILE)
    weights.load(model, work / thinker.FILE)
    say("transcribe", f"in the end: {scores(model.eval(), asked)}")
    note(work, "transcribe", minutes=round((time.monotonic() - started) / 60, 2), clips=len(clips),
        **reached)  # fmt: skip
