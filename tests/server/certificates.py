"""Certificates for tests of TLS, made by openssl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="needs openssl to make a certificate"
)


def certificate_settings(folder: Path) -> dict[str, str]:
    """The server's settings for a new certificate of the loopback's address."""
    key, certificate = str(folder / "key.pem"), str(folder / "certificate.pem")
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        [*make.split(), *subject, "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    return {"ssl_certfile": certificate, "ssl_keyfile": key}
