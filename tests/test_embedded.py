"""Which model a command uses that was given none."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from stretto import embedded
from stretto.cli import main
from stretto.commands import serve
from stretto.errors import CheckpointError
from stretto.hub import find_model
from stretto.models.qwen3_omni.family import open_model
from stretto.preprocess.text_chunks import Passages
from stretto.testing.qwen3_omni import write_tiny


def package(
    folder: Path, files: tuple[str, ...] = ("config.json", "a.safetensors", "b.safetensors")
) -> Path:
    checkpoint = folder / embedded.CHECKPOINT
    checkpoint.mkdir(parents=True)
    for name in files:
        (checkpoint / name).write_text("{}")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    return checkpoint


def test_the_checkpoint_of_a_clone_is_found(tmp_path: Path) -> None:
    made = package(tmp_path)
    assert embedded.find(tmp_path) == made


def test_an_installed_package_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, clone = tmp_path / "site", tmp_path / "clone"
    installed = package(site / embedded.PACKAGE)
    (site / embedded.PACKAGE / "__init__.py").write_text("")
    package(clone)
    monkeypatch.syspath_prepend(site)
    assert embedded.find(clone) == installed


@pytest.mark.parametrize("missing", ["config.json", "b.safetensors"])
def test_half_a_checkpoint_does_not_count(tmp_path: Path, missing: str) -> None:
    files = tuple(f for f in ("config.json", "a.safetensors", "b.safetensors") if f != missing)
    package(tmp_path, files)
    assert embedded.find(tmp_path) is None


@pytest.mark.parametrize("index", ["", "[]", '{"weight_map": 3}', '{"weight_map": {}}', "{}"])
def test_an_index_that_makes_no_sense(tmp_path: Path, index: str) -> None:
    (package(tmp_path) / "model.safetensors.index.json").write_text(index)
    assert embedded.find(tmp_path) is None


def test_a_checkpoint_declares_what_it_cannot_do(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    assert open_model(tmp_path).info.transcription is not None
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, embedded.DECLARATION: {"transcribes": False}}))
    assert open_model(tmp_path).info.transcription is None
    for wrong in ({"transcribes": "no"}, {"sings": True}, []):
        path.write_text(json.dumps({**config, embedded.DECLARATION: wrong}))
        with pytest.raises(CheckpointError, match=embedded.DECLARATION):
            open_model(tmp_path)


def test_a_checkpoint_declares_how_it_reads(tmp_path: Path) -> None:
    def passages(**declared: object) -> Passages | None:
        write_tiny(tmp_path, changes={embedded.DECLARATION: declared})
        return open_model(tmp_path).info.passages

    assert passages() == Passages(1200, 800)
    assert passages(sentence=80) == Passages(640, 10, 80, None)
    assert passages(sentence=80, normalise="en") == Passages(640, 10, 80, "en")
    assert passages(normalise="en") == Passages(1200, 800, 1200, "en")
    with pytest.raises(CheckpointError, match=embedded.DECLARATION):
        passages(normalise="tlh")


@pytest.mark.skipif(embedded.find() is None, reason="the embedded model's weights are not here")
def test_the_voice_is_called_what_it_is() -> None:
    folder = embedded.find()
    assert folder is not None
    model = open_model(folder)
    assert (model.info.voices, model.info.default_voice) == (("nano",), "nano")
    assert model.info.voice_aliases == {"ethan": "nano"}
    model.check_voice("Ethan")


@pytest.mark.skipif(embedded.find() is None, reason="the embedded model's weights are not here")
def test_what_is_shipped_is_small_and_says_what_it_is() -> None:
    folder = embedded.find()
    assert folder is not None
    files = [p for p in folder.rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) <= 60_000_000
    assert max(p.stat().st_size for p in files) < 16 * 2**20
    card = (folder / "README.md").read_text(encoding="utf-8")
    sounds = {p.relative_to(folder).as_posix() for p in (folder / "sounds").iterdir()}
    assert len(sounds) == 10
    assert all(name in card for name in sounds)
    info = open_model(folder).info
    assert (info.name, info.random_weights) == ("nano", False)
    assert info.transcription is not None
    assert "writes down" in card
    assert len(info.example_prompts) == 6
    assert info.description.startswith("A small synthetic voice")
    assert info.defaults.speech_temperature < 0.9


@pytest.mark.parametrize("model", [None, "nano"])
def test_a_command_without_a_model_and_one_that_names_it(
    model: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = package(tmp_path)
    monkeypatch.setattr(embedded, "find", lambda: own)
    monkeypatch.chdir(tmp_path)
    own.rename(tmp_path / "elsewhere")  # in a folder `nano` that is no checkpoint, too
    (tmp_path / "nano").mkdir()
    assert find_model(model) == own
    assert serve.checkpoint(model) == own


def test_a_checkpoint_of_that_name_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert find_model("nano") == Path("nano")


@pytest.mark.parametrize(
    "words",
    [
        ["serve"],
        ["serve", "nano"],
        ["serve", ""],  # as a container passes a variable that is not set
        ["generate", "--text", "Hello"],
        ["generate", "nano", "--text", "Hello"],
        ["speak", "--text", "Hello", "--out", "a.wav"],
    ],
)
def test_without_the_voice_a_sentence_says_how_to_get_it(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(embedded, "find", lambda: None)
    assert main(words) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"{sys.executable} -m pip install 'stretto[nano]'" in line


def test_the_extra_is_the_voice() -> None:
    root = Path(__file__).parents[1]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    voice = tomllib.loads((root / "packages/nano/pyproject.toml").read_text())["project"]
    [requirement] = map(Requirement, extras["nano"])
    assert requirement.name == voice["name"]
    assert voice["version"] in requirement.specifier


def test_ideas_come_from_the_checkpoint(tiny_dir: Path, tmp_path: Path) -> None:
    assert open_model(tiny_dir).info.example_prompts == ()
    for words, expected in (
        (["Who are you?"], ("Who are you?",)),
        ([str(i) for i in range(9)], tuple("012345")),
        (["x" * 201], ()),
        ({"a": 1}, ()),
        ([1], ()),
    ):
        (tmp_path / embedded.EXAMPLE_PROMPTS).write_text(json.dumps(words))
        assert embedded.read_example_prompts(tmp_path) == expected
    (tmp_path / embedded.EXAMPLE_PROMPTS).write_text("[")
    assert embedded.read_example_prompts(tmp_path) == ()


def test_the_description_comes_from_the_checkpoint(tiny_dir: Path, tmp_path: Path) -> None:
    assert open_model(tiny_dir).info.description == ""
    for words, expected in (
        (b"A voice.\nIt sings.\n", "A voice. It sings."),
        (b"x" * 401, ""),
        (b"\xff", ""),
    ):
        (tmp_path / embedded.DESCRIPTION).write_bytes(words)
        assert embedded.read_description(tmp_path) == expected


@pytest.mark.parametrize(
    ("config", "random"),
    [
        ({embedded.RANDOM: True}, True),
        ({embedded.RANDOM: "yes"}, False),
        ({}, False),
        ([], False),
        (None, False),
    ],
)
def test_a_checkpoint_says_that_nobody_has_trained_it(
    tmp_path: Path, config: object, random: bool
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert embedded.is_random(tmp_path) is random


def test_tiny_checkpoints_say_so(tiny_dir: Path) -> None:
    assert embedded.is_random(tiny_dir)
