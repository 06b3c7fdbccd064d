"""Large requests and long sounds, cut into parts that can be looked at one by one: done by the
prompt worker, or by a thread of the engine's. Pure functions; imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import msgspec

from stretto._validation import NOT_JSON, not_json, read_json
from stretto.errors import Invalid
from stretto.preprocess.audio import cut_sound, decode_audio, to_pcm
from stretto.preprocess.audio_references import references
from stretto.preprocess.build import Json
from stretto.preprocess.media import LONG_SOUND, Budget
from stretto.preprocess.mel import SAMPLE_RATE
from stretto.preprocess.pauses import Pcm, segments
from stretto.preprocess.pool.jobs import Divided, Outlined, Windows
from stretto.preprocess.pool.memfile import MemFile
from stretto.preprocess.remote_media import MAX_REMOTE, remote_urls
from stretto.preprocess.text_chunks import divide

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def do_outline(
    data: memoryview, long: tuple[str, ...], max_short_bytes: int
) -> tuple[Outlined, MemFile]:
    """The caller closes the file."""
    short, found = outline(data, long, max_short_bytes)
    spans, at = {}, len(short)
    for name, value in found.items():
        spans[name] = (at, at + len(value))
        at += len(value)
    ids = tuple({i: None for value in found.values() for i in references(value)})
    urls = tuple({url: None for value in found.values() for url in remote_urls(value)})[:MAX_REMOTE]
    return Outlined(len(short), spans, ids, urls), MemFile.sealed(short, *found.values())


def do_cut(data: memoryview, seconds: float | None) -> tuple[Windows, MemFile]:
    """The caller closes the file."""
    samples = to_pcm(decode_audio(bytes(data), Budget(LONG_SOUND)))
    cut = _at_pauses(samples) if seconds is None else _at_quiet_places(samples, seconds)
    return cut, MemFile.sealed(samples.tobytes())


def _at_quiet_places(samples: Pcm, seconds: float) -> Windows:
    return Windows(_spans(2 * len(part) for part in cut_sound(samples, seconds)))


def _spans(sizes: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Where parts of these sizes lie, one behind the other."""
    return tuple(pairwise([0, *accumulate(sizes)]))


def _at_pauses(samples: Pcm) -> Windows:
    found = segments(samples, SAMPLE_RATE)
    windows = tuple((2 * s.start, 2 * s.stop) for s in found)
    quiet = tuple((s.loud_start - s.start, s.stop - s.loud_stop) for s in found)
    return Windows(windows, quiet)


def do_divide(text: str, max_chars: int, normalise: str | None) -> tuple[Divided, MemFile]:
    """The caller closes the file."""
    parts = [part.encode() for part in divide(text, max_chars, normalise)]
    return Divided(_spans(map(len, parts))), MemFile.sealed(*parts)


def outline(
    body: Json, long: Sequence[str], max_short_bytes: int
) -> tuple[bytes, dict[str, memoryview]]:
    """A JSON object without its long fields, and these, as they stand in the body."""
    try:
        fields = read_json(body, _fields.decode)
    except msgspec.ValidationError:
        raise Invalid("the request must be a JSON object") from None
    except NOT_JSON as e:
        raise Invalid(not_json(e)) from None
    short = {k: v for k, v in fields.items() if k not in long}
    sizes = {k: len(k) + len(memoryview(v)) for k, v in short.items()}
    if sum(sizes.values()) > max_short_bytes:
        name = max(sizes, key=sizes.__getitem__)
        others = f"all fields but {', '.join(long)} may have {max_short_bytes:,} bytes together"
        raise Invalid(f"{name[:80]} is too large: {sizes[name]:,} bytes; {others}", name[:80])
    return msgspec.json.encode(short), {k: memoryview(fields[k]) for k in long if k in fields}
