"""Qwen3-Omni's talker: its text table is made of the thinker's word embedding, and it is given the
thinker's rows where the prompt has media."""

from __future__ import annotations

import torch

from stretto.layers.mlp import ResizeMLP
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.speech.talker import FrameTalker, TalkerModel


class Talker(FrameTalker):
    def __init__(self, config: OmniConfig) -> None:
        t = config.talker
        super().__init__(config.frames, TalkerModel(t.text))
        self.config = config
        self.text_projection = ResizeMLP(
            t.thinker_hidden_size, t.projection_size, t.text.hidden_size
        )
        self.hidden_projection = ResizeMLP(
            t.thinker_hidden_size, t.projection_size, t.text.hidden_size
        )

    def prepare(self, thinker_embedding: torch.Tensor) -> None:
        """Derived constants; once, after the weights are in place. The embedding is not kept."""
        self.prepare_frames()
        self.make_table(thinker_embedding, self.text_projection)

    def media_rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """Input rows from the thinker's accept-layer rows."""
        out: torch.Tensor = self.hidden_projection(hidden)
        return out
