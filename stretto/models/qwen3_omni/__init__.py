"""Qwen3-Omni: text, sound, pictures and video in, text and speech out."""

MODEL_TYPES = ("qwen3_omni_moe",)
TINY = {"qwen3-omni": "stretto.testing.qwen3_omni:write_tiny"}
