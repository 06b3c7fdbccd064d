"""Which grammars were checked, and how that ended: a schema that is used again is not checked
again. Used by the prompt pool, on the event loop."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import blake2b

EACH, SENDERS = 64, 1024  # grammars of a sender, and senders


@dataclass(slots=True)
class Verdicts:
    """By sender: whoever sends many grammars pushes out his own alone, and nobody can find out what
    others use."""

    each: int = EACH
    senders: int = SENDERS
    _known: OrderedDict[str, OrderedDict[bytes, str]] = field(
        default_factory=OrderedDict
    )  # the latest used last

    def find(self, sender: str, grammar: bytes) -> str | None:
        """What is wrong with it, empty if nothing; None: it is not known."""
        mine = self._known.get(sender)
        if mine is None or grammar not in mine:
            return None
        self._known.move_to_end(sender)
        mine.move_to_end(grammar)
        return mine[grammar]

    def keep(self, sender: str, grammar: bytes, wrong: str) -> None:
        mine = self._known.setdefault(sender, OrderedDict())
        self._known.move_to_end(sender)
        mine[grammar] = wrong
        if len(mine) > self.each:
            mine.popitem(last=False)
        if len(self._known) > self.senders:
            self._known.popitem(last=False)


def digest_of(grammar: bytes) -> bytes:
    return blake2b(grammar, digest_size=16).digest()
