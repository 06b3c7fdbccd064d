"""How a vocoder's stage is sized, and the sizes that its steps come in. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class CodecConfig:
    # streams at once
    slots: int = 128
    # announced streams without a slot
    max_waiting: int = 256
    # frames that one stream may have waiting
    max_pending: int = 4096
    # frames per step; packets grow to no more by default
    frame_sizes: tuple[int, ...] = (
        1,
        2,
        4,
        8,
    )
    # streams per step
    stream_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    overlap_depth: int = 2
    # streams x frames of a step (unless it is of one frame): larger ones save nothing more
    max_cells: int = 256
    # a stream that runs dry within this time goes before others
    urgent_s: float = 0.1
    # states behind primers that are kept
    primers: int = 32
    # streams x frames by which a step may be padded to a size that there is already
    spare_cells: int = 0

    def sizes_for(self, streams: int) -> tuple[int, ...]:
        """Frames per step that steps of so many streams come in, smallest first. The smallest is
        never padded: it is a stream's first packet."""
        first, *more = sorted(self.frame_sizes)
        sizes: list[int] = []
        for frames in reversed([f for f in more if f * streams <= self.max_cells]):
            if not sizes or streams * (sizes[0] - frames) > self.spare_cells:
                sizes.insert(0, frames)
        return first, *sizes

    def shapes(self) -> list[tuple[int, int]]:
        """All (streams, frames) that steps come in."""
        widths = sorted({*(n for n in self.stream_sizes if n < self.slots), self.slots})
        return [(streams, frames) for streams in widths for frames in self.sizes_for(streams)]

    def captured(self) -> CodecConfig:
        """The same in fewer shapes, for steps that are captured. Each shape costs a second or more
        at start, as the library tries its convolutions anew. On an H200 a captured step takes about
        0.6 ms and 0.016 ms more per stream and frame: 48 of them are 0.8 ms, of the 160 ms or more
        that a packet to be padded plays. On a CPU, where a step takes as long as its cells, padding
        would not be cheap."""
        return replace(self, stream_sizes=(1, 8, 16, 32, 64, 128), spare_cells=48)
