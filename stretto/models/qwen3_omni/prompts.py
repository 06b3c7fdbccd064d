"""Turns chat messages into a `Prompt`: template, tokens, media features, and a pad for every row of
the encoders.

The front end keeps one `PromptBuilder` per model and calls it from its worker threads: it holds no
state of a request. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.errors import CheckpointError, Invalid, TooLong
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.media import PromptMedia
from stretto.models.qwen3_omni.patches import PatchRule, fit_video
from stretto.preprocess.media import Budget, MediaLimits
from stretto.preprocess.messages import Reader
from stretto.preprocess.prompt import Prompt
from stretto.preprocess.template import ChatTemplate, Tokenizer, encode_rendered

DEFAULT_LIMITS = MediaLimits()


@dataclass(frozen=True, slots=True, eq=False)
class PromptBuilder:
    config: OmniConfig
    tokenizer: Tokenizer
    template: ChatTemplate
    rule: PatchRule
    limits: MediaLimits
    audio_end: int

    @classmethod
    def open(
        cls, directory: str | Path, config: OmniConfig, limits: MediaLimits = DEFAULT_LIMITS
    ) -> PromptBuilder:
        """Reads tokenizer, chat template and image sizes of a checkpoint, and checks that they fit
        its config."""
        t = config.tokens
        markers = [
            t.im_start,
            t.im_end,
            t.audio_start,
            t.vision_start,
            *t.media_pads,
            t.tts_pad,
            t.tts_bos,
            t.tts_eos,
        ]
        tokenizer = Tokenizer.open(directory, markers)
        for token in markers:
            if token not in tokenizer.added:
                raise CheckpointError(
                    f"{directory}: config.json names token {token}, which the tokenizer lacks"
                )
        builder = cls(
            config=config,
            tokenizer=tokenizer,
            template=ChatTemplate.open(directory, tokenizer.markers),
            rule=PatchRule.read(
                directory, config.thinker.vision, config.thinker.text.max_positions
            ),
            limits=limits,
            audio_end=tokenizer.marker("<|audio_end|>"),
        )
        builder._check_template(directory)
        return builder

    def build(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        use_audio_in_video: bool = False,
        *,
        allow_paths: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """The prompt for messages in OpenAI's chat format, ending where the assistant's answer
        begins.

        `use_audio_in_video`: videos are heard as well as seen. `allow_paths`: messages may name
        local files; only for callers who could read them anyway. `variables` of the chat
        template."""
        media = PromptMedia(self.config, self.rule, self.audio_end, self.check_length)
        reader = Reader(
            budget=Budget(self.limits),
            allow_paths=allow_paths,
            sound_in_video=use_audio_in_video,
            fit=lambda height, width, frames: fit_video(height, width, frames, self.rule),
            found=media.add,
            expect_picture=media.expect_picture,
        )
        declared = reader.read_tools(tools)
        turns = reader.read(messages)
        ids = encode_rendered(self.template.render(turns, declared, variables), self.tokenizer)
        if variables and ids[-3:] != self._opening:
            raise Invalid(
                "chat_template_kwargs: the answer must begin as the model's speech expects it",
                "messages",
            )
        expanded = media.expand(ids)
        self.check_length(len(expanded))
        return Prompt(
            ids=tuple(expanded),
            audios=tuple(media.audios),
            images=tuple(media.images),
            videos=tuple(media.videos),
            audio_in_video=use_audio_in_video and bool(media.videos),
        )

    def check_length(self, num_tokens: int, *, so_far: bool = False) -> None:
        """Refuses a prompt that leaves no room for an answer."""
        most = self.config.thinker.text.max_positions
        if num_tokens >= most:
            count = f"at least {num_tokens:,}" if so_far else f"{num_tokens:,}"
            raise TooLong(
                f"the prompt has {count} tokens; it must leave room for an answer in the model's "
                f"{most:,}",
                "messages",
            )

    @property
    def _opening(self) -> list[int]:
        return [
            self.config.tokens.im_start,
            self.config.tokens.assistant,
            *self.tokenizer.encode("\n"),
        ]

    def _check_template(self, directory: str | Path) -> None:
        """The talker counts on an answer starting with exactly these three tokens."""
        ids = encode_rendered(self.template.try_out(directory), self.tokenizer)
        start = self._opening
        if ids[-len(start) :] != start or len(start) != 3:
            raise CheckpointError(
                f"{directory}: the chat template does not end in <|im_start|>assistant and a "
                f"newline"
            )


def open_builder(directory: Path) -> PromptBuilder:
    return PromptBuilder.open(directory, OmniConfig.read(directory))
