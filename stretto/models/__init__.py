"""Families of models, and what they share. A package in here is a family if it names its
`MODEL_TYPES` (the registry finds it by them); its `__init__` then says what a checkpoint needs,
without importing torch:

- `MODEL_TYPES`: of checkpoints that its `family:open_model` opens.
- `TINY`: functions that write tiny checkpoints with random weights, by the checkpoint's name.
- `PACKABLE`: the function of a directory that names the matrices that can stay packed in memory, by
  part; empty if none can. `stretto quantize` takes the first part.
- `PACKABLE_TOO`: the parts that it takes if asked, and what their flags say."""

DEFAULT_TINY = "qwen3-omni"
"""The tiny checkpoint that is served when no model is named."""
