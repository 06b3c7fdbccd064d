"""Qwen3-TTS's talker: it has a word embedding of its own, which becomes its text table and is
dropped."""

from __future__ import annotations

from stretto.layers.linear import Embedding
from stretto.layers.mlp import ResizeMLP
from stretto.models.qwen3_tts.config import TtsConfig
from stretto.models.speech.talker import FrameTalker, TalkerModel


class TtsModel(TalkerModel):
    text_embedding: Embedding | None

    def __init__(self, config: TtsConfig) -> None:
        t = config.talker
        super().__init__(t.decoder)
        self.text_embedding = Embedding(t.text_vocab, t.text_hidden)


class Talker(FrameTalker):
    model: TtsModel

    def __init__(self, config: TtsConfig) -> None:
        t = config.talker
        super().__init__(config.frames, TtsModel(config))
        self.config = config
        self.text_projection = ResizeMLP(t.text_hidden, t.text_hidden, t.decoder.hidden_size)

    def prepare(self) -> None:
        """Derived constants; once, after the weights are in place."""
        self.prepare_frames()
        assert self.model.text_embedding is not None
        self.make_table(self.model.text_embedding.weight.data, self.text_projection)
        self.model.text_embedding = None
