"""A talker: a speech language model that turns text tokens into codec frames, one frame per token.

Weights, and one step. A step takes a row of input per request, runs the decoder over the paged
cache, picks code 0 and lets the code predictor add the other fifteen; nothing in it depends on the
host. Text reaches the talker as ids only: `text_rows` is a lookup in a table that a family makes
once, when the weights are there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from stretto.kernels.reference.paged import KVCache, Paging
from stretto.kernels.reference.sampling import Noise, SamplingRows, sample
from stretto.layers.config import DecoderConfig
from stretto.layers.decoder import Decoder, PagedPass
from stretto.layers.linear import Embedding, Linear
from stretto.models.speech.code_predictor import CodePredictor, FrameCache
from stretto.models.speech.config import FrameConfig

NUM_RESERVED = 1024
"""The last so many ids of the talker's vocabulary are control ids: never picked, but for the
end."""


@dataclass(frozen=True, slots=True, eq=False)
class FrameRows:
    """What a frame's picks depend on, for the rows of a batch."""

    code0: SamplingRows  # how code 0 is picked
    residual: SamplingRows  # how codes 1..15 are picked
    # [rows] int64: index of the frame in its request's sequence; numbers its draws
    frame: torch.Tensor
    seen: torch.Tensor  # [rows, vocabulary] bool: codes 0 picked so far; updated by the step


@dataclass(frozen=True, slots=True, eq=False)
class FrameStep:
    """A step's results, all on the device."""

    codes: torch.Tensor  # [rows, 16]; no frame where codes[:, 0] is the codec's end
    embedding: torch.Tensor  # [rows, hidden]: the frame's part of the next input row
    hidden: torch.Tensor  # [rows, hidden]: final-normed


class TalkerModel(Decoder):
    def __init__(self, c: DecoderConfig) -> None:
        super().__init__(c)
        self.codec_embedding = Embedding(c.vocab_size, c.hidden_size)


class FrameTalker(nn.Module):
    """What the talkers of all families have."""

    text_table: torch.Tensor  # [text vocabulary, hidden]: input rows by token
    suppress: torch.Tensor  # [codec vocabulary] bool

    def __init__(self, frames: FrameConfig, model: TalkerModel) -> None:
        super().__init__()
        c = frames.decoder
        self.frames = frames
        self.model = model
        self.codec_head = Linear(c.hidden_size, c.vocab_size)
        self.code_predictor = CodePredictor(frames.predictor, frames.num_code_groups, c.hidden_size)

    def prepare_frames(self) -> None:
        """Derived constants; once, after the weights are in place."""
        device = self.device
        self.model.prepare(device)
        self.code_predictor.prepare(device)
        self.suppress = torch.zeros(self.frames.decoder.vocab_size, dtype=torch.bool, device=device)
        self.suppress[-NUM_RESERVED:] = True
        self.suppress[self.frames.eos] = False

    def make_table(self, embedding: torch.Tensor, projection: nn.Module) -> None:
        """All tokens' input rows from a word embedding, which is not kept."""
        parts = torch.split(embedding, 8192)
        self.text_table = torch.cat([projection(p.to(self.device, self.dtype)) for p in parts])

    @property
    def device(self) -> torch.device:
        return self.codec_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.codec_head.weight.dtype

    def cache(self, num_blocks: int, block_size: int = 16) -> KVCache:
        return self.model.cache(num_blocks, block_size, self.device, self.dtype)

    def frame_cache(self, rows: int) -> FrameCache:
        return self.code_predictor.cache(rows, self.device, self.dtype)

    def text_rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.text_table[ids]

    def codec_rows(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.model.codec_embedding(ids)
        return out

    def frame_rows(self, codes: torch.Tensor) -> torch.Tensor:
        """Embeddings of whole frames [n, groups], summed as `frame` sums them: [n, hidden]."""
        rows = [self.codec_rows(codes[:, 0])]
        for table, column in zip(
            self.code_predictor.model.codec_embedding, codes.T[1:], strict=True
        ):
            rows.append(table(column))
        return torch.stack(rows, 1).sum(1, dtype=torch.float32).to(self.dtype)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, cache: KVCache, paging: Paging
    ) -> torch.Tensor:
        """One pass over any mix of prompt chunks and decoding rows -> final-normed rows."""
        out: torch.Tensor = self.model(x, positions, PagedPass(cache, paging))
        return out

    def frame(
        self,
        hidden: torch.Tensor,
        rows: FrameRows,
        frames: FrameCache,
        noise: Noise | None = None,
        hold: Callable[[torch.Tensor], None] | None = None,
    ) -> FrameStep:
        """Pick a frame for each row of `hidden`, the final-normed output at the row to speak from.
        `hold` may change the logits of code 0 in place."""
        logits = self.codec_head(hidden)
        if hold is not None:
            hold(logits)
        draw = rows.frame * self.frames.num_code_groups  # one draw per code, all of them different
        code0 = sample(
            logits, rows.code0, draw, seen=rows.seen, suppress=self.suppress, noise=noise
        )
        rows.seen.scatter_(1, code0[:, None], True)

        def pick(scores: torch.Tensor, group: int) -> torch.Tensor:
            return sample(scores, rows.residual, draw + group, noise=noise)

        codes, embedding = self.code_predictor(hidden, self.codec_rows(code0), frames, pick)
        return FrameStep(torch.cat((code0[:, None], codes), 1), embedding, hidden)
