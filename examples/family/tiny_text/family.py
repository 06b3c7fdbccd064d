"""What the engine knows of the family: one stage, and what a request is to it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from stretto.errors import Bug, Invalid
from stretto.family import MediaTokens, ModelInfo, PipelineSpec, StageSpec
from stretto.hub import model_name
from stretto.params import RequestOptions
from stretto.types import SamplingParams, stage_seed
from tiny_text.config import TinyTextConfig

PIPELINE = PipelineSpec(
    build="tiny_text.build:BUILD",
    stages=(StageSpec("writer", "reads the question and writes the answer", decides="text"),),
    links=(),
    paths={"text": ("writer",)},
)
NO_MEDIA = MediaTokens()


class WriterParams(msgspec.Struct, frozen=True):
    """What a request tells the stage."""

    sampling: SamplingParams
    max_tokens: int
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class TinyText:
    info: ModelInfo
    vocab_size: int
    pipeline: PipelineSpec = PIPELINE
    media_tokens: MediaTokens = NO_MEDIA
    builder: str = "tiny_text.prompts:open_builder"

    def check_voice(self, voice: str) -> None:
        raise Invalid("this model does not speak", "voice")

    def stage_params(self, options: RequestOptions) -> dict[str, msgspec.Struct]:
        p = options.params
        if options.capability != "text":
            raise Bug(f"{options.capability} is not what this model does")
        if p.grammar or p.logit_bias or p.logprobs is not None or p.min_text_tokens:
            raise Invalid("this model takes no grammar, logit_bias, logprobs or min_tokens")
        seed = stage_seed(options.seed, "writer")
        sampling = SamplingParams(p.temperature, p.top_k, p.top_p, seed=seed)
        return {"writer": WriterParams(sampling, p.max_text_tokens, p.ignore_eos)}


def open_model(directory: Path) -> TinyText:
    decoder = TinyTextConfig.read(directory).decoder
    info = ModelInfo(
        name=model_name(directory),
        voices=(),
        default_voice="",
        sample_rate=24_000,
        max_positions=decoder.max_positions,
        output_modalities=("text",),
    )
    return TinyText(info, decoder.vocab_size)
