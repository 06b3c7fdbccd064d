"""Returned slots without a system call: one word of shared memory for each. Used by the shm
connector.

The receiver writes into a slot's word which chunk it has released; the sender reads the words when
it needs a slot. Only a sender that is about to wait sets the wake flag, and only then does a return
cost the receiver a note.

**No wake-up is lost.** The receiver writes the word and then reads the flag; the sender sets the
flag and then reads the words. One of them must see the other's write, except during the time that a
processor holds a write back in its store buffer (far below a microsecond). So a sender reads the
words again after `RECHECK_S`, by when every write from before its flag is visible, and then waits
for the rest of its timeout. The receiver clears the flag before it sends the note, so there is one
note per flag; the sender sets it again whenever it was woken.

**Memory order.** A word is aligned and written whole, so a killed writer leaves the old value or
the new. That the reads of a chunk come before the write of its word is guaranteed on x86; elsewhere
(`ORDERED`) slots are returned by notes, which the kernel orders."""

from __future__ import annotations

import mmap
import platform

from stretto.transport.notes import Hangup, Kind, Note
from stretto.types import RequestId

ORDERED = platform.machine() in ("x86_64", "AMD64")
"""Whether this processor makes reads and writes visible in the order in which they were made."""
RECHECK_S = 0.001

_RELEASE, _REFUSE = int(Kind.RELEASE), int(Kind.REFUSE)


_NONE = memoryview(b"").cast("Q")

ChunksOut = dict[int, tuple[int, RequestId]]
"""Slot -> the sequence number and request of the chunk that the receiver has there."""


class Returns:
    """One side's view of the words: `2 * seq + 2` of the last chunk that was returned in the slot,
    and one more if it was refused; 0: none yet. The sender's wake flag is behind them."""

    __slots__ = ("_flag", "_generation", "flight", "words")

    def __init__(self, memory: mmap.mmap, slots: int, generation: int) -> None:
        self.words = memoryview(memory).cast("Q")
        self.flight: ChunksOut = {}
        self._flag = slots
        self._generation = generation

    def close(self) -> None:
        """For both sides: drop the mapping, and with it a descriptor. Nothing else may be called
        afterwards."""
        self.words = _NONE
        self.flight = {}

    def give_back(self, kind: int, slot: int, seq: int) -> bool:
        """For the receiver, from any thread. Whether the sender is to be woken."""
        words = self.words
        words[slot] = 2 * seq + 2 if kind == _RELEASE else 2 * seq + 3
        if not words[self._flag]:
            return False
        words[self._flag] = 0
        return True

    def set_wake(self, on: bool) -> None:
        """For the sender: whether the next return is to wake it."""
        self.words[self._flag] = on

    def returned(self) -> list[Note]:
        """For the sender: which chunks of its `flight` are back. `Hangup` if the receiver returned
        one that it was not sent."""
        words, notes = self.words, []
        for slot, (seq, _request) in self.flight.items():
            word = words[slot]
            sent = 2 * seq + 2
            if word >= sent:
                if word > sent + 1:
                    raise Hangup(
                        f"the peer gave back slot {slot} seq {(word >> 1) - 1}, which it does not "
                        f"have"
                    )
                notes.append((_REFUSE if word > sent else _RELEASE, slot, seq, 0, self._generation))
        return notes
