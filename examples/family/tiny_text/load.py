"""From a checkpoint, or from nothing, to a model that is ready to run."""

from __future__ import annotations

from stretto.models.source import WeightSource
from tiny_text.config import TinyTextConfig
from tiny_text.model import TinyTextModel


class Source(WeightSource[TinyTextConfig]):
    def model(self) -> TinyTextModel:
        model = self.module(lambda: TinyTextModel(self.config), "", "model", seed=0)
        model.prepare()
        return model
