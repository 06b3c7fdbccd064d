"""Chat messages to token ids, by the checkpoint's chat template. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.errors import Invalid
from stretto.preprocess.media import Budget, MediaLimits
from stretto.preprocess.messages import Kind, Medium, Reader
from stretto.preprocess.prompt import Prompt
from stretto.preprocess.template import ChatTemplate, Tokenizer, encode_rendered

LIMITS = MediaLimits()


@dataclass(frozen=True, slots=True, eq=False)
class PromptBuilder:
    tokenizer: Tokenizer
    template: ChatTemplate

    def build(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        use_audio_in_video: bool = False,
        *,
        allow_paths: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> Prompt:
        reader = Reader(Budget(LIMITS), allow_paths, False, lambda h, w, n: (h, w), refuse)
        declared = reader.read_tools(tools)
        pieces = self.template.render(reader.read(messages), declared, variables)
        return Prompt(tuple(encode_rendered(pieces, self.tokenizer)))


def refuse(medium: Medium, kind: Kind) -> None:
    raise Invalid("this model reads text alone", "messages")


def open_builder(directory: Path) -> PromptBuilder:
    tokenizer = Tokenizer.open(directory)
    return PromptBuilder(tokenizer, ChatTemplate.open(directory, tokenizer.markers))
