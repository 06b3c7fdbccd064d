"""Qwen3-Omni: text, sound, pictures and video in, text and speech out."""

MODEL_TYPES = ("qwen3_omni_moe",)
TINY = {"qwen3-omni": "stretto.testing.qwen3_omni:write_tiny"}
PACKABLE = "stretto.models.qwen3_omni.family:packable"
PACKABLE_TOO = {"talker": "the talker's attention and routed experts too"}
