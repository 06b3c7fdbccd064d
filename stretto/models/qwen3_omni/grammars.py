"""What compiles grammars for the thinker's text: in its host, and where they are checked first.
Imports no torch."""

from __future__ import annotations

from pathlib import Path

from stretto.models.qwen3_omni.config import OmniConfig
from stretto.preprocess.grammars import GrammarCompiler


def open_grammars(directory: Path) -> GrammarCompiler:
    config = OmniConfig.read(directory)
    return GrammarCompiler.open(directory, config.thinker.text.vocab_size, config.tokens.im_end)
