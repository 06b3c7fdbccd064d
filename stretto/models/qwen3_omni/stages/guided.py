"""Requests of the thinker whose text must follow a grammar, or is penalised by what it has said: what guides them, and
where they wait until their grammar is compiled. Used by the thinker's node, on the loop thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stretto.control.messages import Admit
from stretto.models.qwen3_omni.lanes.thinker import MAX_BIAS
from stretto.models.qwen3_omni.params import ThinkerParams
from stretto.prompt.prompt import Prompt
from stretto.stage.guide import GrammarGuide, Grammars, Guide, PenaltyGuide
from stretto.types import RequestId


@dataclass(frozen=True, slots=True, eq=False)
class Admitted:
    """A request that is not in the stage yet."""

    admit: Admit
    params: ThinkerParams
    prompt: Prompt
    positions: npt.NDArray[np.float32]
    first: float


def guide_of(p: ThinkerParams, grammar: GrammarGuide | None) -> Guide | None:
    if not p.frequency_penalty and not p.presence_penalty:
        return grammar
    return PenaltyGuide(p.frequency_penalty, p.presence_penalty, dict(p.logit_bias), MAX_BIAS, grammar)


class Compiling:
    """Requests whose grammar is not there yet. `ring` is called, on any thread, when one is."""

    def __init__(self, grammars: Grammars, ring: Callable[[], None]) -> None:
        self._grammars, self._ring = grammars, ring
        self.waiting: dict[RequestId, tuple[Admitted, Future[GrammarGuide]]] = {}

    def add(self, known: Admitted) -> None:
        self.waiting[known.admit.request] = known, self._grammars.compile(known.params.grammar, self._ring)

    def drop(self, id: RequestId) -> None:
        self.waiting.pop(id, None)

    def done(self) -> list[tuple[Admitted, Future[GrammarGuide]]]:
        """Those whose grammar is there, or is none."""
        ids = [id for id, (_, made) in self.waiting.items() if made.done()]
        return [self.waiting.pop(id) for id in ids]
