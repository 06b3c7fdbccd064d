"""Qwen3-TTS: text in, speech out."""

MODEL_TYPES = ("qwen3_tts",)
TINY = {
    "qwen3-tts": "stretto.models.qwen3_tts.tiny:write_tiny",
    "qwen3-tts-design": "stretto.models.qwen3_tts.tiny:write_design",
    "qwen3-tts-base": "stretto.models.qwen3_tts.tiny:write_base",
    "qwen3-tts-0.6b": "stretto.models.qwen3_tts.tiny:write_small",
    "qwen3-tts-0.6b-base": "stretto.models.qwen3_tts.tiny:write_small_base",
}
