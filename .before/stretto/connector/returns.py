"""Slots on their way back, without a system call: one word of shared memory for each. Used by the shm connector.

The receiver writes which chunk it is done with into its slot's word; the sender looks at them when it needs a slot.
Only a sender that is about to wait asks to be rung, and only then does a return cost the receiver a note.

**Nothing is lost between the two.** The receiver writes the word and then looks whether it is asked to ring; the sender
asks and then looks at the words. One of them must see the other, but for the moment that a processor may keep a write
to itself (its store buffer, far below a microsecond). So a sender looks once more after `RELOOK_S`, when whatever was
under way at its question has become visible, and then waits in peace. A ring takes the question back before it is sent,
so that there is one for each question; the sender asks again whenever it was woken.

**Order.** A word is aligned and written whole, so a killed writer leaves the old one or the new. That the reads of a
chunk come before its word is what x86 promises; elsewhere (`ORDERED`) returns go as notes, which the kernel orders."""

from __future__ import annotations

import mmap
import platform

from stretto.connector.notes import Hangup, Kind, Note
from stretto.types import RequestId

ORDERED = platform.machine() in ("x86_64", "AMD64")
"""Whether this processor makes reads and writes visible in the order in which they were made."""
RELOOK_S = 0.001

_RELEASE, _REFUSE = int(Kind.RELEASE), int(Kind.REFUSE)


_NONE = memoryview(b"").cast("Q")

Flight = dict[int, tuple[int, RequestId]]
"""Slot -> the sequence number and request of the chunk that the receiver has there."""


class Returns:
    """One side's view of the words: `2 * seq + 2` of the last chunk that came back in the slot, and one more if it was
    refused; 0: none did yet. Behind them the sender's question."""

    __slots__ = ("_generation", "_question", "flight", "words")

    def __init__(self, memory: mmap.mmap, slots: int, generation: int) -> None:
        self.words = memoryview(memory).cast("Q")
        self.flight: Flight = {}
        self._question = slots
        self._generation = generation

    def let_go(self) -> None:
        """Both sides': of the memory, and with it of a descriptor. Nothing else may be called afterwards."""
        self.words = _NONE
        self.flight = {}

    def give_back(self, kind: int, slot: int, seq: int) -> bool:
        """The receiver's, for any thread. Whether the sender wants to be rung now."""
        words = self.words
        words[slot] = 2 * seq + 2 if kind == _RELEASE else 2 * seq + 3
        if not words[self._question]:
            return False
        words[self._question] = 0
        return True

    def ask(self, ring: bool) -> None:
        """The sender's: with the next return, ring (or do not)."""
        self.words[self._question] = ring

    def news(self) -> list[Note]:
        """The sender's: which of its `flight` is back. `Hangup` if the receiver claims more than it was sent."""
        words, notes = self.words, []
        for slot, (seq, _request) in self.flight.items():
            word = words[slot]
            sent = 2 * seq + 2
            if word >= sent:
                if word > sent + 1:
                    raise Hangup(f"the peer gave back slot {slot} seq {(word >> 1) - 1}, which it does not have")
                notes.append((_REFUSE if word > sent else _RELEASE, slot, seq, 0, self._generation))
        return notes
