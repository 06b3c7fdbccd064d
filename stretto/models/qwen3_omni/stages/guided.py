"""Requests of the thinker whose text must follow a grammar, or is penalised by what it has said:
what guides them, and where they wait until their grammar is compiled. Used by the thinker's stage,
on the loop thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stretto.messages.requests import Admit
from stretto.models.qwen3_omni.params import ThinkerParams
from stretto.models.qwen3_omni.thinker import MAX_BIAS
from stretto.preprocess.grammars import GrammarGuide
from stretto.preprocess.prompt import Prompt
from stretto.stage.guide import Grammars, Guide, PenaltyGuide
from stretto.types import RequestId

WORKING_NS = 1_000_000_000
"""Between two reports that requests still wait for their grammars: those of others may be compiled
first."""


@dataclass(frozen=True, slots=True, eq=False)
class PendingRequest:
    """A request that is not in the stage yet."""

    admit: Admit
    params: ThinkerParams
    prompt: Prompt
    positions: npt.NDArray[np.float32]
    first: float


def guide_of(p: ThinkerParams, grammar: GrammarGuide | None) -> Guide | None:
    if not p.frequency_penalty and not p.presence_penalty:
        return grammar
    return PenaltyGuide(
        p.frequency_penalty, p.presence_penalty, dict(p.logit_bias), MAX_BIAS, grammar
    )


class Compiling:
    """Requests whose grammar is not there yet. `wake` is called, on any thread, when one is."""

    def __init__(
        self, grammars: Grammars, wake: Callable[[], None], clock: Callable[[], int]
    ) -> None:
        """`clock`: the loop's."""
        self._grammars = grammars
        self._wake = wake
        self._clock = clock
        self.waiting: dict[RequestId, tuple[PendingRequest, Future[GrammarGuide]]] = {}
        self._reported_ns = 0  # when requests were last reported as waiting

    @property
    def due_ns(self) -> int | None:
        """When waiting requests are to be reported again, by the loop's clock."""
        return self._reported_ns + WORKING_NS if self.waiting else None

    def add(self, pending: PendingRequest) -> None:
        if not self.waiting:
            self._reported_ns = self._clock()
        made = self._grammars.compile(pending.params.grammar, self._wake, pending.admit.client)
        self.waiting[pending.admit.request] = pending, made

    def drop(self, id: RequestId) -> None:
        """Its grammar is not compiled, if its turn has not come."""
        if id in self.waiting:
            self.waiting.pop(id)[1].cancel()

    def done(self) -> list[tuple[PendingRequest, Future[GrammarGuide]]]:
        """Requests whose grammar is compiled, or was refused."""
        ids = [id for id, (_, made) in self.waiting.items() if made.done()]
        return [self.waiting.pop(id) for id in ids]

    def working(self) -> list[RequestId]:
        """Requests that still wait, if a report is due: the engine must not take them for
        stalled."""
        if not self.waiting or self._clock() < self._reported_ns + WORKING_NS:
            return []
        self._reported_ns = self._clock()
        return list(self.waiting)
