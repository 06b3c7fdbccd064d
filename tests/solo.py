"""All stages in one thread, in lockstep: the plainest way to run the model, and the reference for
every other.

`Solo.run` answers one prompt (or several at once) and yields what becomes known, in the order it
becomes known: a text token, the frame it allows, the samples of that frame. Frame j needs text
tokens 1..j+1 only, so k tokens give k frames; after the text has ended the talker runs on alone. It
shares no code with the scheduler and the pipeline, only the models; they must give the same tokens,
codes and samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from stretto.errors import Invalid, TooLong
from stretto.kernels.reference.paged import KVCache
from stretto.kernels.reference.sampling import Noise, SamplingRows, sample
from stretto.models.qwen3_omni.bridge import TalkerPrompt, talker_prompt
from stretto.models.qwen3_omni.load import Models
from stretto.models.qwen3_omni.params import RESIDUAL
from stretto.models.qwen3_omni.positions import rope_positions
from stretto.models.qwen3_omni.talker import Talker, first_text_row, opening_rows, user_rows
from stretto.models.qwen3_omni.thinker import Deep, MediaRows, Thinker
from stretto.models.speech.talker import FrameRows
from stretto.models.speech.vocoder import VocoderStream
from stretto.preprocess.prompt import Prompt
from stretto.types import GREEDY, SamplingParams, stage_seed
from tests.media import encode_media

Finish = Literal["stop", "length"]
CODE0 = SamplingParams(temperature=0.9, top_k=50, repetition_penalty=1.05)
"""How the released talker picks code 0 of a frame."""


def media_places(plan: TalkerPrompt) -> list[int]:
    """Thinker positions whose accept-layer rows the talker needs, in order."""
    return [p for p, m in zip(plan.places, plan.is_media, strict=True) if m]


@dataclass(frozen=True, slots=True)
class Options:
    """How one request is answered. Lengths count what comes out; the defaults are the released
    model's."""

    voice: str | None = None
    speak: bool = True
    text: SamplingParams = GREEDY
    code0: SamplingParams = CODE0
    residual: SamplingParams = RESIDUAL
    max_text_tokens: int = 1024
    max_frames: int = 4095
    prefill_chunk: int | None = None  # rows per prompt chunk; None: the whole prompt at once

    def __post_init__(self) -> None:
        for name in ("max_text_tokens", "max_frames"):
            if getattr(self, name) < 1:
                raise Invalid(f"{name} must be at least 1, got {getattr(self, name)}", name)

    def greedy(self) -> Options:
        """The same without chance. The repetition penalty stays: it is part of how the model
        picks."""
        return replace(
            self,
            text=replace(self.text, temperature=0.0),
            code0=replace(self.code0, temperature=0.0),
            residual=replace(self.residual, temperature=0.0),
        )

    def seeded(self, seed: int) -> Options:
        """The same with every stage's seed derived from one."""
        return replace(
            self,
            text=replace(self.text, seed=stage_seed(seed, "thinker")),
            code0=replace(self.code0, seed=stage_seed(seed, "talker")),
            residual=replace(self.residual, seed=stage_seed(seed, "talker")),
        )


DEFAULT = Options()


@dataclass(frozen=True, slots=True)
class TextToken:
    request: int
    id: int


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    request: int
    codes: npt.NDArray[np.int64]  # [16]


@dataclass(frozen=True, slots=True, eq=False)
class Audio:
    request: int
    start: int  # absolute position of the first sample
    samples: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Done:
    request: int
    text: Finish
    audio: Finish | None  # None: nothing was to be spoken


Event = TextToken | Frame | Audio | Done


@dataclass(slots=True, eq=False)
class ThinkerVoice:
    """One request in the thinker."""

    prompt: Prompt
    options: Options
    positions: npt.NDArray[np.float32]
    first_decode: float
    media: MediaRows | None
    capture: list[int]  # prompt positions whose accept-layer rows the talker needs
    blocks: list[int]
    prefilled: int = 0
    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def spoken(self) -> int:
        """How many of the tokens are for the talker: not the end token, nor the one that a length
        stop cut at."""
        return len(self.tokens) - (self.finish is not None)


@dataclass(slots=True, eq=False)
class TalkerVoice:
    """One request in the talker."""

    prompt: TalkerPrompt
    options: Options
    blocks: list[int]
    seen: torch.Tensor  # [vocabulary] bool
    media: list[torch.Tensor] = field(
        default_factory=list
    )  # accept-layer rows that came and were not used yet
    prefilled: int = 0
    frames: int = 0
    embedding: torch.Tensor | None = None  # of the last frame
    finish: Finish | None = None


class Solo:
    def __init__(self, models: Models, block_size: int = 16, noise: Noise | None = None) -> None:
        self.models, self.config = models, models.config
        self.block_size, self.noise = block_size, noise

    def run(
        self, prompts: Prompt | Sequence[Prompt], options: Options | Sequence[Options] = DEFAULT
    ) -> Iterator[Event]:
        """Answer prompts together, one batch per step. Invalid input raises here, before anything
        runs."""
        prompts = [prompts] if isinstance(prompts, Prompt) else list(prompts)
        options = [options] * len(prompts) if isinstance(options, Options) else list(options)
        if not prompts or len(options) != len(prompts):
            raise Invalid("there must be at least one prompt, and options for each", "prompts")
        plans = [self._plan(p, o) for p, o in zip(prompts, options, strict=True)]
        return self._run(prompts, options, plans)

    def _plan(self, prompt: Prompt, options: Options) -> TalkerPrompt | None:
        limit, need = (
            self.config.thinker.text.max_positions,
            len(prompt.ids) + options.max_text_tokens,
        )
        if not prompt.ids:
            raise Invalid("the prompt is empty", "messages")
        if need > limit:
            raise TooLong(
                f"prompt of {len(prompt.ids)} tokens and an answer of up to "
                f"{options.max_text_tokens} "
                f"exceed the model's {limit} positions",
                "messages",
            )
        return talker_prompt(prompt, self.config, options.voice) if options.speak else None

    @torch.inference_mode()
    def _run(
        self, prompts: list[Prompt], options: list[Options], plans: list[TalkerPrompt | None]
    ) -> Iterator[Event]:
        thinker, talker, code2wav = self.models.thinker, self.models.talker, self.models.code2wav
        text_cache, text_blocks = self._pool(
            thinker, [len(p.ids) + o.max_text_tokens for p, o in zip(prompts, options)]
        )
        spoken = [len(p) + o.max_frames + 1 if p else 0 for p, o in zip(plans, options)]
        speech_cache, speech_blocks = self._pool(talker, spoken)
        thinkers = [
            self._open_thinker(p, o, plan, b)
            for p, o, plan, b in zip(prompts, options, plans, text_blocks)
        ]
        talkers = [
            TalkerVoice(plan, o, b, torch.zeros_like(talker.suppress)) if plan else None
            for plan, o, b in zip(plans, options, speech_blocks)
        ]
        streams = [VocoderStream(code2wav) if plan else None for plan in plans]
        sent = [0] * len(prompts)

        while any(v.finish is None for v in thinkers) or any(
            v and v.finish is None for v in talkers
        ):
            for i, token in self._think(thinkers, talkers, text_cache):
                yield TextToken(i, token)
            for i, codes in self._talk(thinkers, talkers, speech_cache):
                yield Frame(i, codes)
                stream = streams[i]
                assert stream is not None
                samples = stream.push(torch.from_numpy(codes)[None]).cpu().numpy()
                if len(samples):
                    yield Audio(i, sent[i], samples)
                sent[i] += len(samples)
        for i, (text, speech) in enumerate(zip(thinkers, talkers, strict=True)):
            assert text.finish is not None
            yield Done(i, text.finish, speech.finish if speech else None)

    def _pool(self, model: Thinker | Talker, lengths: list[int]) -> tuple[KVCache, list[list[int]]]:
        """A cache with room for sequences of these lengths, and each one's blocks."""
        tables, free = [], 1  # block 0 is the sink
        for n in lengths:
            count = -(-n // self.block_size)
            tables.append(list(range(free, free + count)))
            free += count
        return model.cache(free, self.block_size), tables

    def _open_thinker(
        self, prompt: Prompt, options: Options, plan: TalkerPrompt | None, blocks: list[int]
    ) -> ThinkerVoice:
        c = self.config.thinker
        positions, first_decode = rope_positions(
            prompt.ids,
            self.config.tokens,
            c.vision.merge,
            c.positions_per_second,
            prompt.images,
            prompt.videos,
            prompt.audio_in_video,
        )
        media = encode_media(self.models.thinker, prompt)
        capture = media_places(plan) if plan else []
        return ThinkerVoice(prompt, options, positions, first_decode, media, capture, blocks)

    # ---- thinker

    def _think(
        self, voices: list[ThinkerVoice], talkers: list[TalkerVoice | None], cache: KVCache
    ) -> Iterator[tuple[int, int]]:
        """One prompt chunk for each voice that has prompt left, then one token for each other that
        is open."""
        ready = [
            i for i, v in enumerate(voices) if v.finish is None and v.prefilled == len(v.prompt.ids)
        ]
        first: list[tuple[int, torch.Tensor]] = []
        for i, v in enumerate(voices):
            if v.prefilled < len(v.prompt.ids):
                hidden, media = self._prefill_thinker(v, cache)
                talker = talkers[i]
                if media is not None and talker is not None:
                    talker.media.append(media)
                if v.prefilled == len(v.prompt.ids):
                    first.append((i, hidden))
        hiddens = [h for _, h in first]
        if ready:
            hiddens.insert(0, self._decode_thinker([voices[i] for i in ready], cache))
        order = ready + [i for i, _ in first]
        if order:
            yield from zip(
                order, self._pick_text([voices[i] for i in order], torch.cat(hiddens)), strict=True
            )

    def _prefill_thinker(
        self, v: ThinkerVoice, cache: KVCache
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The next chunk of a prompt: the last row's hidden state, and what the talker needs of the
        chunk."""
        thinker, start = self.models.thinker, v.prefilled
        stop = min(len(v.prompt.ids), start + (v.options.prefill_chunk or len(v.prompt.ids)))
        media = v.media.within(start, stop) if v.media else None
        deep = None
        if media is not None and len(media.visual_places):
            deep = Deep(media.visual_places.to(thinker.device), media.deep)
        wanted = [p - start for p in v.capture if start <= p < stop]
        x = thinker.embed(torch.tensor(v.prompt.ids[start:stop], device=thinker.device), media)
        positions = torch.from_numpy(v.positions[:, start:stop]).to(thinker.device)
        paging = cache.page([(v.blocks, start, stop - start)])
        hidden, captured = thinker(x, positions, cache, paging, deep, wanted or None)
        v.prefilled = stop
        return hidden[-1:], captured

    def _decode_thinker(self, voices: list[ThinkerVoice], cache: KVCache) -> torch.Tensor:
        thinker = self.models.thinker
        x = thinker.embed(torch.tensor([v.tokens[-1] for v in voices], device=thinker.device))
        at = [v.first_decode + len(v.tokens) - 1 for v in voices]
        places = [(v.blocks, len(v.prompt.ids) + len(v.tokens) - 1, 1) for v in voices]
        hidden, _ = thinker(x, _same(at, thinker.device), cache, cache.page(places))
        out: torch.Tensor = hidden
        return out

    def _pick_text(self, voices: list[ThinkerVoice], hidden: torch.Tensor) -> list[int]:
        thinker = self.models.thinker
        rows = SamplingRows.of([v.options.text for v in voices], thinker.device)
        draw = torch.tensor(
            [len(v.prompt.ids) + len(v.tokens) for v in voices], device=thinker.device
        )
        seen = None
        if rows.any_penalty:
            seen = torch.zeros(len(voices), self.config.thinker.text.vocab_size, dtype=torch.bool)
            for row, v in zip(seen, voices, strict=True):
                row[torch.tensor([*v.prompt.ids, *v.tokens])] = True
            seen = seen.to(thinker.device)
        tokens: list[int] = sample(
            thinker.logits(hidden), rows, draw, seen=seen, noise=self.noise
        ).tolist()
        for v, token in zip(voices, tokens, strict=True):
            v.tokens.append(token)
            if token == self.config.tokens.im_end:
                v.finish = "stop"
            elif len(v.tokens) == v.options.max_text_tokens:
                v.finish = "length"
        return tokens

    # ---- talker

    def _talk(
        self, thinkers: list[ThinkerVoice], talkers: list[TalkerVoice | None], cache: KVCache
    ) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        """Prompt rows that can be prefilled, then one frame for each voice whose next text token is
        known."""
        frames: list[tuple[int, TalkerVoice, torch.Tensor]] = []
        decoding: list[tuple[int, TalkerVoice]] = []
        for i, (text, v) in enumerate(zip(thinkers, talkers, strict=True)):
            if v is None or v.finish is not None:
                continue
            self._prefill_talker(v, cache)
            if text.finish is not None and text.spoken == 0:
                v.finish = "stop"  # nothing to say
            elif v.embedding is None and text.spoken and v.prefilled == len(v.prompt) - 1:
                frames.append((i, v, self._first_forward(v, text.tokens[0], cache)))
            elif v.embedding is not None and (text.finish is not None or text.spoken > v.frames):
                decoding.append((i, v))
        if decoding:
            hidden = self._decode_talker([(thinkers[i], v) for i, v in decoding], cache)
            frames = [(i, v, h[None]) for (i, v), h in zip(decoding, hidden, strict=True)] + frames
        if frames:
            yield from self._speak(frames)

    def _prefill_talker(self, v: TalkerVoice, cache: KVCache) -> None:
        """All prompt rows that are known by now, but for the last (it carries the first text
        token)."""
        talker, p, start = self.models.talker, v.prompt, v.prefilled
        known, users = sum(len(m) for m in v.media), len(p.ids)
        while start < users:
            after = np.flatnonzero(np.cumsum(p.is_media[start:]) > known)
            stop = start + int(after[0]) if len(after) else users
            if v.options.prefill_chunk:
                stop = min(stop, start + v.options.prefill_chunk)
            if stop == start:
                return
            media = (
                torch.cat(v.media)
                if v.media
                else torch.empty(
                    0,
                    self.config.talker.thinker_hidden_size,
                    device=talker.device,
                    dtype=talker.dtype,
                )
            )
            used = int(p.is_media[start:stop].sum())
            self._feed(
                v, user_rows(talker, p.ids[start:stop], p.is_media[start:stop], media[:used]), cache
            )
            v.media, known, start = [media[used:]], known - used, stop
        if start == users:
            self._feed(v, opening_rows(talker, p), cache)

    def _feed(self, v: TalkerVoice, rows: torch.Tensor, cache: KVCache) -> torch.Tensor:
        start, stop = v.prefilled, v.prefilled + len(rows)
        positions = torch.from_numpy(v.prompt.positions[:, start:stop]).to(rows.device)
        hidden = self.models.talker(
            rows, positions, cache, cache.page([(v.blocks, start, len(rows))])
        )
        v.prefilled = stop
        out: torch.Tensor = hidden[-1:]
        return out

    def _first_forward(self, v: TalkerVoice, token: int, cache: KVCache) -> torch.Tensor:
        return self._feed(
            v,
            first_text_row(self.models.talker, torch.tensor([token], device=v.seen.device)),
            cache,
        )

    def _decode_talker(
        self, voices: list[tuple[ThinkerVoice, TalkerVoice]], cache: KVCache
    ) -> torch.Tensor:
        talker, tokens = self.models.talker, self.config.tokens
        ids = []
        for text, v in voices:  # frame j takes text token j+1, then the end mark once, then padding
            j = v.frames
            ids.append(
                text.tokens[j]
                if j < text.spoken
                else tokens.tts_eos
                if j == text.spoken
                else tokens.tts_pad
            )
        last = torch.stack([v.embedding for _, v in voices if v.embedding is not None])
        x = last + talker.text_rows(torch.tensor(ids, device=talker.device))
        at = [v.prompt.first_decode + v.frames - 1 for _, v in voices]
        places = [(v.blocks, len(v.prompt) + v.frames - 1, 1) for _, v in voices]
        out: torch.Tensor = talker(x, _same(at, talker.device), cache, cache.page(places))
        return out

    def _speak(
        self, frames: list[tuple[int, TalkerVoice, torch.Tensor]]
    ) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        talker = self.models.talker
        voices = [v for _, v, _ in frames]
        rows = FrameRows(
            code0=SamplingRows.of([v.options.code0 for v in voices], talker.device),
            residual=SamplingRows.of([v.options.residual for v in voices], talker.device),
            frame=torch.tensor([len(v.prompt) + v.frames for v in voices], device=talker.device),
            seen=torch.stack([v.seen for v in voices]),
        )
        hidden = torch.cat([h for _, _, h in frames])
        step = talker.frame(hidden, rows, talker.frame_cache(len(voices)), self.noise)
        codes = step.codes.cpu().numpy()
        for (i, v, _), row, embedding, seen in zip(
            frames, codes, step.embedding, rows.seen, strict=True
        ):
            v.embedding, v.seen = embedding, seen
            if row[0] == self.config.talker.codec.eos:
                v.finish = "stop"
            elif v.frames == v.options.max_frames:
                v.finish = "length"
            else:
                v.frames += 1
                yield i, row


def _same(positions: list[float], device: torch.device) -> torch.Tensor:
    """The same position on all three axes."""
    return torch.tensor(positions, dtype=torch.float32, device=device).expand(3, -1)
