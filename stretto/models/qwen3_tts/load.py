"""From a checkpoint (or from nothing) to stages that are ready to run. Each stage loads only its
own tensors, straight to its device; the codec's lie in a folder of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import torch
from torch import nn

from stretto.layers.targets import targets
from stretto.models.qwen3_tts.config import CODEC, TtsConfig
from stretto.models.qwen3_tts.enroller import Enroller
from stretto.models.qwen3_tts.talker import Talker
from stretto.models.qwen3_tts.vocoder import CodecDecoder
from stretto.models.random_weights import fill_dummy
from stretto.models.weights import CheckpointFiles, build, load, prepare_device

LoadFormat = Literal["safetensors", "dummy"]
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class Source:
    """Where weights come from and where they go."""

    config: TtsConfig
    directory: Path | None  # None: random weights
    device: torch.device
    dtype: torch.dtype
    progress: bool = True

    @classmethod
    def open(
        cls,
        model: str | Path,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        load_format: LoadFormat = "safetensors",
        progress: bool = True,
    ) -> Source:
        """A checkpoint directory; with `load_format="dummy"` its config files alone are enough."""
        where = torch.device(device)
        dtype = prepare_device(where, dtype)
        directory = Path(model) if load_format == "safetensors" else None
        return cls(TtsConfig.read(model), directory, where, dtype, progress)

    def talker(self) -> Talker:
        model = self._fill(lambda: Talker(self.config), "talker.", "talker", 1)
        with torch.inference_mode():
            model.prepare()
        return model

    def vocoder(self) -> CodecDecoder:
        model = self._fill(
            lambda: CodecDecoder(self.config.vocoder), "decoder.", "code2wav", 2, CODEC
        )
        model.prepare()
        return model

    def enroller(self) -> Enroller:
        model = build(lambda: Enroller(self.config), self.device, torch.float32)
        self._load(model.speaker_encoder, "speaker_encoder.", "enroller", 3, "")
        self._load(model.encoder, "encoder.", "enroller", 4, CODEC)
        return model.eval()

    def _fill(
        self, factory: Callable[[], M], prefix: str, label: str, seed: int, folder: str = ""
    ) -> M:
        model = build(factory, self.device, self.dtype)
        self._load(model, prefix, label, seed, folder)
        return model.eval()

    def _load(self, model: nn.Module, prefix: str, label: str, seed: int, folder: str) -> None:
        if self.directory is None:
            fill_dummy(model, seed, prefix)
            return
        files = CheckpointFiles.open(self.directory / folder)
        load(files, targets(model, prefix), [prefix], progress=self.progress, label=label)
