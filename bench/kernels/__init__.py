"""Kernels and parts of models by themselves, on a GPU: launch parameters, prompts, pictures, the
vocoder."""
