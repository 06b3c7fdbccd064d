"""Encodes the media of the thinker's prompts, piece by piece, as their prefill comes to them.

A piece that the prefix cache has the rows of is never encoded. What was encoded is kept for a
while, since a piece that ends in the middle of a block is needed again by the prompt that goes on
behind it. Features that did not come with the request are asked for when they are needed. Owned by
the thinker's stage; on the loop thread."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import torch

from stretto.errors import Bug, StrettoError
from stretto.layers.upload import to_device
from stretto.messages.requests import MediaRequest, Working
from stretto.models.parts import Parts
from stretto.models.qwen3_omni.audio_graphs import WindowGraphs
from stretto.models.qwen3_omni.pieces import MediaPiece, missing_runs
from stretto.models.qwen3_omni.thinker import MediaRows, Thinker, ThinkerInput
from stretto.models.qwen3_omni.vision_encoder import VisionRows
from stretto.models.qwen3_omni.vision_graphs import FrameGraphs
from stretto.preprocess.prompt import Piece
from stretto.stage.ar import StageCore
from stretto.stage.host.context import StageContext
from stretto.stage.request import StageRequest
from stretto.types import RequestId

AHEAD = 2048
"""Rows that encoding may be ahead of the prefill: enough for the next step, and no more than others
can wait for."""
CACHE_BYTES = 64 << 20
OTHERS = 15
"""While there are other requests, encoding media on a CPU takes one part of the loop's time in 1 +
this: a part takes as long as several steps there, for which listeners would have to wait. A GPU
does a part and a step in turns: a rest would only keep those waiting whose sound is to be
encoded."""

Key = tuple[bytes, bytes, bool]
Rows = tuple[torch.Tensor, torch.Tensor]
"""What an encoder made of a piece: rows, and DeepStack levels of a picture's."""


class EncoderCache:
    """Rows of pieces by what they were made of, the least recently used dropped first."""

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
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
        while self.num_bytes > self.max_bytes:
            self.num_bytes -= _size(self._rows.popitem(last=False)[1])


def _size(rows: Rows) -> int:
    return sum(r.nbytes for r in rows)


@dataclass(slots=True, eq=False)
class Encoding:
    """A request with media that are not encoded, or need not be."""

    request: StageRequest
    state: ThinkerInput
    root: bytes  # what was kept of one owner's is not for others
    left: list[MediaPiece]
    base: int  # rows that the prefix cache had when it came
    requested: set[bytes] = field(default_factory=set)
    parts: Parts[VisionRows] | None = None  # of the picture that is being encoded
    made: list[tuple[Key, Rows]] = field(default_factory=list)  # what was encoded
    encoded: int = 0  # pieces

    def key(self, piece: MediaPiece) -> Key:
        return self.root, piece.digest, piece.padded


class Encoded(NamedTuple):
    """What came of a call."""

    requests: Sequence[RequestId]  # of which a part was encoded
    reports: Sequence[Working | MediaRequest]
    # requests whose media cannot be encoded, and why
    failures: Sequence[tuple[RequestId, StrettoError]]


class Encoders:
    def __init__(
        self,
        model: Thinker,
        core: StageCore,
        context: StageContext,
        windows: WindowGraphs | None = None,
        frames: FrameGraphs | None = None,
    ) -> None:
        """`windows`, `frames`: captured passes of the two encoders, on a GPU."""
        self.model = model
        self.replay_windows = windows.run if windows is not None else None
        self.replay_frame = frames.run if frames is not None else None
        self.core = core
        self.num_requests = context.num_requests
        self.clock = context.clock
        self.cache = EncoderCache()
        self.encoded = 0  # pieces
        self.num_requested = 0
        self.requests: dict[RequestId, Encoding] = {}
        vision, hidden = model.config.thinker.vision, model.config.thinker.text.hidden_size
        self._rests_ns = 0  # not before this is the next part encoded
        self._reports: list[Working | MediaRequest] = []
        self._failures: list[tuple[RequestId, StrettoError]] = []
        self._others = OTHERS if model.device.type == "cpu" else 0
        for name, read in {
            "stretto_stage_encoding": lambda: self.num_due,
            "stretto_stage_encoded_total": lambda: self.encoded,
            "stretto_stage_asked_total": lambda: self.num_requested,
        }.items():
            context.recorder.number(name, read, stage=core.name)
        self._flat = torch.empty(
            len(vision.deepstack_layers), 0, hidden, device=model.device, dtype=model.dtype
        )

    def add(
        self, request: StageRequest, state: ThinkerInput, root: bytes, pieces: list[MediaPiece]
    ) -> None:
        base = self.core.scheduler.num_found(request.id)
        self.requests[request.id] = Encoding(request, state, root, pieces, base)

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
        """A request has picked a token: all that was encoded for it are numbers, so others may find
        it. Returns how many pieces that were."""
        e = self.requests.get(id)
        if e is None:
            return 0
        for key, rows in e.made:
            self.cache.put(key, rows)
        e.made.clear()
        return e.encoded

    @property
    def due_ns(self) -> int | None:
        """When the next part is to be encoded, by the loop's clock."""
        return self._rests_ns if self.due is not None else None

    def run_due(self) -> Encoded:
        """Encode a part of what is due, if it is time for it."""
        done = self._run_due()
        reports = self._reports
        self._reports = []
        failures = self._failures
        self._failures = []
        return Encoded(done, reports, failures)

    def _run_due(self) -> Sequence[RequestId]:
        now, due = self.clock(), self.due
        if due is None or now < self._rests_ns:
            return ()
        others = self.num_requests() > self.num_due
        done = self._encode(self._group(due))
        # Others have the time between two parts, and more of it than the parts take.
        self._rests_ns = self.clock() + (self._others * (self.clock() - now) if others else 0)
        return done

    def _group(self, first: RequestId) -> list[RequestId]:
        """Requests whose windows of sound go into one launch with those of the first."""
        room = self.model.audio_tower.batch - len(self._windows(self.requests[first]))
        group = [first]
        for id, e in self.requests.items() if room < self.model.audio_tower.batch else ():
            count = len(self._windows(e)) if id != first else 0
            if 0 < count <= room:
                group.append(id)
                room -= count
        return group

    def _encode(self, ids: list[RequestId]) -> list[RequestId]:
        for id in ids:
            self._reports.append(Working(id, self.core.name))
        try:
            with self.core.runner.on_stream(), torch.inference_mode():
                self.run(ids)
        except torch.AcceleratorError:
            raise  # the device is lost
        except Exception as e:  # noqa: BLE001  what features that fit nothing make of the models
            if len(ids) > 1:  # whose they are is found by encoding each alone
                return [done for id in ids for done in self._encode([id])]
            error = e if isinstance(e, StrettoError) else Bug(f"its media cannot be encoded: {e!r}")
            self._failures.append((ids[0], error))
        return ids

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
        if piece.values is None and e.key(piece) not in self.cache:
            self._request_features(e, start)
            return None
        return piece

    def _request_features(self, e: Encoding, start: int) -> None:
        """For all that will be needed, not for the next piece alone."""
        absent = [
            p for p in e.left if p.stop > start and p.values is None and e.key(p) not in self.cache
        ]
        digests = dict.fromkeys(p.digest for p in absent if p.digest not in e.requested)
        if digests:
            e.requested.update(digests)
            self.num_requested += len(digests)
            self._reports.append(MediaRequest(e.request.id, self.core.name, tuple(digests)))

    def run(self, ids: Sequence[RequestId]) -> None:
        """Encode a part of what is due of a request, or windows of several; then they are behind
        the others. What was kept costs nothing, so it does not end the turn: a step would be
        launched for its few rows, and the encoder would wait behind that."""
        encodings = [self.requests.pop(id) for id in ids]
        self.requests |= dict(zip(ids, encodings, strict=True))
        e = encodings[0]
        piece = self._next(e)
        assert piece is not None, "nothing is due"
        while piece is not None and (rows := self.cache.get(e.key(piece))) is not None:
            self._add_rows(e, [piece], [rows])
            piece = self._next(e)
        if piece is None:
            return
        if piece.grid is not None:
            self._encode_vision(e, piece, piece.grid)
        elif piece.padded:
            self._encode_audio([(e, self._windows(e)) for e in encodings])
        else:
            self._encode_audio([(e, [piece])], padded=False)

    def _windows(self, e: Encoding) -> list[MediaPiece]:
        """Windows of sound that are due and follow each other; none of a clip that is not padded to
        one."""
        first, found = self._next(e), []
        for p in (
            e.left[e.left.index(first) :][: self.model.audio_tower.batch]
            if first is not None
            else ()
        ):
            if p.grid is not None or p.values is None or not p.padded or e.key(p) in self.cache:
                break
            found.append(p)
        return found

    def _encode_audio(
        self, windows: Sequence[tuple[Encoding, list[MediaPiece]]], padded: bool = True
    ) -> None:
        """In one launch."""
        device, dtype = self.model.device, self.model.dtype
        values = [p.values for _, pieces in windows for p in pieces if p.values is not None]
        mels = [to_device(v, device, torch.float32).to(dtype) for v in values]
        rows = iter(self.model.audio_tower.encode_windows(mels, padded, self.replay_windows))
        for e, pieces in windows:
            self._add_encoded(e, pieces, [(r, self._flat) for r in islice(rows, len(pieces))])

    def _encode_vision(self, e: Encoding, piece: MediaPiece, grid: tuple[int, int, int]) -> None:
        """A part of a picture or a video."""
        if e.parts is None:
            assert piece.values is not None
            e.parts = self.model.visual.encoding([piece.values], [grid], self.replay_frame)
        try:
            next(e.parts)
        except StopIteration as end:
            e.parts = None
            seen: VisionRows = end.value
            self._add_encoded(e, [piece], [(seen.main, torch.stack(list(seen.deep)))])

    def _add_encoded(self, e: Encoding, pieces: Sequence[MediaPiece], made: Sequence[Rows]) -> None:
        e.encoded += len(pieces)
        self.encoded += len(pieces)
        e.made += zip(map(e.key, pieces), made, strict=True)
        self._add_rows(e, pieces, made)

    def _add_rows(self, e: Encoding, pieces: Sequence[MediaPiece], made: Sequence[Rows]) -> None:
        """The request's prefill may go on."""
        for piece, (rows, deep) in zip(pieces, made, strict=True):
            places = torch.from_numpy(piece.places)
            if len(rows) != len(places):
                raise ValueError(f"{len(rows)} rows for {len(places)} places")
            visual = places if piece.grid is not None else places[:0]
            e.state.media.append(MediaRows(places, rows, visual, deep))
            e.left.remove(piece)
        self.core.scheduler.set_missing(e.request.id, missing_runs(e.left))
