"""Which kernels a server launches, found by running its steps where nothing is computed.

The steps that a host captures run at full width with two layers, on tensors without memory, and
each launch is recorded instead of made: what differs in launch parameters, types, sizes that Triton
specialises by or alignment is a variant. Used by `cards`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from stretto.kernels import triton as kernels
from stretto.kernels.formats import WeightFormat
from stretto.kernels.triton import packed_prompts
from stretto.models import source as weights
from stretto.models.compile_ahead import ALIKE, StageModel, run_tasks, tasks_of
from stretto.models.qwen3_omni import build as omni
from stretto.models.qwen3_omni.audio_graphs import WindowGraphs
from stretto.models.qwen3_omni.config import OmniConfig, parse
from stretto.models.qwen3_omni.load import Source
from stretto.models.qwen3_omni.talker import TalkerAdapter
from stretto.models.qwen3_omni.thinker import ThinkerAdapter
from stretto.models.qwen3_omni.vision_graphs import FrameGraphs
from stretto.models.qwen3_tts import build as tts
from stretto.models.qwen3_tts import load as tts_load
from stretto.models.qwen3_tts import talker as tts_talker
from stretto.models.qwen3_tts.config import parse as parse_tts
from stretto.models.speech.vocoder import Vocoder
from stretto.stage.runner import prefill_graphs
from stretto.stage.runner.graphs import sizes_for
from stretto.stage.vocoder.config import CodecConfig
from stretto.testing import qwen3_tts
from stretto.testing.qwen3_omni import released_config

ROWS, CONTEXT, BLOCKS, BLOCK = 128, 4096, 16, 16
META = torch.device("meta")
INT4 = WeightFormat("int4", 32, scale_dtype="bfloat16")
FORMATS: dict[str, WeightFormat | None] = {
    "bf16": None,
    "int4": INT4,
    "int4 zero points": replace(INT4, symmetric=False),
    "int8": replace(INT4, kind="int8"),
    "int4 g128": WeightFormat("int4", 128, scale_dtype="float16"),
    "fp8 blocks": WeightFormat("float8", 128, 128),
    "fp8 rows": WeightFormat("float8", 0, scale_dtype="bfloat16"),
}
"""As checkpoints keep matrices: compressed-tensors, GPTQ, DeepSeek's blocks, rows."""


class Place:
    """A tensor as far as a compiler sees it: its type, and how its address is aligned."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        self._at = tensor.storage_offset() * tensor.element_size()

    def data_ptr(self) -> int:
        return self._at

    @property
    def key(self) -> tuple[str, bool]:
        return str(self.dtype), self._at % 16 == 0


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    kernel: JITFunction[Any]
    args: tuple[Any, ...]
    options: dict[str, Any]


@dataclass(slots=True)
class Recorder:
    """Takes the place of launching."""

    variants: dict[Any, Variant] = field(default_factory=dict)

    def run(self, kernel: JITFunction[Any], *args: Any, **options: Any) -> None:
        options = {k: placed(v) for k, v in options.items() if k not in ("grid", "warmup")}
        places = tuple(map(placed, args))
        constants = tuple((k, v.key if isinstance(v, Place) else v) for k, v in options.items())
        key = kernel, tuple(map(key_of, places)), constants
        self.variants.setdefault(key, Variant(kernel, places, options))


def placed(value: Any) -> Any:
    return Place(value) if isinstance(value, torch.Tensor) else value


def key_of(value: Any) -> Any:
    """Of an argument: those that are alike to the compiler have the same."""
    if isinstance(value, Place):
        return value.key
    return (value == 1, value % ALIKE == 0) if type(value) is int else type(value)


@contextmanager
def recording() -> Iterator[Recorder]:
    """Launches are recorded, and random weights are not made."""
    recorder = Recorder()
    launch, fill = JITFunction.run, weights.fill_dummy
    JITFunction.run = lambda kernel, *a, **o: recorder.run(kernel, *a, **o)  # type: ignore[method-assign,assignment]
    weights.fill_dummy = lambda model, seed, prefix: None  # type: ignore[assignment]
    try:
        with torch.inference_mode():
            yield recorder
    finally:
        JITFunction.run, weights.fill_dummy = launch, fill  # type: ignore[method-assign]


def record(stage: str) -> list[Variant]:
    """The launches of one of `STAGES`."""
    with recording() as recorder:
        STAGES[stage]()
    return list(recorder.variants.values())


def omni_config(form: WeightFormat | None, *, talker: bool, float8: bool = False) -> OmniConfig:
    config = omni.small(parse(released_config()))
    if float8:
        return config.with_float8_experts()
    if form is None:
        return config
    stages = ("thinker", "talker") if talker else ("thinker",)
    parts = ("attention", "experts")
    return config.with_formats({f"{s}.{part}": form for s in stages for part in parts})


def omni_source(config: OmniConfig) -> Source:
    return Source(config, None, META, torch.bfloat16, progress=False)


def thinker(form: WeightFormat | None, float8: bool = False) -> None:
    model = omni_source(omni_config(form, talker=False, float8=float8)).thinker()
    adapter = ThinkerAdapter(model, model.cache(BLOCKS, BLOCK), ROWS, CONTEXT)
    steps("thinker", StageModel(adapter, model.model, adapter.prompts))


def narrow_thinker(form: WeightFormat) -> None:
    """With prompts' rows as float8, on cards that multiply it."""
    if kernels.limits(META).capability < kernels.NARROW:
        return
    wanted = packed_prompts.narrow_products
    packed_prompts.narrow_products = lambda device: True  # type: ignore[assignment]
    try:
        thinker(form)
    finally:
        packed_prompts.narrow_products = wanted


def talker(form: WeightFormat | None) -> None:
    config = omni_config(form, talker=True)
    width = config.thinker.text.hidden_size
    model = omni_source(config).talker(torch.zeros(1, width, device=META, dtype=torch.bfloat16))
    adapter = TalkerAdapter(model, model.cache(BLOCKS, BLOCK), ROWS, CONTEXT)
    steps("talker", StageModel(adapter, model.model, adapter.prompts))


def tts_source(size: str) -> tts_load.Source:
    raw = qwen3_tts.released_config(size=size)
    config = tts.small(parse_tts(raw, qwen3_tts.released_codec()))
    return tts_load.Source(config, None, META, torch.bfloat16, progress=False)


def tts_stage(size: str) -> None:
    model = tts_source(size).talker()
    adapter = tts_talker.TalkerAdapter(model, model.cache(BLOCKS, BLOCK), ROWS, CONTEXT)
    steps("talker", StageModel(adapter, model.model, adapter.prompts))


def steps(name: str, stage: StageModel) -> None:
    """All that a host captures of a stage with a KV pool."""
    run_tasks(stage, tasks_of(name, sizes_for(ROWS), prefill_graphs.SIZES))


def vocoder(model: Vocoder) -> None:
    """Steps of all captured shapes."""
    config = CodecConfig().captured()
    state = model.state(config.slots, max(config.frame_sizes))
    groups = model.config.num_quantizers
    for streams, frames in config.shapes():
        numbers = torch.zeros(streams * (groups * frames + 2), dtype=torch.int64, device=META)
        codes = numbers[: streams * groups * frames].view(streams, groups, frames)
        counts, slots = numbers[streams * groups * frames :].view(2, streams)
        model.step(state, codes, counts, slots)


def encoders() -> None:
    """Of sounds, which have no kernels of their own, and of pictures."""
    model = omni_source(omni_config(None, talker=False)).thinker()
    windows, frames = WindowGraphs(model.audio_tower), FrameGraphs(model.visual)
    for size in windows.sizes:
        windows.forward(size)
    for size in frames.sizes:
        frames.forward(size)


def stages() -> dict[str, Callable[[], None]]:
    """What a server runs, by name: stages, and how their weights are stored where not wide."""
    found: dict[str, Callable[[], None]] = {}
    for name, form in FORMATS.items():
        shown = "" if form is None else f" {name}"
        found[f"thinker{shown}"] = lambda form=form: thinker(form)  # type: ignore[misc]
        found[f"talker{shown}"] = lambda form=form: talker(form)  # type: ignore[misc]
    blocks = FORMATS["fp8 blocks"]
    assert blocks is not None
    found["thinker fp8 products"] = lambda: narrow_thinker(blocks)
    found["thinker float8 experts"] = lambda: thinker(None, float8=True)
    found["code2wav"] = lambda: vocoder(omni_source(omni_config(None, talker=False)).code2wav())
    found["encoders"] = encoders
    for size in qwen3_tts.SIZES:
        found[f"tts talker {size}"] = lambda size=size: tts_stage(size)  # type: ignore[misc]
    found["tts codec"] = lambda: vocoder(tts_source("1b7").vocoder())
    return found


STAGES = stages()
