"""Qwen3-Omni as the engine knows it: three stages, two links, and what a request is to each.
Imports no torch.

The thinker writes the answer's text; the talker speaks it, a frame of sixteen codes per 80 ms;
code2wav makes samples of the frames. A text that is read aloud needs no thinker."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from stretto.embedded import Declaration, read_declaration, read_description, read_example_prompts
from stretto.family import (
    AudioInputSpec,
    LinkSpec,
    MediaTokens,
    ModelInfo,
    PipelineSpec,
    StageSpec,
    Transcription,
)
from stretto.hub import model_name
from stretto.models.quantised.placing import attention_names, expert_names, weights_of
from stretto.models.qwen3_omni.config import SAMPLE_RATE_OUT, OmniConfig
from stretto.models.qwen3_omni.params import read_defaults, stage_params
from stretto.params import RequestOptions
from stretto.preprocess.grammars import GrammarCompiler
from stretto.preprocess.text_chunks import Passages

TRANSCRIPTION = Transcription(
    transcribe="Transcribe the audio into text.",
    transcribe_language="Transcribe the {language} audio into text.",
    translate="Listen to the provided speech and produce a translation in English text.",
    languages={
        "en": "English", "zh": "Chinese", "ko": "Korean", "ja": "Japanese", "de": "German",
        "ru": "Russian",
        "it": "Italian", "fr": "French", "es": "Spanish", "pt": "Portuguese", "ms": "Malay",
        "nl": "Dutch",
        "id": "Indonesian", "tr": "Turkish", "vi": "Vietnamese", "yue": "Cantonese", "ar": "Arabic",
        "ur": "Urdu",
    },
)  # fmt: skip
"""In the words that the released model's documentation uses."""


def packable(directory: Path) -> dict[str, list[str]]:
    """The matrices that can stay packed, by part."""
    config = OmniConfig.read(directory)
    decoders = {"thinker": config.thinker.text, "talker": config.talker.text}
    return {
        part: [*attention_names(f"{part}.model.", c), *expert_names(f"{part}.model.", c)]
        for part, c in decoders.items()
    }


def open_grammars(directory: Path) -> GrammarCompiler:
    config = OmniConfig.read(directory)
    return GrammarCompiler.open(directory, config.thinker.text.vocab_size, config.tokens.im_end)


PIPELINE = PipelineSpec(
    build="stretto.models.qwen3_omni.build:BUILD",
    stages=(
        StageSpec(
            "thinker",
            "reads the question and writes the answer",
            encodes_media=True,
            decides="text",
        ),
        StageSpec("talker", "turns the words into codes of speech", decides="audio", each="frame"),
        StageSpec(
            "code2wav", "vocoder: makes the sound of the codes", first="first frame", each="packet"
        ),
    ),
    links=(LinkSpec("thinker", "talker"), LinkSpec("talker", "code2wav")),
    paths={
        "text": ("thinker",),
        "speech": ("thinker", "talker", "code2wav"),
        "tts": ("talker", "code2wav"),
        "text_prefill": ("thinker",),
        "speech_prefill": ("thinker", "talker"),
    },
    grammars="stretto.models.qwen3_omni.family:open_grammars",
)

PASSAGES = Passages(max_chars=1200, min_chars=800)
"""Of a text that is read aloud: about a minute and a half of speech, far from the frame limit."""


@dataclass(frozen=True, slots=True)
class Qwen3Omni:
    config: OmniConfig
    info: ModelInfo
    media_tokens: MediaTokens
    vocab_size: int
    pipeline: PipelineSpec = PIPELINE
    builder: str = "stretto.models.qwen3_omni.prompts:open_builder"

    def check_voice(self, voice: str) -> None:
        self.config.talker.speaker_id(voice)

    def stage_params(self, options: RequestOptions) -> dict[str, msgspec.Struct]:
        return stage_params(options)


def read_passages(declared: Declaration) -> Passages:
    """As the checkpoint declares, else as the family reads."""
    if declared.sentence:
        return Passages.by_sentence(declared.sentence, declared.normalise)
    if declared.normalise is not None:
        return replace(PASSAGES, sentence=PASSAGES.max_chars, normalise=declared.normalise)
    return PASSAGES


def open_model(directory: Path) -> Qwen3Omni:
    config = OmniConfig.read(directory)
    tokens = config.tokens
    declared = read_declaration(directory)
    return Qwen3Omni(
        config,
        ModelInfo(
            name=model_name(directory),
            voices=config.talker.voices,
            voice_aliases=config.talker.voice_aliases,
            default_voice=config.talker.default_voice,
            sample_rate=SAMPLE_RATE_OUT,
            max_positions=config.thinker.text.max_positions,
            input_modalities=("text", "audio", "image", "video"),
            audio_input=AudioInputSpec(
                config.thinker.audio.num_mel_bins, config.thinker.audio.window_frames
            ),
            description=read_description(directory),
            weights=weights_of(directory),
            example_prompts=read_example_prompts(directory),
            transcription=TRANSCRIPTION if declared.transcribes else None,
            defaults=read_defaults(directory),
            passages=read_passages(declared),
        ),
        MediaTokens(frozenset({tokens.audio_pad}), frozenset({tokens.image_pad, tokens.video_pad})),
        config.thinker.text.vocab_size,
    )
