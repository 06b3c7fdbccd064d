"""Words that the command line does not know: one line of usage, and what was meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.__main__ import main as command
from stretto.cli import main, parser
from stretto.commands.parsers import commands, flags_of
from stretto.commands.serve import variable_warnings
from stretto.config.flags import SECTIONS
from stretto.config.loader import RECORDS, load_settings
from stretto.config.names import NONE, OURS
from stretto.config.setting import name_of, settings_of
from stretto.errors import Invalid


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("serv", "there is no command 'serv'; did you mean serve?"),
        ("quantise x y", "there is no command 'quantise'; did you mean quantize?"),
        ("quantize x y --fromat int4", "there is no flag --fromat (did you mean --format?)"),
        ("quantize x y --talkr", "(did you mean --talker?)"),
        ("chat nano", "there is no command 'chat'; there are serve, generate, speak,"),
        ("serve --prot 1", "there is no flag --prot (did you mean --port?)"),
        ("serve --prot=1", "there is no flag --prot (did you mean --port?)"),
        ("generate --tempreature 1", "(did you mean --temperature?)"),
        ("generate --port 3", "there is no flag --port (it is a flag of stretto serve)"),
        ("serve x --gpu-memory-utilization 0.9", "(in Stretto it is --memory-share)"),
        ("serve x --gpu-memory-utilisation 0.9", "(in Stretto it is --memory-share)"),
        ("serve x --max-num-seqs 64", "(in Stretto it is --max-rows)"),
        ("serve x --mem-fraction-static 0.8", "(in Stretto it is --memory-share)"),
        ("serve x --enable-prefix-caching", "(in Stretto it is --prefix-cache)"),
        ("serve x --disable-radix-cache", "(in Stretto it is --no-prefix-cache)"),
        ("serve x --tensor-parallel-size 2", "--placement puts stages on several cards"),
        ("serve x --tp 2", "there is no flag --tp (it does not exist here, a stage is not split"),
        ("serve --model-path x", "name the model after the command, without one"),
        ("serve --modle x", "name the model after the command, without one"),
        ("serve x y", "unrecognized arguments: y"),
        ("serve --dtype bf16", "choose from"),
        ("", "the following arguments are required: COMMAND"),
    ],
)
def test_a_wrong_word_is_two_lines(
    typed: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(typed.split())
    assert ended.value.code == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: stretto ")
    assert len(usage) < 80
    assert says in error


def test_names_of_other_engines_that_are_ours_too() -> None:
    words = (
        "serve x --host 0.0.0.0 --port 1 --served-model-name m --max-model-len 99 --dtype float16"
    )
    args = parser().parse_args(words.split())
    assert (args.host, args.port, args.max_model_len, args.model) == ("0.0.0.0", 1, 99, "x")


def test_what_stands_for_a_name_of_another_engine_is_there() -> None:
    flags = flags_of(commands(parser())["serve"])
    assert {f"--{name.replace('_', '-')}" for name in OURS.values()} <= flags
    named = {word.strip(",:") for text in NONE.values() for word in text.split()}
    assert {word for word in named if word.startswith("--")} <= flags
    assert not OURS.keys() & NONE.keys()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prot: 1", "unknown prot (did you mean port?)"),
        (
            "gpu-memory-utilization: 1",
            "unknown gpu-memory-utilization (in Stretto it is memory-share)",
        ),
        ("enforce_eager: yes", "unknown enforce-eager (in Stretto it is graphs: off)"),
        ("tp: 2", "unknown tp (it does not exist here"),
        ("xyzzy: 2", "serve.yaml: unknown xyzzy"),
    ],
)
def test_a_wrong_key_of_the_file(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(Invalid) as caught:
        load_settings({"config": file}, {})
    assert says in str(caught.value)


def test_a_wrong_variable() -> None:
    environ = {
        "STRETTO_GPU_MEMORY_UTILIZATION": "0.9",
        "STRETTO_ENFORCE_EAGER": "1",
        "STRETTO_XYZZY": "1",
        "STRETTO_MODLE": "x",
    }
    of = "is set, but there is no such setting"
    assert variable_warnings(environ) == [
        f"STRETTO_ENFORCE_EAGER {of}; in Stretto it is STRETTO_GRAPHS=off",
        f"STRETTO_GPU_MEMORY_UTILIZATION {of}; in Stretto it is STRETTO_MEMORY_SHARE",
        f"STRETTO_MODLE {of}; did you mean STRETTO_MODEL?",
        f"STRETTO_XYZZY {of}",
    ]


def test_a_wrong_tuning_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--tune", "max_num_seqs=3"]) == 2
    assert "there is no tuning setting 'max_num_seqs'; in Stretto it is --max-rows" in (
        capsys.readouterr().err
    )


def test_every_setting_has_a_section() -> None:
    sections = [group for groups in SECTIONS.values() for group in groups]
    assert len(set(sections)) == len(sections)
    assert {f.metadata["group"] for f in settings_of(*RECORDS)} == set(sections)


def test_the_help_shows_every_setting_under_a_section(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = capsys.readouterr().out
    at = [shown.index(f"\n{title}:\n") for title in SECTIONS]
    assert at == sorted(at)
    for f in settings_of(*RECORDS):
        if f.metadata["group"] != "tune":
            flag = f"--{name_of(f).replace('_', '-')}"
            assert shown.index(f"\n  {flag}") > at[0], flag


@pytest.mark.parametrize("system", ["Darwin", "Windows"])
@pytest.mark.parametrize("words", [[], ["serve"], ["--help"]])
def test_on_another_system_it_names_the_container(
    system: str,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("sys.argv", ["stretto", *words])
    assert command() == 1
    [sentence] = capsys.readouterr().err.splitlines()
    assert sentence.startswith(f"stretto: it runs on Linux, and this is {system}: use WSL2")
    assert "docker build -f deploy/Containerfile" in sentence
