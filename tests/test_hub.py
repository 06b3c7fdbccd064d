"""Models by their name on the Hugging Face Hub: the cache, downloads, and no network."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError

from stretto.cli import main
from stretto.errors import StrettoError
from stretto.hub import find_model
from stretto.registry import open_model


@pytest.fixture
def cache(tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache as a download leaves it, with the tiny checkpoint as org/tiny; there is no
    network."""
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / ("0" * 40)
    shutil.copytree(tiny_dir, snapshot)
    (tmp_path / "models--org--tiny" / "refs").mkdir()
    (tmp_path / "models--org--tiny" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return snapshot


def test_a_name_is_found_in_the_cache(cache: Path) -> None:
    assert find_model("org/tiny") == cache
    assert open_model(cache).info.name == "org/tiny"  # and not the digest that its folder is called
    assert find_model(cache) == cache


def test_a_name_that_is_nowhere_says_what_to_run(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["generate", "Qwen/Qwen3-Omni-30B-A3B-Instruct", "--text", "hi", "--device", "cpu"])
        == 1
    )
    stderr = capsys.readouterr().err
    assert "hf download Qwen/Qwen3-Omni-30B-A3B-Instruct" in stderr
    assert "Traceback" not in stderr


def test_a_name_that_is_not_here_is_downloaded(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(name: str, local_files_only: bool = False, allow_patterns: Any = ()) -> str:
        if local_files_only:
            raise LocalEntryNotFoundError("not in the cache")
        assert "*.safetensors" in allow_patterns
        return str(cache)

    lines: list[str] = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert find_model("org/other", lines.append) == cache
    assert lines == ["org/other is not in the Hugging Face cache: downloading it"]


def test_a_broken_download_goes_on(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    next(cache.glob("*.safetensors")).unlink()
    names: list[str] = []

    def download(name: str, local_files_only: bool = False, **_: object) -> str:
        if local_files_only:
            return str(cache)
        names.append(name)
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(StrettoError, match="hf download org/tiny"):
        find_model("org/tiny")
    assert names == ["org/tiny"]
