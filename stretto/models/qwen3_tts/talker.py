"""Qwen3-TTS's talker and its adapter. The talker has a word embedding of its own, which becomes its
text table and is dropped; its prompts are rows of text tokens and codec parts (`rows.py`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from stretto.layers.linear import Embedding
from stretto.layers.mlp import ResizeMLP
from stretto.layers.upload import to_device
from stretto.models.qwen3_tts.config import TtsConfig
from stretto.models.qwen3_tts.rows import FRAME, NONE, VECTOR, SpeechPrompt
from stretto.models.speech.adapter import FrameInput, SpeechAdapter
from stretto.models.speech.talker import FrameTalker, TalkerModel


class TtsModel(TalkerModel):
    def __init__(self, config: TtsConfig) -> None:
        t = config.talker
        super().__init__(t.decoder)
        self.text_embedding: Embedding | None = Embedding(t.text_vocab, t.text_hidden)

    def take_text_embedding(self) -> torch.Tensor:
        """The weights of the text embedding, once: they are folded into a table and not needed
        any more."""
        assert self.text_embedding is not None
        weight = self.text_embedding.weight.data
        self.text_embedding = None
        return weight


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
        self.make_table(self.model.take_text_embedding(), self.text_projection)


@dataclass(slots=True, eq=False)
class TalkerInput(FrameInput[SpeechPrompt]):
    closed: bool = False  # the prompt's last row is known
    num_text: int = 0  # tokens of the request's own text


class TalkerAdapter(SpeechAdapter[Talker, TalkerInput]):
    def before_text(self, state: TalkerInput) -> torch.Tensor:
        ref = state.prompt.reference
        return (
            self.frame_rows(ref.frames[-1:])[0]
            if ref is not None and ref.in_context
            else self.begin
        )

    def prompt_input(
        self, state: TalkerInput, start: int, stop: int
    ) -> tuple[torch.Tensor, npt.NDArray[np.float32]]:
        p, model = state.prompt, self.model
        texts, codecs = np.array([p.row(i) for i in range(start, stop)], dtype=np.int64).T
        x = model.text_rows(to_device(texts, model.device, torch.int64))
        plain = np.flatnonzero((codecs != NONE) & (codecs < VECTOR))
        if len(plain):
            x.index_add_(0, self._at(plain), model.codec_rows(self._at(codecs[plain])))
        if p.reference is not None:
            voice = np.flatnonzero(codecs == VECTOR)
            if len(voice):
                vector = to_device(p.reference.vector[None], model.device, model.dtype)
                x.index_add_(0, self._at(voice), vector)
            sound = np.flatnonzero(codecs >= FRAME)
            if len(sound):
                x.index_add_(
                    0, self._at(sound), self.frame_rows(p.reference.frames[codecs[sound] - FRAME])
                )
        positions = np.arange(start, stop, dtype=np.float32)
        return x, np.broadcast_to(positions, (3, len(positions)))

    def _at(self, places: npt.NDArray[np.int64]) -> torch.Tensor:
        return to_device(places, self.model.device, torch.int64)
