"""The audio encoder: taught to give the thinker rows from which it answers spoken questions, and
writes them down when the prompt asks for a transcription.

Two losses. The encoder's rows must spell the question (CTC; the words' vectors are the thinker's
own embeddings, so a row that means a word looks like that word), and the thinker must answer or
transcribe from them. The thinker learns along, except for its embeddings, which the talker reads;
typed questions are mixed in, so that it forgets nothing. Sound is changed at random on the device:
speed, loudness, silence around it, noise, echo, colour, a telephone's band. On a CPU, batches are
of clips of similar length and cropped to the longest. Called by `__main__.py`."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.nano import grammar, shape, thinker, voices, weights
from recipes.nano.decoder import segment_mask
from recipes.nano.encoded import Encoded
from recipes.nano.graph import Schedule, Trainer, device_of
from recipes.nano.report import gate, note, say
from recipes.nano.score import error_rate
from recipes.nano.thinker import Thinker
from recipes.nano.tokens import Text
from recipes.nano.tower import Tower
from stretto.models.qwen3_omni.family import TRANSCRIPTION
from stretto.preprocess.mel import FLOOR, HOP, RANGE, WINDOW, mel_filters

FILE = "audio.safetensors"
CHUNKS = 8  # seconds of a clip, and chunks of the encoder; its attention reaches as far
ROWS = 13 * CHUNKS
SAMPLES = voices.LONGEST
SPELLED = 28  # tokens of a question, at most
ANSWER = 44  # tokens of an answer, its end included
SYSTEM = 40  # room for a system turn
TYPED = 0.2  # share of the questions here that are text
PROMPTS = (TRANSCRIPTION.transcribe, TRANSCRIPTION.transcribe_language.format(language="English"),
    TRANSCRIPTION.translate)  # fmt: skip
"""How the server asks for a transcription; the questions are English, so a translation is one."""
PROMPT_SHARES = (0.7, 0.2, 0.1)
PROMPT = 32  # room for one of them
NEIGHBOURS = 8  # batches that a CPU draws one of, among clips of similar length
NEVER = -1e4  # log of what cannot be
SLOWEST, FASTEST = 0.82, 1.2  # speed of a clip in training


@dataclass(frozen=True, slots=True)
class Settings:
    seconds: float
    voices: Path
    clips: int = 24000  # to make room for
    batch: int = 64
    text_batch: int = 16
    rate: float = 1e-3
    first: int = 2000  # clips that must be there to begin
    rows: int = 24000
    go_on: bool = False  # from the weights of an earlier run
    transcribe: float = 0.35  # share of the clips that are to be transcribed
    warm_up: int = 300  # steps
    every: float = 25.0  # seconds between reports, which also keep the weights
    quiz: int = 200  # questions in each held-out voice to check it with
    device: str | None = None
    bfloat16: bool | None = None  # None: the faster of the two on a GPU, float32 on a CPU
    steps: int | None = None  # tests
    eager: bool = False


@dataclass(eq=False)
class Clips:
    """Spoken questions on the device; more are taken in while training goes on."""

    text: Text
    folder: Path
    room: int
    device: torch.device
    encoded: Encoded | None = None  # its rows instead of samples, as far as there are any
    have: set[int] = field(default_factory=set)
    seconds: float = 0.0
    looked: float = 0.0

    def __post_init__(self) -> None:
        def zeros(width: int) -> Tensor:
            # numpy's zeros take no memory on a CPU before they are written to
            return torch.from_numpy(np.zeros((self.room, width), np.int16)).to(self.device)

        self.samples = zeros(SAMPLES)
        self.lengths = torch.zeros(self.room, dtype=torch.int32, device=self.device)
        self.spelled, self.typed, self.answer, self.transcript = (
            zeros(n) for n in (SPELLED, ROWS + 2, ANSWER, ANSWER)
        )
        self.num_spelled, self.num_typed, self.num_answer, self.num_transcript = (
            torch.zeros_like(self.lengths) for _ in range(4)
        )
        self.size = torch.zeros((), dtype=torch.float64, device=self.device)

    def __len__(self) -> int:
        return int(self.size)

    def look(self) -> None:
        """Take in chunks that are new, but never a held-out voice."""
        if time.monotonic() - self.looked < 1.0:
            return
        for number in voices.made(self.folder):
            if voices.held_out(number) or number in self.have:
                continue
            if self.encoded is not None and not self.encoded.path(number).exists():
                continue
            self.have.add(number)
            first = len(self)
            self.add(number)
            if self.encoded is not None:
                self.encoded.add(number, first, len(self))
        self.looked = time.monotonic()

    def add(self, number: int) -> None:
        rng = Random(f"typed {number}")
        for asked, samples in zip(
            voices.chunk(number), voices.load(self.folder, number), strict=True
        ):
            at = len(self)
            spelled = self.text.encode(grammar.plain(asked.pair.question))
            typed = self.text.encode(grammar.typed(rng, asked.pair.question))
            end = self.text.config.tokens.im_end
            answer = [*self.text.encode(asked.pair.answer), end] if asked.pair.answer else []
            transcript = [*self.text.encode(asked.pair.question), end]
            fits = (
                len(samples) <= SAMPLES * 0.85
                and len(spelled) <= SPELLED
                and max(len(answer), len(transcript)) <= ANSWER
            )
            if at == self.room or not fits:
                continue
            if self.encoded is None:
                self.samples[at, : len(samples)] = torch.from_numpy(samples).to(self.device)
            self.lengths[at] = len(samples)
            for ids, table, count in (
                (spelled, self.spelled, self.num_spelled),
                (typed, self.typed, self.num_typed),
                (answer, self.answer, self.num_answer),
                (transcript, self.transcript, self.num_transcript),
            ):
                table[at, : len(ids)] = torch.tensor(ids, dtype=torch.int16)
                count[at] = len(ids)
            self.seconds += len(samples) / voices.RATE
            self.size.fill_(at + 1)

    def pick(self, batch: int) -> Tensor:
        """A random batch; on a CPU, of clips of similar length."""
        if self.device.type != "cpu":
            return (torch.rand(batch, device=self.device, dtype=torch.float64) * self.size).long()
        order = self.lengths[: len(self)].argsort()
        near = min(len(self), batch * NEIGHBOURS)
        start = int(torch.randint(0, len(self) - near + 1, ()))
        return order[start : start + near][torch.randint(0, near, (batch,))]

    def cropped(self, pick: Tensor) -> Tensor:
        """The samples of a batch, on a CPU no more of them than `Ears.changed` can need."""
        if self.device.type != "cpu":
            return self.samples[pick]
        longest = 0.85 * voices.RATE + int(self.lengths[pick].max()) / SLOWEST
        chunks = min(CHUNKS, math.ceil(longest / voices.RATE))
        return self.samples[pick, : chunks * voices.RATE]


# ---- sound


class Ears(nn.Module):
    """Samples to what the encoder sees, changed at random in training."""

    filters: Tensor
    window: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("filters", torch.from_numpy(mel_filters()).float(), persistent=False)
        self.register_buffer("window", torch.hann_window(WINDOW), persistent=False)

    def power(self, samples: Tensor) -> Tensor:
        """[B, n] -> [B, bins, n / 160]"""
        spectrum = torch.stft(
            samples, WINDOW, HOP, window=self.window, center=True, return_complex=True
        )[..., :-1]
        return (
            (spectrum.real**2 + spectrum.imag**2)
            .transpose(1, 2)
            .matmul(self.filters)
            .transpose(1, 2)
        )

    def seen(self, power: Tensor, frames: Tensor) -> Tensor:
        """Log mel as the released model takes it, zero behind the clip."""
        inside = (torch.arange(power.shape[2], device=power.device) < frames[:, None])[:, None]
        loud = power.clamp_min(FLOOR).log10()
        top = loud.masked_fill(~inside, -10.0).amax(dim=(1, 2), keepdim=True)
        return (torch.maximum(loud, top - RANGE) + 4) / 4 * inside

    def forward(self, samples: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        frames = lengths.long() // HOP
        return self.seen(self.power(samples), frames), frames

    def changed(self, samples: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """As another voice in another room would have said it. samples: int16 [B, n]"""
        power, frames = self._shift(samples, lengths, SLOWEST, FASTEST)
        return self.masked(self.seen(self.coloured(power), frames)), frames

    def shifted(self, samples: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """A little slower or faster, silence around it, and otherwise as it is."""
        power, frames = self._shift(samples, lengths, 0.92, 1.08)
        return self.seen(power, frames), frames

    def _shift(
        self, samples: Tensor, lengths: Tensor, slowest: float, fastest: float
    ) -> tuple[Tensor, Tensor]:
        """The power of clips of another speed and loudness, with silence around them; and how
        many frames of it count."""
        b, n = samples.shape
        device = samples.device

        def draw(low: float, high: float) -> Tensor:
            return low + (high - low) * torch.rand(b, 1, device=device)

        speed, lead = draw(slowest, fastest), draw(0, 0.35) * voices.RATE
        rest = (n - lead - lengths[:, None] / speed).clamp_min(0)
        tail = torch.minimum(draw(0.05, 0.5) * voices.RATE, rest)
        place = (torch.arange(n, device=device)[None] - lead) * speed
        there = (place >= 0) & (place < lengths[:, None] - 1)
        low = place.clamp(0, n - 2).long()
        part = (place - low).clamp(0, 1)
        wave = (
            samples.gather(1, low).float() * (1 - part) + samples.gather(1, low + 1).float() * part
        )
        power = self.power(wave * there / 32768 * 10 ** draw(-1.3, 0.1))
        frames = (
            (lead + lengths[:, None] / speed + tail).clamp_max(n)[:, 0].long() // HOP
        ).clamp_max(n // HOP)
        return power, frames

    def coloured(self, power: Tensor) -> Tensor:
        """Echo, colour of the room and the microphone, noise, a telephone's band."""
        b, bins, t = power.shape
        device = power.device

        def draw(low: float, high: float) -> Tensor:
            return low + (high - low) * torch.rand(b, 1, 1, device=device)

        steps = torch.arange(24, device=device)
        decay = torch.exp(-steps / 6.0)
        echo = F.conv1d(
            F.pad(power.reshape(b * bins, 1, t), (24, 0))[..., :-1],
            decay.flip(0)[None, None] / decay.sum(),
        )
        power = power + echo.view(b, bins, -1)[..., :t] * draw(0, 0.25) * (draw(0, 1) < 0.4)
        place = torch.linspace(0, 1, bins, device=device)[None, :, None]
        colour = draw(-1.0, 1.0) * place
        for k in (1, 2, 3, 5):
            colour = colour + draw(-0.3, 0.3) * torch.cos(torch.pi * k * (place + draw(0, 1)))
        power = power * 10**colour
        level = power.mean(dim=(1, 2), keepdim=True) * 10 ** draw(-5.0, -1.3)
        hiss = -torch.log(torch.rand_like(power).clamp_min(1e-6)) * 10 ** (draw(-1.5, 0.5) * place)
        power = power + level * hiss
        edge = draw(0.68, 0.8)
        narrow = (draw(0, 1) < 0.2) & (place > edge)
        return power * torch.where(narrow, 1e-6, 1.0)

    def masked(self, mel: Tensor) -> Tensor:
        """Some stretches of time and some bands are missing."""
        b, bins, t = mel.shape
        device = mel.device
        for size, count, dim in ((14, bins, 1), (14, bins, 1), (16, t, 2)):
            width = torch.rand(b, 1, device=device) * size
            start = torch.rand(b, 1, device=device) * count
            at = torch.arange(count, device=device)[None]
            hidden = (at >= start) & (at < start + width)
            mel = mel.masked_fill(hidden.unsqueeze(3 - dim), 0.0)
        return mel


# ---- losses


def spelling_loss(scores: Tensor, counts: Tensor, spelled: Tensor, num_spelled: Tensor) -> Tensor:
    """CTC over `scores` [B, T, words + 1], the last being the blank, in a fixed number of steps.
    Mean per token."""
    logs = scores.float().log_softmax(dim=-1)
    b, t, last = logs.shape[0], logs.shape[1], logs.shape[2] - 1
    states = torch.full((b, 2 * spelled.shape[1] + 1), last, dtype=torch.long, device=logs.device)
    states[:, 1::2] = spelled
    fresh = torch.ones_like(states, dtype=torch.bool)  # may be entered from two states before
    fresh[:, 2:] = (states[:, 2:] != last) & (states[:, 2:] != states[:, :-2])
    fresh[:, :2] = False
    emitted = logs.gather(2, states[:, None].expand(-1, t, -1))
    never = torch.full_like(emitted[:, 0], NEVER)
    begin = torch.arange(states.shape[1], device=logs.device) < 2
    alpha = torch.where(begin, emitted[:, 0], never)
    for i in range(1, t):
        before = F.pad(alpha, (1, 0), value=NEVER)[:, :-1]
        skipped = torch.where(fresh, F.pad(alpha, (2, 0), value=NEVER)[:, :-2], never)
        new = torch.stack((alpha, before, skipped)).logsumexp(dim=0) + emitted[:, i]
        alpha = torch.where((i < counts)[:, None], new.clamp_min(NEVER), alpha)
    ends = torch.stack((2 * num_spelled, (2 * num_spelled - 1).clamp_min(0)), dim=1).long()
    found = alpha.gather(1, ends).logsumexp(dim=1)
    possible = (found > NEVER / 2).float()
    return -(found * possible).sum() / (num_spelled * possible).sum().clamp_min(1)


class Listener(nn.Module):
    """The encoder, the thinker that answers, and the head that spells."""

    words: Tensor
    head: Tensor
    foot: Tensor
    systems: Tensor
    system_sizes: Tensor
    prompts: Tensor
    prompt_sizes: Tensor
    prompt_chances: Tensor

    def __init__(self, text: Text, tower: Tower, model: Thinker) -> None:
        super().__init__()
        self.tower, self.thinker, self.ears = tower, model, Ears()
        words = model.model.embed_tokens.weight.detach()
        self.register_buffer("words", F.normalize(words.float(), dim=-1), persistent=False)
        self.blank = nn.Parameter(F.normalize(torch.randn(1, words.shape[1]), dim=-1))
        self.scale = nn.Parameter(torch.tensor(10.0))
        t = text.config.tokens
        ids = text.turn("user", [])
        self.register_buffer("head", torch.tensor(ids[:3]), persistent=False)
        self.register_buffer("foot", torch.tensor([*ids[3:], *text.opening]), persistent=False)
        special = shape.special_ids()
        self.marks = (special["<|audio_start|>"], special["<|audio_end|>"])
        self.newline, self.end = text.newline, t.im_end
        systems = [text.turn("system", text.encode(s)) for s in grammar.SYSTEMS]
        self._table("system", [[], *systems], SYSTEM)
        self._table("prompt", [[], *(text.encode(p) for p in PROMPTS)], PROMPT)
        chances = torch.tensor(PROMPT_SHARES)
        self.register_buffer("prompt_chances", chances, persistent=False)

    def _table(self, name: str, rows: list[list[int]], width: int) -> None:
        table = torch.zeros(len(rows), width, dtype=torch.long)
        for i, ids in enumerate(rows):
            table[i, : len(ids)] = torch.tensor(ids)
        self.register_buffer(f"{name}s", table, persistent=False)
        sizes = torch.tensor([len(ids) for ids in rows])
        self.register_buffer(f"{name}_sizes", sizes, persistent=False)

    def scores(self, rows: Tensor) -> Tensor:
        """How much each row looks like each word, and like none."""
        table = torch.cat(
            (self.words.to(rows.dtype), F.normalize(self.blank, dim=-1).to(rows.dtype))
        )
        return self.scale * F.normalize(rows, dim=-1) @ table.T

    def turn(self, rows: Tensor, counts: Tensor, typed: Tensor, num_typed: Tensor, as_text: Tensor,
             which: Tensor, answer: Tensor, num_answer: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
        """A question and its answer: input rows [B, W, H] and which of them are real [B, W].
        `which` prompt follows the spoken question [B]; 0: none."""
        embed = self.thinker.model.embed_tokens
        b, width, device = rows.shape[0], rows.shape[1] + 2 + PROMPT, rows.device
        prompt = self.prompts[which]
        ends = torch.where(as_text, num_typed, counts + 2 + self.prompt_sizes[which])[:, None]
        if device.type == "cpu":
            width = int(ends.max())
        at = torch.arange(width, device=device)[None]
        behind = at - counts[:, None] - 2
        marks = torch.where(at == 0, self.marks[0], self.marks[1])
        words = torch.where(behind < 0, marks, prompt.gather(1, behind.clamp(0, PROMPT - 1)))
        spoken = F.pad(rows, (0, 0, 1, 1 + PROMPT))[:, :width]
        is_row = (at > 0) & (behind < -1)
        heard = torch.where(is_row[..., None], spoken, embed(words))
        text = F.pad(typed, (0, max(0, width - typed.shape[1])))[:, :width]
        middle = torch.where(as_text[:, None, None], embed(text), heard)
        head, foot = (embed(ids).expand(b, -1, -1) for ids in (self.head, self.foot))
        said = torch.arange(answer.shape[1] + 1, device=device)[None]
        last = torch.where(said == num_answer[:, None], self.newline, F.pad(answer, (0, 1)))
        x = torch.cat((head, middle, foot, embed(last)), dim=1)
        real = torch.cat(
            (
                torch.ones(b, head.shape[1], dtype=torch.bool, device=device),
                at < ends,
                torch.ones(b, foot.shape[1], dtype=torch.bool, device=device),
                said <= num_answer[:, None],
            ),
            dim=1,
        )
        return x, real

    def answered(self, x: Tensor, real: Tensor, segments: Tensor) -> Tensor:
        """The thinker over rows of which some are not real."""
        mask = segment_mask(segments) & real[:, None, None, :]
        mask = mask | torch.eye(
            x.shape[1], dtype=torch.bool, device=x.device
        )  # a row that sees nothing makes NaN
        counted = real.long().cumsum(dim=1)
        first = torch.where(
            segments[:, :1] == segments, 0, (counted * (segments == segments[:, :1])).amax(1, True)
        )
        positions = (counted - 1 - first).clamp_min(0)
        y: Tensor = self.thinker.model(x, positions, mask)
        return y


def heard(m: Listener, mel: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
    """The encoder's rows of a batch, on a CPU of no more chunks than there is sound in."""
    if mel.device.type == "cpu":
        size = m.tower.config.chunk_frames
        mel = mel[..., : max(1, math.ceil(int(frames.max()) / size)) * size]
    rows, counts = m.tower(mel, frames)
    return rows.float(), counts


def losses(
    m: Listener, clips: Clips, pick: Tensor, transcribe: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(cross entropy of the answers, CTC, share of answers that are right token by token, the same
    of transcripts). `transcribe`: share of the clips."""
    b, device = len(pick), pick.device
    with torch.autocast(device.type, enabled=False):
        mel, frames = m.ears.changed(clips.cropped(pick), clips.lengths[pick])
    rows, counts = heard(m, mel, frames)
    spelled, num_spelled = clips.spelled[pick].long(), clips.num_spelled[pick].long()
    spelling = spelling_loss(m.scores(rows), counts, spelled, num_spelled)
    asks = clips.num_answer[pick] > 0
    as_text = asks & (torch.rand(b, device=device) < TYPED)
    written = ~asks | (torch.rand(b, device=device) < transcribe) & ~as_text
    edges = m.prompt_chances.cumsum(0)[:-1]
    prompt = 1 + torch.bucketize(torch.rand(b, device=device), edges)
    answer = torch.where(written[:, None], clips.transcript[pick], clips.answer[pick]).long()
    num_answer = torch.where(written, clips.num_transcript[pick], clips.num_answer[pick]).long()
    if device.type == "cpu":
        answer = answer[:, : int(num_answer.max())]
    size = answer.shape[1]
    typed, num_typed = clips.typed[pick].long(), clips.num_typed[pick].long()
    x, real = m.turn(rows, counts, typed, num_typed, as_text, prompt * written, answer, num_answer)
    width = x.shape[1]
    # Two questions to a row, behind a system turn or none; the second sees the first, or does not:
    # a CPU then has a row for each.
    alone = device.type == "cpu" and float(torch.rand(())) < 0.5
    n = b if alone else b // 2
    which = torch.randint(0, 8, (n,), device=device)
    which = torch.where(which < len(m.systems), which, 0)
    room = SYSTEM
    if device.type == "cpu":
        which = which[:1].expand(n)
        room = int(m.system_sizes[which[0]])
    system = m.thinker.model.embed_tokens(m.systems[which, :room])
    there = torch.arange(room, device=device)[None] < m.system_sizes[which][:, None]
    x = torch.cat((system, x.view(n, -1, x.shape[-1])), dim=1)
    real = torch.cat((there, real.view(n, -1)), dim=1)
    apart = torch.rand(n, 1, device=device) < (0.0 if device.type == "cpu" else 0.5)
    second = torch.arange(x.shape[1], device=device)[None] >= room + width
    hidden = m.answered(x, real, (apart & second).int())
    hidden = hidden[:, room:].reshape(b, width, -1)[:, -size - 2 : -2]
    logits = m.thinker.lm_head(hidden).float()
    said = torch.arange(size, device=device)[None] < num_answer[:, None]
    wrong = (
        F.cross_entropy(logits.flatten(0, 1), answer.flatten(), reduction="none").view(b, -1) * said
    )
    right = ((logits.argmax(dim=-1) == answer) | ~said).all(dim=1).float()
    answered, transcribed = (
        (right * of).sum() / of.sum().clamp_min(1) for of in (~written, written)
    )
    return wrong.sum() / said.sum(), spelling, answered, transcribed


@torch.no_grad()
def answers(m: Listener, text: Text, spoken: list[np.ndarray], limit: int = ANSWER,  # type: ignore[type-arg]
            prompt: int = 0) -> list[str]:  # fmt: skip
    """Greedy answers to spoken questions, one after another in a batch of any size. `prompt`: one
    of `PROMPTS`, counted from 1, to have transcripts instead."""
    device = m.blank.device
    samples = torch.zeros(len(spoken), SAMPLES, device=device)
    for i, s in enumerate(spoken):
        samples[i, : len(s)] = torch.from_numpy(s[:SAMPLES].astype(np.float32) / 32768).to(device)
    lengths = torch.tensor([min(len(s), SAMPLES) for s in spoken], device=device)
    rows, counts = heard(m, *m.ears(samples, lengths))
    b = len(spoken)
    answer = torch.zeros(b, ANSWER, dtype=torch.long, device=device)
    nothing = torch.zeros(b, ROWS + 2, dtype=torch.long, device=device)
    sizes, which, ended = (
        torch.full((b,), n, dtype=torch.long, device=device) for n in (0, prompt, limit)
    )
    every = torch.arange(b, device=device)
    for i in range(limit):
        here = answer[:, : i + 1] if device.type == "cpu" else answer
        x, real = m.turn(rows, counts, nothing, sizes * 0, sizes < 0, which, here, sizes)
        hidden = m.answered(x, real, torch.zeros_like(real, dtype=torch.int))
        hidden = hidden[:, -here.shape[1] - 2 + i]
        token = m.thinker.lm_head(hidden).argmax(dim=-1)
        ended = torch.where((token == m.end) & (ended == limit), i, ended)
        answer[every, i] = token
        sizes = sizes + 1
        if bool((ended < limit).all()):
            break
    return [text.decode(answer[i, : int(n)].tolist()) for i, n in enumerate(ended)]


def quiz(
    m: Listener, text: Text, folder: Path, count: int = voices.CHUNK
) -> tuple[dict[str, float], dict[str, float]]:
    """By held-out voice: the share of spoken questions answered word for word, and the word error
    rate of their transcripts."""
    right: dict[str, float] = {}
    wrong: dict[str, float] = {}
    pad = np.zeros(voices.RATE // 10, np.int16)
    for number in range(voices.HELD_CHUNKS):
        asked = voices.chunk(number)[:count]
        spoken = [np.concatenate((pad, s, pad)) for s in voices.load(folder, number)[:count]]
        said: list[str] = []
        transcripts: list[str] = []
        for i in range(0, len(asked), 100):
            said += answers(m, text, spoken[i : i + 100])
            transcripts += answers(m, text, spoken[i : i + 100], prompt=1)
        voice = asked[0].voice
        right[voice] = sum(a.pair.answer == s for a, s in zip(asked, said, strict=True)) / len(
            asked
        )
        pairs = [(a.pair.question, t) for a, t in zip(asked, transcripts, strict=True)]
        wrong[voice] = error_rate(pairs)
    return right, wrong


def train(work: Path, s: Settings) -> None:
    """In one process, or in several that `torchrun` starts on a CPU; the first of them reports."""
    started = time.monotonic()
    device, text = device_of(s.device), Text.open(work)
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(rank)
    m = Listener(
        text, Tower(text.config.thinker.audio), thinker.load(work, text, torch.device("cpu"))
    ).to(device)
    if s.go_on:
        weights.load(m.tower, work / FILE)

    m.train()
    m.thinker.model.embed_tokens.weight.requires_grad_(False)
    texts = thinker.Data.place(thinker.prepared(work, text, s.rows), device)
    clips = Clips(text, s.voices, s.clips, device)
    while len(clips) < s.first or min(voices.made(s.voices), default=1):
        clips.look()
        time.sleep(0.5)
    say("listen", f"{len(clips)} questions to begin with; {time.monotonic() - started:.0f} s")

    def loss(bfloat16: bool) -> tuple[Tensor, Tensor]:
        answered, spelled, right, transcribed = losses(m, clips, clips.pick(s.batch), s.transcribe)
        typed = texts.loss(m.thinker, s.text_batch)
        # At first the rows must come to mean words; answers from noise would only teach the thinker
        # to guess.
        begun = 1.0 if s.go_on else ((trainer.done - 0.08) / 0.07).clamp(0, 1)
        total = (
            begun * answered + 0.5 * spelled + typed + thinker.UNEVEN * m.thinker.model.unevenness()
        )
        return total, torch.stack((answered, spelled, right, transcribed, typed))

    def keep() -> None:
        for part, file in ((m.tower, FILE), (m.thinker, thinker.FILE)):
            weights.save(part, work / f"{file}.part")
            (work / f"{file}.part").replace(work / file)

    def validate() -> str:
        trainer.swap()
        m.eval()
        keep()  # `go_on` continues from here
        right, wrong = quiz(m, text, s.voices, s.quiz)
        m.train()
        trainer.swap()
        shown = " ".join(f"{k} {v:.3f}, WER {wrong[k]:.3f};" for k, v in right.items())
        return f"{clips.seconds / 3600:.1f} h; held-out voices: {shown}"

    trained = [p for p in m.parameters() if p.requires_grad]
    left = s.seconds - (time.monotonic() - started)
    schedule = Schedule(left, rate=s.rate, warm_up=s.warm_up, max_steps=s.steps, eager=s.eager)
    labels = ("answers", "spelling", "right", "transcribed", "typed")
    trainer = Trainer("listen", trained, trained, loss, schedule, labels, device, s.bfloat16,
                      every=s.every, after_block=lambda step: clips.look())  # fmt: skip
    reached = trainer.run(validate if rank == 0 else None)
    if rank > 0:
        return
    keep()
    for part, file in ((m.tower, FILE), (m.thinker, thinker.FILE)):
        weights.load(part, work / file)
    m.eval()
    right, wrong = quiz(m, text, s.voices, s.quiz)
    pairs = thinker.quiz(s.quiz * 8 // 5)
    exact = thinker.exactness(m.thinker, text, pairs)
    overall = sum(exact[p.kind] for p in pairs) / len(pairs)
    worst = min(right.values())
    gate("listen", f"spoken questions, held-out voices: {right}, wanted above 0.85", worst > 0.85)
    gate("listen", f"WER of transcripts, held-out voices: {wrong}, wanted below 0.25",
        max(wrong.values()) < 0.25)  # fmt: skip
    gate("listen", f"typed questions, held-out: {overall:.3f}, wanted above 0.95", overall > 0.95)
    note(work, "listen", minutes=round((time.monotonic() - started) / 60, 2),
        hours=round(clips.seconds / 3600, 2),
         heard=right, transcripts=wrong, exact=exact, overall=overall, **reached)  # fmt: skip
