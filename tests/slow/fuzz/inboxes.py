"""Chunks of few requests in no order, some of them damaged, for a link's inboxes. Part of the
program `fuzz`.

Announcements and ends come in between. What comes out must be in order, and every chunk must be
released exactly once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from stretto.stage.links.inbox import Gap, Inboxes, Unannounced
from stretto.transport import wire
from stretto.transport.contract import Chunk, Corrupt, VersionMismatch
from stretto.types import Mark, RequestId, Span

LATEST = 6  # requests that chunks come for: early ones, open ones, and ones that are over


@dataclass(slots=True)
class Slot:
    """Held by one chunk, and released once."""

    held: list[Slot]

    def release(self) -> None:
        self.held.remove(self)


@dataclass(slots=True)
class Reader:
    """A link's inboxes among chunks in no order, and what must be true of what they give out."""

    rng: random.Random
    boxes: Inboxes = field(default_factory=lambda: Inboxes(early_chunks=16, early_bytes=4096))
    held: list[Slot] = field(default_factory=list)  # one for each chunk that was not let go of
    given: dict[RequestId, tuple[int, int]] = field(default_factory=dict)  # seq and stop
    names: int = 0

    def chunk(self) -> Chunk:
        """Often the next of a request that is open, else anything near it; sometimes damaged."""
        rng = self.rng
        request = self.request()
        seq, stop = rng.randrange(4), rng.randrange(9)
        if request in self.boxes and rng.random() < 0.7:
            box = self.boxes[request]
            seq, stop = len(box._stops), box.stop
        span = Span(stop, stop + rng.randrange(4))
        tensors = {"rows": torch.arange(len(span), dtype=torch.int32)} if rng.random() < 0.9 else {}
        mark = rng.choice((Mark.MORE, Mark.MORE, Mark.MORE, Mark.REQUEST_END))
        made = wire.chunk(request, span, mark, tensors, seq=seq)
        data = wire.encode(made, checksum=True)
        if rng.random() < 0.05:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        slot = Slot(self.held)
        chunk = wire.decode(data, slot)
        self.held.append(slot)
        return chunk

    def request(self) -> RequestId:
        """One of the latest."""
        return RequestId(f"r-{max(0, self.names - self.rng.randrange(LATEST))}")

    def act(self) -> str:
        rng, boxes, request = self.rng, self.boxes, self.request()
        what = rng.randrange(40)
        if what < 3:
            boxes.forget(RequestId(f"r-{self.names - LATEST}"))
            self.names += 1
        elif what < 9 and request not in boxes:
            boxes.announce(request)  # a stage announces each once; here also what is over
        elif what == 9:
            boxes.forget(request)
            self.given.pop(request, None)
        elif what < 16 and request in boxes:
            self.pop(request)
        else:
            return boxes.push(self.chunk()).name.lower()
        return "no chunk"

    def pop(self, request: RequestId) -> None:
        chunk = self.boxes[request].pop()
        if chunk is None:
            return
        h = chunk.header
        seq, stop = self.given.get(request, (-1, 0))
        assert (h.seq, h.start) == (seq + 1, stop), "a gap, or a repeat"
        self.given[request] = (h.seq, h.stop)
        chunk.release()

    def check(self) -> None:
        boxes = self.boxes
        assert boxes.num_early <= boxes.early_chunks
        assert len(self.held) == boxes.num_early + sum(map(len, boxes._open.values())), (
            "a chunk that nobody has, or a slot too many"
        )


def fuzz_inboxes(inputs: int, seed: int, step: Callable[[], None]) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    reader = Reader(random.Random(seed))
    while outcomes.total() < inputs:
        try:
            what = reader.act()
        except (Corrupt, VersionMismatch):
            what = "refused"
        except (Gap, Unannounced) as error:
            what = type(error).__name__.lower()
            reader.boxes.forget(
                error.request or RequestId("")
            )  # as a stage does with a request that fails
            reader.given.pop(error.request or RequestId(""), None)
        reader.check()
        if what != "no chunk":
            outcomes[f"inbox: {what}"] += 1
            step()
    for request in [*reader.boxes._open, *reader.boxes._early]:
        reader.boxes.forget(request)
    assert not reader.held, "chunks that were never let go of"
    return outcomes
