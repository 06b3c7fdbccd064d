"""How vocoder streams start: with nothing, or behind a primer, a cloned voice's clip. Used by
`core.py`, on the loop thread, on the stage's CUDA stream."""

from __future__ import annotations

from typing import Any

from stretto.stage.vocoder.model import SlotState
from stretto.stage.vocoder.streams import Primer, Stream


class Primers:
    """Begins streams in the vocoder's `state`, and stores the states behind primers."""

    def __init__(self, state: SlotState, max_states: int) -> None:
        self._state = state
        self.max_states = max_states
        # by the primer's key, the least lately used first
        self.states: dict[bytes, Any] = {}

    def __len__(self) -> int:
        return len(self.states)

    def __contains__(self, primer: Primer) -> bool:
        return primer.key in self.states

    def begin(self, stream: Stream, slot: int) -> None:
        """A stream takes a slot: behind its primer if the state there is stored, else the primer is
        decoded first."""
        primer = stream.primer
        if primer is None or (stream.pending and stream.pending[0] is primer.codes):
            self._state.reset(slot)
        elif (saved := self.states.pop(primer.key, None)) is not None:
            self.states[primer.key] = saved
            self._state.load(slot, saved, stream.primed)
            stream.launched = stream.done = stream.primed
        else:
            # it was there when the stream was announced
            self._state.reset(slot)
            stream.pending.appendleft(primer.codes)
            stream.num_pending += stream.primed

    def keep(self, stream: Stream) -> None:
        """The step that was just launched took the last of a primer."""
        assert stream.primer is not None
        assert stream.slot is not None
        self.states[stream.primer.key] = self._state.save(stream.slot)
        while len(self.states) > self.max_states:
            del self.states[next(iter(self.states))]
