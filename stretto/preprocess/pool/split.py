"""Large requests and long sounds, cut into parts that can be looked at one by one: done by the
prompt worker, or by a thread of the engine's. Pure functions; imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TypeVar

import msgspec

from stretto._validation import NOT_JSON, not_json, read_json
from stretto.errors import Invalid
from stretto.preprocess.audio import cut_sound, decode_audio
from stretto.preprocess.audio_references import references
from stretto.preprocess.build import Json
from stretto.preprocess.media import LONG_SOUND, Budget
from stretto.preprocess.pool.jobs import Divided, Outlined, Windows
from stretto.preprocess.pool.memfile import MemFile
from stretto.preprocess.text_chunks import divide

K = TypeVar("K", Divided, Windows)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def do_outline(data: memoryview, long: tuple[str, ...], most: int) -> tuple[Outlined, MemFile]:
    """The caller closes the file."""
    short, found = outline(data, long, most)
    spans, at = {}, len(short)
    for name, value in found.items():
        spans[name] = (at, at + len(value))
        at += len(value)
    ids = tuple({i: None for value in found.values() for i in references(value)})
    return Outlined(len(short), spans, ids), MemFile.sealed(short, *found.values())


def do_divide(text: str, most: int, normalise: str | None) -> tuple[Divided, MemFile]:
    """The caller closes the file."""
    return _in_a_row(Divided, [part.encode() for part in divide(text, most, normalise)])


def do_cut(data: memoryview, seconds: float) -> tuple[Windows, MemFile]:
    """The caller closes the file."""
    parts = [b.tobytes() for b in cut_sound(decode_audio(bytes(data), Budget(LONG_SOUND)), seconds)]
    return _in_a_row(Windows, parts)


def _in_a_row(kind: type[K], parts: Sequence[bytes]) -> tuple[K, MemFile]:
    """Where the parts lie in the file."""
    ends = [0, *accumulate(map(len, parts))]
    return kind(tuple(pairwise(ends))), MemFile.sealed(*parts)


def outline(body: Json, long: Sequence[str], most: int) -> tuple[bytes, dict[str, memoryview]]:
    """A JSON object without its long fields, and these, as they stand in the body."""
    try:
        fields = read_json(body, _fields.decode)
    except msgspec.ValidationError:
        raise Invalid("the request must be a JSON object") from None
    except NOT_JSON as e:
        raise Invalid(not_json(e)) from None
    short = {k: v for k, v in fields.items() if k not in long}
    sizes = {k: len(k) + len(memoryview(v)) for k, v in short.items()}
    if sum(sizes.values()) > most:
        name = max(sizes, key=sizes.__getitem__)
        others = f"all fields but {', '.join(long)} may have {most:,} bytes together"
        raise Invalid(f"{name[:80]} is too large: {sizes[name]:,} bytes; {others}", name[:80])
    return msgspec.json.encode(short), {k: memoryview(fields[k]) for k in long if k in fields}
