"""Qwen3-Omni: text, sound, pictures and video in, text and speech out."""

MODEL_TYPES = ("qwen3_omni_moe",)
TINY = {"qwen3-omni": "stretto.models.qwen3_omni.tiny:write_tiny"}
