"""Code2wav: the shared vocoder behind one table of all codebooks, whose rows are averaged."""

from __future__ import annotations

import torch

from stretto.layers.linear import Embedding
from stretto.layers.streaming import Push
from stretto.models.speech.config import VocoderConfig
from stretto.models.speech.vocoder import Moment, Vocoder, VocoderState


class Code2Wav(Vocoder):
    def __init__(self, config: VocoderConfig) -> None:
        super().__init__(config)
        c = config
        self.code_embedding = Embedding(c.codebook_size * c.num_quantizers, c.hidden_size)

    def _transform(self, state: VocoderState, codes: torch.Tensor, lengths: torch.Tensor, push: Push) -> torch.Tensor:
        slots, _, frames = codes.shape
        inner = self.pre_transformer
        if self.fits(state, frames):
            from stretto.kernels.fast import wave

            table = self.code_embedding.weight
            x, normed, turn = wave.embed(codes, table, state.frames, self.inv_freq, inner.first_norm())
            moment = Moment(state.frames, lengths, turn, self.config.window)
            return inner.fused(x, normed, state.window, moment).view(slots, frames, -1)
        x = self.code_embedding(self.table_rows(codes)).mean(1)
        out: torch.Tensor = inner(x, state.window, self.timing(state, lengths, frames, x.dtype))
        return out
