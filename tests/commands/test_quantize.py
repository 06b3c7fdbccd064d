"""`stretto quantize` and `stretto env --cards` as a user types them."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tqdm

from stretto.cli import main, parser
from stretto.commands.parsers import commands
from stretto.commands.quantize import SCHEMES
from stretto.registry import open_model

FLAGS = ("--talker", "--group-size", "8", "--device", "cpu", "--quiet")


def test_it_says_what_it_wrote_and_which_cards_that_fits(
    tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["quantize", str(tiny_dir), str(out), *FLAGS, "--asymmetric"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"wrote {out}: int4, groups of 8, with zero points"
    assert lines[1].startswith("weights ")
    cards = dict(line.split(maxsplit=2)[::2] for line in lines[2:])
    assert list(cards) == ["16", "24", "32", "48", "80", "141"]
    assert all("listeners" in text for text in cards.values())
    assert main(["env", str(out), "--cards", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["weights"] == "int4, groups of 8, with zero points"
    assert {f"{size} GB": text for size, text in cards.items()}.items() <= facts.items()


@pytest.mark.parametrize("scheme", SCHEMES[1:])
def test_other_formats(scheme: str, tiny_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["quantize", str(tiny_dir), str(out), "--format", scheme, "--quiet"]) == 0
    assert open_model(out).info.weights.startswith("FP8")


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Shells let what runs in their background ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["/nowhere", "OUT"], "/nowhere: there is no such directory"),
        (["TINY", "TINY"], "lies in MODEL"),
        (["TINY", "OUT", "--group-size", "7"], "--group-size must be a multiple of 8, got 7"),
        (["TINY", "OUT", "--talker"], "--group-size 32 does not divide the "),
        (["TINY", "OUT", "--format", "fp8-row", "--asymmetric"], "has no zero points"),
        (["TINY", "OUT", "--device", "tpu"], "--device must be cpu, cuda or cuda:N, got tpu"),
        (["TINY", "OUT", "--device", "cuda:99"], "--device cuda:99: PyTorch sees "),
    ],
)
def test_what_cannot_be_done_is_a_sentence(
    words: list[str],
    says: str,
    tiny_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = {"TINY": str(tiny_dir), "OUT": str(tmp_path / "out")}
    assert main(["quantize", *(places.get(w, w) for w in words)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("stretto: ")
    assert says in line
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_leaves_what_the_same_command_goes_on_with(
    tiny_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(bar: Any, count: int) -> None:
        signal.raise_signal(signal.SIGINT)

    command = ["quantize", str(tiny_dir), str(tmp_path / "out"), *FLAGS]
    with monkeypatch.context() as patched:
        patched.setattr(tqdm.tqdm, "update", interrupt)
        assert main(command) == 130
    assert capsys.readouterr().err == "stretto: stopped; the same command goes on\n"
    assert not list((tmp_path / "out").rglob("*.part"))
    assert main(command) == 0
    assert open_model(tmp_path / "out").info.weights == "int4, groups of 8"


def test_its_help_has_the_parts_of_families() -> None:
    quantize = commands(parser())["quantize"]
    assert "--talker" in quantize.format_help()
    assert "to what:\n" in quantize.format_help()


def test_cards_are_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--cards"]) == 2
    assert "--cards is of a checkpoint: name a MODEL" in capsys.readouterr().err
