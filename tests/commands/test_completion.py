"""The completion scripts, asked as the shells ask them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from stretto.cli import main

pytest.importorskip("shtab", reason="`make setup-test` installs it")

BASH = """
source stretto.bash
ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_stretto; echo "${COMPREPLY[@]}"; }
ask stretto sp
ask stretto serve --por
ask stretto serve --dtype bf
ask stretto serve --config ser
ask stretto serve check
ask stretto quantize check
ask stretto quantize --format fp8-b
"""
FISH = """
source stretto.fish
for words in 'sp' 'serve --por' 'serve --dtype bf' 'serve --config ser' 'serve check' \
    'quantize check' 'quantize --format fp8-b'
    complete -C "stretto $words" | cut -f1
end
"""


@pytest.mark.parametrize(("shell", "script"), [("bash", BASH), ("fish", FISH), ("zsh", "")])
def test_a_shell_completes_commands_flags_and_values(
    shell: str,
    script: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    monkeypatch.chdir(tmp_path)
    assert main(["completion", shell]) == 0
    (tmp_path / f"stretto.{shell}").write_text(capsys.readouterr().out)
    (tmp_path / "serve.yaml").touch()
    (tmp_path / "checkpoint").mkdir()
    if shell == "zsh":  # its completion needs a terminal
        subprocess.run(["zsh", "-n", "stretto.zsh"], check=True)
        return
    done = subprocess.run([shell, "-c", script], capture_output=True, text=True, check=True)
    found = [line.strip().rstrip("/") for line in done.stdout.splitlines()]
    assert found[:5] == ["speak", "--port", "bfloat16", "serve.yaml", "checkpoint"]
    assert found[5:] == ["checkpoint", "fp8-block"]
