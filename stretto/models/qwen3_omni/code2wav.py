"""Code2wav: the shared vocoder behind one table of all codebooks, whose rows are averaged."""

from __future__ import annotations

import torch

from stretto.layers.linear import Embedding
from stretto.layers.streaming import Push
from stretto.models.speech.config import VocoderConfig
from stretto.models.speech.vocoder import Moment, Vocoder
from stretto.models.speech.vocoder_state import Part


class Code2Wav(Vocoder):
    def __init__(self, config: VocoderConfig) -> None:
        super().__init__(config)
        c = config
        self.code_embedding = Embedding(c.codebook_size * c.num_quantizers, c.hidden_size)

    def _transform(
        self, part: Part, codes: torch.Tensor, lengths: torch.Tensor, push: Push
    ) -> torch.Tensor:
        slots, _, frames = codes.shape
        inner = self.pre_transformer
        if self.fits(part, frames):
            from stretto.kernels.triton import wave

            table = self.code_embedding.weight
            x, normed, turn = wave.embed(
                codes, table, part.frames, self.inv_freq, inner.first_norm()
            )
            moment = Moment(part.slots, part.frames, lengths, turn, self.config.window)
            return inner.fused(x, normed, part.window, moment).view(slots, frames, -1)
        x = self.code_embedding(self.table_rows(codes)).mean(1)
        out: torch.Tensor = inner(x, part.window, self.timing(part, lengths, frames, x.dtype))
        return out
