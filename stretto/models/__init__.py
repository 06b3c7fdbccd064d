"""Families of models, and what they share. A package in here is a family if it names its
`MODEL_TYPES` (the registry finds it by them); its `__init__` then says what a checkpoint needs,
without importing torch:

- `MODEL_TYPES`: of checkpoints that its `family:open_model` opens.
- `TINY`: functions that write tiny checkpoints with random weights, by the checkpoint's name.
- `PACKABLE`, where weights can stay packed in memory: the function of a directory that names the
  matrices of each part. `stretto quantize` takes the first part, and others (`PACKABLE_TOO`, with
  what their flag says) if asked."""

DEFAULT_TINY = "qwen3-omni"
"""The tiny checkpoint that is served when no model is named."""
