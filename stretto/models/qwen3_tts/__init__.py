"""Qwen3-TTS: text in, speech out."""

MODEL_TYPES = ("qwen3_tts",)
TINY = {
    "qwen3-tts": "stretto.testing.qwen3_tts:write_tiny",
    "qwen3-tts-design": "stretto.testing.qwen3_tts:write_design",
    "qwen3-tts-base": "stretto.testing.qwen3_tts:write_base",
    "qwen3-tts-0.6b": "stretto.testing.qwen3_tts:write_small",
    "qwen3-tts-0.6b-base": "stretto.testing.qwen3_tts:write_small_base",
}
PACKABLE = ""
PACKABLE_TOO: dict[str, str] = {}
