"""An untrained nano checkpoint, made by the recipe's own steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from recipes.nano import codec, export, talker, thinker, tokens

RECOGNISER = (
    Path(__file__).parents[2] / ".venv" / "recogniser"
)  # where `scripts/recogniser.py` puts it


@dataclass(frozen=True)
class Made:
    work: Path
    checkpoint: Path
    text: tokens.Text


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    work = tmp_path_factory.mktemp("nano")
    tokens.train(work, pairs=1500, sentences=3000)
    text = tokens.Text.open(work)
    torch.manual_seed(0)
    thinks, talks, decodes = (
        thinker.Thinker(text.config.thinker.text),
        talker.Talker(text.config),
        codec.Codec(),
    )
    for module in (thinks, talks, decodes.decoder):
        for p in module.parameters():  # larger than where training starts, so that a mistake shows
            p.data.add_(torch.randn_like(p) * (0.04 if p.ndim > 1 else 0.1))
    # An untrained thinker says anything; one that never stops would say too much.
    for file, module in (
        (thinker.FILE, thinks),
        (talker.FILE, talks),
        (codec.DECODER, decodes.decoder),
    ):
        save_file(
            {k: v.to(torch.bfloat16).contiguous() for k, v in module.state_dict().items()},
            work / file,
        )
    export.write(work, work / "checkpoint")
    return Made(work, work / "checkpoint", text)
