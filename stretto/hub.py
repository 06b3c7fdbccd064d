"""Where a model is: a directory, a name on the Hugging Face hub, or the embedded one. Called by the
commands and the Python API before anything is loaded; imports `huggingface_hub` only for a name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from stretto import embedded
from stretto.errors import Invalid, StrettoError

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja", "*.model")
"""Files to download: weights, configuration, tokenizer and template; no pictures, no other formats
of the weights."""


MODEL_HELP = (
    "checkpoint directory, a name on the Hugging Face hub, or nano, the embedded model (default)"
)


def find_model(name: str | Path | None, say: Callable[[str], None] = lambda line: None) -> Path:
    """The checkpoint's directory; without a name, that of the embedded model. A name on the hub is
    searched in its cache on this machine, then downloaded, with progress on stderr; `say` gets a
    line before that."""
    if name is None or embedded.is_embedded(name):
        return embedded.directory()
    path = Path(name)
    if path.is_dir():
        return path
    if path.exists():
        raise Invalid(
            f"{name}: is a file; a model is a directory, or a name such as org/name", "model"
        )
    if not REPOSITORY.fullmatch(str(name)):
        raise Invalid(f"{name}: there is no such directory", "model")
    return _cached(str(name)) or _downloaded(str(name), say)


def model_name(directory: Path) -> str:
    """The name of a checkpoint: its directory's name or, in the hub's cache, where that is a
    digest, the hub's."""
    cache = directory.absolute().parent
    if cache.name == "snapshots" and cache.parent.name.startswith("models--"):
        return cache.parent.name.removeprefix("models--").replace("--", "/", 1)
    return directory.name


def _cached(name: str) -> Path | None:
    """Its directory in the hub's cache, if all of its weights are there: a download may have been
    interrupted between two files."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        path = Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, OSError, ValueError):
        return None
    return path if embedded.is_complete(path) else None


def _downloaded(name: str, say: Callable[[str], None]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    say(f"{name} is not in the Hugging Face cache: downloading it")
    try:
        return Path(snapshot_download(name, allow_patterns=list(FILES)))
    except GatedRepoError:
        why = "the hub asks you to accept its terms and to log in: hf auth login"
    except RepositoryNotFoundError:
        raise Invalid(
            f"{name}: there is no such directory, nor such a model on the hub", "model"
        ) from None
    except HfHubHTTPError as e:
        why = f"the hub answered: {' '.join(str(e).split())[:200]}"
    # no network, no space: many classes, most of them OSErrors
    except (OSError, ValueError, RuntimeError) as e:
        why = f"it cannot be downloaded from here ({type(e).__name__})"
    raise StrettoError(
        f"{name}: there is no such directory, it is not in the Hugging Face cache, and {why}. "
        f"Where there is a "
        f"network, run: hf download {name} --local-dir {name.partition('/')[2]}; then name that "
        f"directory instead"
    )
