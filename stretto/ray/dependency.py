"""Is Ray there, and the one that this was made for? Imports nothing heavy."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from stretto.errors import Invalid

SERIES = "2.60."
"""Parts of Ray that we use are not API (HAProxy's settings, authentication): other versions may
lack them."""


def require_ray() -> None:
    try:
        found = version("ray")
    except PackageNotFoundError:
        raise Invalid("--backend ray needs Ray: pip install 'stretto[ray]'", "backend") from None
    if not found.startswith(SERIES):
        raise Invalid(
            f"--backend ray needs Ray {SERIES}*, but {found} is here: pip install 'stretto[ray]'",
            "backend",
        )
