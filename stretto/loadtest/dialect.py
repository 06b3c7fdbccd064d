"""The fields of a chat request that are not OpenAI's, as each kind of server spells them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from stretto.errors import Invalid

Dialect = Literal["openai", "stretto", "vllm-omni"]
DIALECTS: tuple[Dialect, ...] = ("openai", "stretto", "vllm-omni")

# The stages behind the text, as vLLM-Omni's own deploy file has them: frames of speech, then
# samples. A request that names the parameters of one stage has to name those of all.
OMNI_FRAMES = {"temperature": 0.9, "top_k": 50, "repetition_penalty": 1.05, "detokenize": False}
OMNI_SAMPLES = {
    "temperature": 0.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.1, "max_tokens": 65536,
    "detokenize": True,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long an answer is, whatever the weights: random ones stop at random."""

    max_tokens: int  # of text
    exact: bool = False  # neither more nor fewer
    frames: int | None = None  # of speech, 80 ms each; None: as many as the model makes


def speech_fields(dialect: Dialect, audio_format: str | None, voice: str | None) -> dict[str, Any]:
    """The fields for the format of the sound and the voice. vLLM-Omni sends WAV files if no format
    is named."""
    if dialect == "vllm-omni":
        fields: dict[str, Any] = {"speaker": voice} if voice else {}
        return fields | ({"audio": {"format": audio_format}} if audio_format else {})
    return {"audio": {"format": audio_format or "pcm16"} | ({"voice": voice} if voice else {})}


def length_fields(
    dialect: Dialect, lengths: Lengths, temperature: float | None
) -> Mapping[str, Any]:
    """The fields for the lengths of an answer."""
    fields: dict[str, Any] = {}
    if lengths.exact:
        fields = {"ignore_eos": True, "min_tokens": lengths.max_tokens}
    if lengths.frames is not None and dialect == "vllm-omni":
        text = {"max_tokens": lengths.max_tokens, **fields}
        if temperature is not None:
            text["temperature"] = temperature
        frames = {"ignore_eos": True, "min_tokens": lengths.frames, "max_tokens": lengths.frames}
        fields = {"sampling_params_list": [text, OMNI_FRAMES | frames, OMNI_SAMPLES]}
    elif lengths.frames is not None:
        fields |= {"min_audio_frames": lengths.frames, "max_audio_frames": lengths.frames}
    if fields and dialect == "openai":
        raise Invalid(
            "--frames and --exact-tokens need --dialect stretto or --dialect vllm-omni: other "
            "servers refuse the fields"
        )
    return fields
