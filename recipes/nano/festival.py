"""The teacher: festival with the HTS voice `cmu_us_slt_arctic_hts`, both from Debian, run in
batches.

`pack` makes an archive of an installed festival with all its libraries, for a machine that has none
and no network; `unpack` puts it in place there (festival reads its data from /usr/share/festival
and nowhere else, so this needs root). Called by `corpus.py`."""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
import wave
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from recipes.nano.audio import RATE, resample, tidy

DATA = Path("/usr/share/festival")
PREFIX = Path("/opt/festival-packed")
VOICE_RATE = 32000
_HEAD = """(voice_cmu_us_slt_arctic_hts)
(define (phones u)
 (let ((i 0))
  (mapcar (lambda (word) (item.set_feat word 'no i) (set! i (+ i 1))) (utt.relation.items u 'Token))
  (mapcar (lambda (s) (format t "%s %s %s\n" (item.name s)
                       (item.feat s "R:SylStructure.parent.parent.R:Token.parent.no") (item.feat s 'end)))
   (utt.relation.items u 'Segment))))
(define (say f text)
 (let ((u (utt.synth (eval (list 'Utterance 'Text text)))))
  (utt.save.wave u f 'riff)
  (phones u)
  (format t "END\n")))
"""
PHONES = """pau aa ae ah ao aw ax axr ay b ch d dh dx eh el em en er ey f g hh hv ih iy jh k l m n nx ng ow oy p r s sh
t th uh uw v w y z zh h# brth""".split()
PAUSE = 0
NO_WORD = 255


@dataclass(frozen=True, slots=True, eq=False)
class Uttered:
    """A sentence as the teacher spoke it."""

    samples: npt.NDArray[np.int16]  # at 24 kHz
    phones: npt.NDArray[np.uint8]  # numbers in PHONES
    words: npt.NDArray[
        np.uint8
    ]  # of each phone, the number of its word in the text; NO_WORD for a pause
    ends: npt.NDArray[np.int32]  # of each phone, in samples


def pack(archive: Path) -> None:
    """Write an archive of the festival that is installed here."""
    binary = shutil.which("festival")
    if binary is None or not DATA.exists():
        raise SystemExit(
            "festival is not installed: apt-get install festival festvox-us-slt-hts festlex-cmu "
            "festlex-poslex"
        )
    listed = subprocess.run(["ldd", binary], capture_output=True, text=True, check=True).stdout
    libraries = re.findall(r"(/\S+) \(0x", listed)
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:xz") as tar:
        tar.add(binary, "bin/festival")
        for library in libraries:
            tar.add(Path(library).resolve(), f"lib/{Path(library).name}")
        tar.add(DATA, "share")


def unpack(archive: Path) -> None:
    """Put a packed festival in place. Does nothing where one is there already."""
    if DATA.exists():
        return
    with tarfile.open(archive) as tar:
        tar.extractall(PREFIX, filter="tar")
    shutil.copytree(PREFIX / "share", DATA)


def command() -> list[str]:
    """How festival is run here: the packed one by its own loader, so that the host's libraries do
    not matter."""
    if (PREFIX / "bin/festival").exists():
        library = PREFIX / "lib"
        return [
            str(library / "ld-linux-x86-64.so.2"),
            "--library-path",
            str(library),
            str(PREFIX / "bin/festival"),
        ]
    return ["festival"]


def speak(texts: list[str], scratch: Path) -> list[Uttered]:
    """The sentences, by one festival process."""
    scratch.mkdir(parents=True, exist_ok=True)
    script = scratch / "say.scm"
    for text in texts:
        if not re.fullmatch(r"[A-Za-z0-9 ,.?!'-]+", text):
            raise ValueError(f"not for festival: {text!r}")
    lines = [f'(say "{scratch}/{i}.wav" "{text}")\n' for i, text in enumerate(texts)]
    script.write_text(_HEAD + "".join(lines), encoding="ascii")
    said = subprocess.run(
        [*command(), "-b", str(script)], check=True, capture_output=True, text=True
    ).stdout
    listed = said.split("END\n")[:-1]
    if len(listed) != len(texts):
        raise EOFError(f"{len(listed)} of {len(texts)} sentences were spoken")
    return [_uttered(scratch / f"{i}.wav", lines_) for i, lines_ in enumerate(listed)]


def _uttered(path: Path, listed: str) -> Uttered:
    with wave.open(str(path)) as file:
        assert (file.getframerate(), file.getnchannels()) == (VOICE_RATE, 1)
        samples = np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32)
    path.unlink()
    cut, skipped = tidy(resample(samples, RATE, VOICE_RATE))
    phones, marks, ends = [], [], []
    for line in listed.splitlines():
        phone, mark, end = line.split()
        phones.append(PHONES.index(phone))
        marks.append(NO_WORD if phones[-1] == PAUSE else int(mark))
        ends.append(min(max(0, round(float(end) * RATE) - skipped), len(cut)))
    order = {
        m: i for i, m in enumerate(sorted({*marks} - {NO_WORD}))
    }  # festival's numbers have gaps
    words = [order.get(m, NO_WORD) for m in marks]
    return Uttered(
        cut, np.array(phones, np.uint8), np.array(words, np.uint8), np.array(ends, np.int32)
    )
