"""Qwen3-TTS as the engine knows it: text in, speech out. Imports no torch.

The talker makes a frame of sixteen codes per 80 ms, code2wav makes samples of the frames. Models
that clone voices have a third stage, which makes a voice of a clip and is not on the path of
speech."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from stretto.family import LinkSpec, MediaTokens, ModelInfo, PipelineSpec, StageSpec
from stretto.hub import model_name
from stretto.models.generation import GenerationFile
from stretto.models.quantised.placing import weights_of
from stretto.models.qwen3_tts.config import AUTO, SAMPLE_RATE, TtsConfig
from stretto.models.qwen3_tts.params import (
    default_voice,
    read_defaults,
    read_residual,
    stage_params,
)
from stretto.params import RequestOptions
from stretto.preprocess.text_chunks import Passages
from stretto.types import SamplingParams

BUILD = "stretto.models.qwen3_tts.build:BUILD"
TALKER = StageSpec("talker", "turns the text into codes of speech", decides="audio", each="frame")
CODE2WAV = StageSpec(
    "code2wav", "vocoder: makes the sound of the codes", first="first frame", each="packet"
)
LINKS = (LinkSpec("talker", "code2wav"),)
NO_MEDIA = MediaTokens()
PASSAGES = Passages(max_chars=1200, min_chars=800)
"""About a minute and a half of speech. The model was made to say so much at once, and not a
book."""
READING = ("talker", "code2wav")

SPEAKS = PipelineSpec(BUILD, (TALKER, CODE2WAV), LINKS, {"tts": READING})
# The enroller stands in the middle because the host's first stage takes prompts first, and its last
# one turns often.
CLONES = PipelineSpec(
    BUILD,
    (
        TALKER,
        StageSpec("enroller", "makes a voice of a clip", encodes_media=True, first="voice"),
        CODE2WAV,
    ),
    LINKS,
    {"tts": READING, "enrolment": ("enroller",)},
)


@dataclass(frozen=True, slots=True)
class Qwen3Tts:
    config: TtsConfig
    info: ModelInfo
    pipeline: PipelineSpec
    vocab_size: int
    residual: SamplingParams  # of codes other than a frame's first
    media_tokens: MediaTokens = NO_MEDIA
    builder: str = "stretto.models.qwen3_tts.prompts:open_builder"

    def check_voice(self, voice: str) -> None:
        self.config.speaker_id(voice)

    def stage_params(self, options: RequestOptions) -> dict[str, msgspec.Struct]:
        return stage_params(self.config, options, self.residual)


def open_model(directory: Path) -> Qwen3Tts:
    config, file = TtsConfig.read(directory), GenerationFile.open(directory)
    clones = config.kind == "base"
    info = ModelInfo(
        name=model_name(directory),
        voices=tuple(config.talker.speakers),
        default_voice=default_voice(config),
        sample_rate=SAMPLE_RATE,
        max_positions=config.talker.decoder.max_positions,
        input_modalities=("text", "audio") if clones else ("text",),
        output_modalities=("audio",),
        defaults=read_defaults(file),
        languages=(AUTO, *config.talker.offered),
        instructions=config.takes_instructions,
        cloning=clones,
        live_text=True,
        passages=PASSAGES,
        weights=weights_of(directory),
    )
    pipeline = CLONES if clones else SPEAKS
    return Qwen3Tts(config, info, pipeline, config.talker.text_vocab, read_residual(file))
