"""How Qwen3-Omni is asked to write down what it hears. Imports no torch."""

from __future__ import annotations

from stretto.family import Transcription

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
