"""Where a family's weights come from, and where they go: a checkpoint's directory or nothing, and a
device. Each stage loads only its own tensors, straight to its device. Made by a host when it builds
its stages, on its main thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Literal, Self, TypeVar

import torch
from torch import nn

from stretto.layers.targets import targets
from stretto.models.checkpoint import CheckpointFiles
from stretto.models.quantised.placing import quantised_in
from stretto.models.quantised.recognise import QuantisedTensor
from stretto.models.random_weights import fill_dummy
from stretto.models.weights import build, load, prepare_device

LoadFormat = Literal["safetensors", "dummy"]
C = TypeVar("C")  # a family's config
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class WeightSource(Generic[C]):
    """A family adds a method for each of its modules."""

    config: C
    directory: Path | None  # None: random weights
    device: torch.device
    dtype: torch.dtype
    progress: bool = True
    _files: dict[str, CheckpointFiles] = field(default_factory=dict, compare=False)
    _quantised: dict[str, dict[str, QuantisedTensor]] = field(default_factory=dict, compare=False)

    @classmethod
    def of(
        cls,
        config: C,
        model: str | Path,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        load_format: LoadFormat = "safetensors",
        progress: bool = True,
    ) -> Self:
        """`dtype`: None for the device's usual one. With `load_format="dummy"` the config alone is
        enough."""
        where = torch.device(device)
        dtype = prepare_device(where, dtype)
        directory = Path(model) if load_format == "safetensors" else None
        return cls(config, directory, where, dtype, progress)

    def module(
        self, factory: Callable[[], M], prefix: str, label: str, seed: int, folder: str = ""
    ) -> M:
        """A module with its weights, which have names under `prefix` in the checkpoint."""
        model = build(factory, self.device, self.dtype)
        self.fill(model, prefix, label, seed, folder)
        return model.eval()

    def fill(self, model: nn.Module, prefix: str, label: str, seed: int, folder: str = "") -> None:
        """`label` is for the progress bar, `seed` for random weights. `folder`: below the
        checkpoint's own."""
        if self.directory is None:
            fill_dummy(model, seed, prefix)
            return
        files, quantised = self.files(folder), self.quantised(folder)
        places = targets(model, prefix)
        progress = self.progress
        load(files, places, [prefix], progress=progress, label=label, quantised=quantised)

    def quantised(self, folder: str = "") -> Mapping[str, QuantisedTensor]:
        """The quantised matrices there; what is not supported is refused."""
        assert self.directory is not None
        if folder not in self._quantised:
            self._quantised[folder] = quantised_in(self.directory / folder, self.files(folder))
        return self._quantised[folder]

    def files(self, folder: str = "") -> CheckpointFiles:
        """All headers there, read and checked once."""
        assert self.directory is not None
        if folder not in self._files:
            self._files[folder] = CheckpointFiles.open(self.directory / folder)
        return self._files[folder]
