"""Cores of stages without a loop: a turn of theirs, and waiting for their oldest step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stretto.stage.ar import StageCore
from stretto.stage.vocoder import VocoderCore


def poll_core(core: StageCore | VocoderCore, collect: Callable[[Any], None]) -> bool:
    """Poll and launch, as a host does. True: something came of it."""
    made = core.poll()
    launched = core.launch()
    if launched:
        made += core.poll()
    for output in made:
        collect(output)
    return bool(made) or launched


def in_flight(core: StageCore | VocoderCore) -> int:
    return core.in_flight


def wait_for_device() -> None:
    """Until every step is back."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def idle(core: StageCore | VocoderCore) -> bool:
    """Nothing is held for anybody."""
    if isinstance(core, VocoderCore) and core.num_free != core.config.slots:
        return False
    return not core.in_flight and not len(core)
