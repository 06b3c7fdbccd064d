"""The teacher: festival with the HTS voice `cmu_us_slt_arctic_hts`, both from Debian, run in batches.

`pack` makes an archive of an installed festival with all its libraries, for a machine that has none and no network;
`unpack` puts it in place there (festival reads its data from /usr/share/festival and nowhere else, so this needs
root). Called by `corpus.py`."""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
import wave
from pathlib import Path

import numpy as np
import numpy.typing as npt

from recipes.nano.audio import RATE, resample, tidy

DATA = Path("/usr/share/festival")
PREFIX = Path("/opt/festival-packed")
VOICE_RATE = 32000
_HEAD = """(voice_cmu_us_slt_arctic_hts)
(define (say f t) (utt.save.wave (utt.synth (eval (list 'Utterance 'Text t))) f 'riff))
"""


def pack(archive: Path) -> None:
    """Write an archive of the festival that is installed here."""
    binary = shutil.which("festival")
    if binary is None or not DATA.exists():
        raise SystemExit(
            "festival is not installed: apt-get install festival festvox-us-slt-hts festlex-cmu festlex-poslex"
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
    """How festival is run here: the packed one by its own loader, so that the host's libraries do not matter."""
    if (PREFIX / "bin/festival").exists():
        library = PREFIX / "lib"
        return [str(library / "ld-linux-x86-64.so.2"), "--library-path", str(library), str(PREFIX / "bin/festival")]
    return ["festival"]


def speak(texts: list[str], scratch: Path) -> list[npt.NDArray[np.int16]]:
    """The sentences as 24 kHz samples, by one festival process."""
    scratch.mkdir(parents=True, exist_ok=True)
    script = scratch / "say.scm"
    for text in texts:
        if not re.fullmatch(r"[A-Za-z0-9 ,.?!'-]+", text):
            raise ValueError(f"not for festival: {text!r}")
    lines = [f'(say "{scratch}/{i}.wav" "{text}")\n' for i, text in enumerate(texts)]
    script.write_text(_HEAD + "".join(lines), encoding="ascii")
    subprocess.run([*command(), "-b", str(script)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    found = []
    for i in range(len(texts)):
        path = scratch / f"{i}.wav"
        with wave.open(str(path)) as file:
            assert (file.getframerate(), file.getnchannels()) == (VOICE_RATE, 1)
            samples = np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32)
        path.unlink()
        found.append(tidy(resample(samples, RATE, VOICE_RATE)))
    return found
