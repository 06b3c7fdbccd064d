"""Encodes the media of the thinker's prompts, piece by piece, as their prefill comes to them.

A piece that the prefix cache has the rows of is never encoded. What was encoded is kept for a while, since a piece that
ends in the middle of a block is needed again by the prompt that goes on behind it. Features that did not come with the
request are asked for when they are needed. Owned by the thinker's node; on the loop thread."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from stretto.control.messages import Lacking, Working
from stretto.errors import Bug, StrettoError
from stretto.layers.upload import to_device
from stretto.models.parts import Parts
from stretto.models.qwen3_omni.lanes.thinker import ThinkerInput
from stretto.models.qwen3_omni.pieces import MediaPiece, missing_runs
from stretto.models.qwen3_omni.thinker import MediaRows, Thinker
from stretto.models.qwen3_omni.vision_encoder import VisionRows
from stretto.prompt.prompt import Piece
from stretto.stage.context import StageContext
from stretto.stage.request import StageRequest
from stretto.stage.stage import Stage
from stretto.types import RequestId

AHEAD = 2048
"""Rows that encoding may be ahead of the prefill: enough for the next step, and no more than others can wait for."""
KEPT_BYTES = 64 << 20
OTHERS = 15
"""While there are other requests, encoding media takes one part of the loop's time in 1 + this: on a CPU, where a part
takes as long as several steps, listeners would have to wait for it. (On a GPU a part is launched in no time.)"""

Key = tuple[bytes, bytes, bool]
Rows = tuple[torch.Tensor, torch.Tensor]
"""What an encoder made of a piece: rows, and DeepStack levels of a picture's."""


class Kept:
    """Rows of pieces by what they were made of, the least recently used dropped first."""

    def __init__(self, most_bytes: int = KEPT_BYTES) -> None:
        self.most_bytes, self.num_bytes = most_bytes, 0
        self._rows: OrderedDict[Key, Rows] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._rows

    def get(self, key: Key) -> Rows | None:
        if key in self._rows:
            self._rows.move_to_end(key)
        return self._rows.get(key)

    def put(self, key: Key, rows: Rows) -> None:
        if key not in self._rows:
            self._rows[key] = rows
            self.num_bytes += _size(rows)
        while self.num_bytes > self.most_bytes:
            self.num_bytes -= _size(self._rows.popitem(last=False)[1])


def _size(rows: Rows) -> int:
    return sum(r.nbytes for r in rows)


@dataclass(slots=True, eq=False)
class Encoding:
    """A request with media that are not encoded, or need not be."""

    request: StageRequest
    given: ThinkerInput
    root: bytes  # what was kept of one owner's is not for others
    left: list[MediaPiece]
    base: int  # rows that the prefix cache had when it came
    asked: set[bytes] = field(default_factory=set)
    parts: Parts[VisionRows] | None = None  # of the picture that is being encoded
    made: list[tuple[Key, Rows]] = field(default_factory=list)  # what was encoded
    encoded: int = 0  # pieces

    def key(self, piece: MediaPiece) -> Key:
        return self.root, piece.digest, piece.padded


class Encoders:
    def __init__(
        self, model: Thinker, stage: Stage, context: StageContext, fail: Callable[[RequestId, StrettoError], None]
    ) -> None:
        """`fail` ends a request whose media cannot be encoded, and says why."""
        self.model, self.stage, self.report, self.fail = model, stage, context.report, fail
        self.num_requests, self.clock = context.num_requests, context.clock
        self.kept = Kept()
        self.encoded = 0  # pieces
        self.asked = 0
        self.requests: dict[RequestId, Encoding] = {}
        vision, hidden = model.config.thinker.vision, model.config.thinker.text.hidden_size
        self._rests_ns = 0  # not before this is the next part encoded
        for name, read in {
            "stretto_stage_encoding": lambda: self.num_due,
            "stretto_stage_encoded_total": lambda: self.encoded,
            "stretto_stage_asked_total": lambda: self.asked,
        }.items():
            context.recorder.number(name, read, stage=stage.name)
        self._flat = torch.empty(len(vision.deepstack_layers), 0, hidden, device=model.device, dtype=model.dtype)

    def add(self, request: StageRequest, given: ThinkerInput, root: bytes, pieces: list[MediaPiece]) -> None:
        base = self.stage.scheduler.num_found(request.id)
        self.requests[request.id] = Encoding(request, given, root, pieces, base)

    def supply(self, id: RequestId, pieces: Sequence[Piece]) -> None:
        """Features that were asked for."""
        e = self.requests.get(id)
        values = {p.digest: p.values for p in pieces}
        for piece in e.left if e is not None else ():
            if piece.values is None:
                piece.values = values.get(piece.digest)

    def drop(self, id: RequestId) -> None:
        self.requests.pop(id, None)

    def proven(self, id: RequestId) -> int:
        """A request has picked a token: all that was encoded for it are numbers, so others may find it. Returns how
        many pieces that were."""
        e = self.requests.get(id)
        if e is None:
            return 0
        for key, rows in e.made:
            self.kept.put(key, rows)
        e.made.clear()
        return e.encoded

    @property
    def due_ns(self) -> int | None:
        """When the next part is to be encoded, by the loop's clock."""
        return self._rests_ns if self.due is not None else None

    def turn(self) -> RequestId | None:
        """Encode a part of one request's media, if it is time for it. Of which request it was."""
        now, due = self.clock(), self.due
        if due is None or now < self._rests_ns:
            return None
        others = self.num_requests() > self.num_due
        self._encode(due)
        # Others have the time between two parts, and more of it than the parts take.
        self._rests_ns = self.clock() + (OTHERS * (self.clock() - now) if others else 0)
        return due

    def _encode(self, id: RequestId) -> None:
        self.report(Working(id, self.stage.name), b"")
        try:
            with self.stage.runner.on_stream(), torch.inference_mode():
                self.run(id)
        except torch.AcceleratorError:
            raise  # the device is lost
        except Exception as e:  # noqa: BLE001  what features that fit nothing make of the models
            self.fail(id, e if isinstance(e, StrettoError) else Bug(f"its media cannot be encoded: {e!r}"))

    @property
    def due(self) -> RequestId | None:
        """A request of which a piece is to be encoded now, each in its turn."""
        return next((id for id, e in self.requests.items() if self._next(e) is not None), None)

    @property
    def num_due(self) -> int:
        return sum(self._next(e) is not None for e in self.requests.values())

    def _next(self, e: Encoding) -> MediaPiece | None:
        start = e.request.cursor.filled if e.request.was_admitted else e.base
        if not e.left or (start >= e.left[-1].stop and all(start >= p.stop for p in e.left)):
            return None
        piece = next(p for p in e.left if p.stop > start)
        if piece.runs[0].start > start + AHEAD:
            return None
        if piece.values is None and e.key(piece) not in self.kept:
            self._ask(e, start)
            return None
        return piece

    def _ask(self, e: Encoding, start: int) -> None:
        """For all that will be needed, not for the next piece alone."""
        absent = [p for p in e.left if p.stop > start and p.values is None and e.key(p) not in self.kept]
        digests = dict.fromkeys(p.digest for p in absent if p.digest not in e.asked)
        if digests:
            e.asked.update(digests)
            self.asked += len(digests)
            self.report(Lacking(e.request.id, self.stage.name, tuple(digests)), b"")

    def run(self, id: RequestId) -> None:
        """Encode a part of what is due of a request; then it is behind the others."""
        e = self.requests.pop(id)
        self.requests[id] = e
        piece = self._next(e)
        assert piece is not None, "nothing is due"
        kept = self.kept.get(e.key(piece))
        if kept is not None:
            self._done(e, [piece], [kept])
        elif piece.grid is None:
            self._hear(e, piece)
        else:
            self._see(e, piece, piece.grid)

    def _hear(self, e: Encoding, first: MediaPiece) -> None:
        """Windows that follow each other, in one launch."""
        tower, at = self.model.audio_tower, e.left.index(first)
        several = tower.batch if first.padded else 1
        group: list[MediaPiece] = []
        for p in e.left[at : at + several]:
            if p.grid is not None or p.values is None or not (p.padded or p is first) or e.key(p) in self.kept:
                break
            group.append(p)
        device, dtype = self.model.device, self.model.dtype
        mels = [to_device(p.values, device, torch.float32).to(dtype) for p in group if p.values is not None]
        rows = tower.encode_windows(mels, first.padded)
        self._made(e, group, [(r, self._flat) for r in rows])

    def _see(self, e: Encoding, piece: MediaPiece, grid: tuple[int, int, int]) -> None:
        """A part of a picture or a video."""
        if e.parts is None:
            assert piece.values is not None
            e.parts = self.model.visual.encoding([piece.values], [grid])
        try:
            next(e.parts)
        except StopIteration as end:
            e.parts = None
            seen: VisionRows = end.value
            self._made(e, [piece], [(seen.main, torch.stack(list(seen.deep)))])

    def _made(self, e: Encoding, pieces: Sequence[MediaPiece], made: Sequence[Rows]) -> None:
        e.encoded += len(pieces)
        self.encoded += len(pieces)
        e.made += zip(map(e.key, pieces), made, strict=True)
        self._done(e, pieces, made)

    def _done(self, e: Encoding, pieces: Sequence[MediaPiece], made: Sequence[Rows]) -> None:
        """The request's prefill may go on."""
        for piece, (rows, deep) in zip(pieces, made, strict=True):
            places = torch.from_numpy(piece.places)
            if len(rows) != len(places):
                raise ValueError(f"{len(rows)} rows for {len(places)} places")
            visual = places if piece.grid is not None else places[:0]
            e.given.media.append(MediaRows(places, rows, visual, deep))
            e.left.remove(piece)
        self.stage.scheduler.set_missing(e.request.id, missing_runs(e.left))
