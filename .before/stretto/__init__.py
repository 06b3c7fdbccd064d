"""Stretto: a serving engine for omni-modal models, all stages streamed and overlapped."""

__version__ = "0.1.0"
