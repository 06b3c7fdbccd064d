"""The cluster's secret, from a file that every machine has. It never goes through Ray. Imports
nothing heavy."""

from __future__ import annotations

import hashlib
from pathlib import Path

from stretto.errors import Invalid

MIN_BYTES = 16
MAX_BYTES = 4096


def read_secret(path: str | None) -> bytes:
    """32 bytes made of the file's content, white space at its ends aside."""
    if path is None:
        raise Invalid("no file with the cluster's secret is named", "cluster_secret_file")
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_BYTES + 1).strip()
    except OSError as e:
        raise Invalid(
            f"{path}: the cluster's secret cannot be read ({e.strerror})", "cluster_secret_file"
        ) from None
    if not MIN_BYTES <= len(content) <= MAX_BYTES:
        raise Invalid(
            f"{path}: a secret has {MIN_BYTES} to {MAX_BYTES} bytes, not {len(content)}",
            "cluster_secret_file",
        )
    return hashlib.sha256(b"stretto cluster secret " + content).digest()
