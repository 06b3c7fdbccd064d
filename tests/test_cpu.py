"""Whether oneDNN is limited, decided both ways by children that die and children that live."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from stretto import cpu
from stretto.errors import CpuError
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.load import Source

WORDS = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Some CPU @ 2.00GHz
stepping\t: 8
cpu MHz\t\t: {mhz}
flags\t\t: {flags}

processor\t: 1
flags\t\t: other
"""


def cpuinfo(
    path: Path, flags: str = "avx512f avx512_bf16 amx_bf16 amx_tile", mhz: str = "2000"
) -> Path:
    path.write_text(WORDS.format(flags=flags, mhz=mhz))
    return path


@dataclass
class Machine:
    """A machine whose children die but under these limits."""

    folder: Path
    lives: tuple[str, ...]
    flags: str = "avx512f avx512_bf16 amx_bf16 amx_tile"
    probed: list[str] = field(default_factory=list)
    environ: dict[str, str] = field(default_factory=dict)

    def probe(self, limit: str) -> bool:
        self.probed.append(limit)
        return limit in self.lives

    def decide(self, probe: Callable[[str], bool | None] | None = None) -> str | None:
        info = cpuinfo(self.folder / "cpuinfo", self.flags)
        self.environ["XDG_CACHE_HOME"] = str(self.folder / "cache")
        cpu.limit_onednn(self.environ, info, probe or self.probe)
        return self.environ.get(cpu.VARIABLE)

    def stored(self) -> list[str]:
        return [p.read_text().strip() for p in (self.folder / "cache" / "stretto").glob("onednn-*")]


BOTH = [cpu.UNLIMITED, cpu.LIMIT]


def test_a_cpu_that_does_what_it_says_is_not_limited(tmp_path: Path) -> None:
    machine = Machine(tmp_path, tuple(BOTH))
    assert machine.decide() is None
    assert machine.probed == [cpu.UNLIMITED]
    assert machine.stored() == [cpu.UNLIMITED]


def test_a_cpu_that_traps_is_limited(tmp_path: Path) -> None:
    machine = Machine(tmp_path, (cpu.LIMIT,))
    assert machine.decide() == cpu.LIMIT
    assert machine.probed == BOTH
    assert machine.stored() == [cpu.LIMIT]


@pytest.mark.parametrize("lives", BOTH)
def test_it_is_found_out_once(tmp_path: Path, lives: str) -> None:
    first, second = Machine(tmp_path, (lives,)), Machine(tmp_path, ())
    assert first.decide() == second.decide()
    assert second.probed == []


def test_another_cpu_or_torch_is_asked_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key(**changes: str) -> Path:
        return cpu.cache_file({}, cpu.first_core(cpuinfo(tmp_path / "cpuinfo", **changes)))

    base = key()
    assert key(mhz="1800") == base
    assert key(flags="avx512f amx_tile") != base
    monkeypatch.setattr(cpu, "version", lambda _: "99.0")
    assert key() != base


def test_no_limit_works(tmp_path: Path) -> None:
    machine = Machine(tmp_path, ())
    with pytest.raises(CpuError, match="use float32"):
        machine.decide()
    assert machine.probed == BOTH
    assert machine.stored() == []


@pytest.mark.parametrize("name", [cpu.VARIABLE, "DNNL_MAX_CPU_ISA"])
def test_the_users_value_stays(tmp_path: Path, name: str) -> None:
    machine = Machine(tmp_path, (), environ={name: "SSE41"})
    machine.decide()
    assert machine.environ[name] == "SSE41"
    assert {cpu.VARIABLE, "DNNL_MAX_CPU_ISA"} & machine.environ.keys() == {name}
    assert machine.probed == []


@pytest.mark.parametrize("flags", ["", "avx2", "avx512f avx512_bf16 avx512_fp16"])
def test_without_amx_nothing_is_asked_or_written(tmp_path: Path, flags: str) -> None:
    machine = Machine(tmp_path, (), flags=flags)
    assert machine.decide() is None
    assert machine.probed == []
    assert not (tmp_path / "cache").exists()
    cpu.limit_onednn(machine.environ, tmp_path / "nowhere", machine.probe)
    assert machine.probed == []


@pytest.mark.parametrize(
    ("device", "dtype", "checked"),
    [
        ("cpu", "bfloat16", True), ("cpu", "float16", True), ("cpu", "float32", False), ("cuda",
        "bfloat16", False),
    ],
)  # fmt: skip
def test_costs_nothing_where_it_cannot_matter(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: str, checked: bool
) -> None:
    calls: list[object] = []
    monkeypatch.setattr(cpu, "limit_onednn", calls.append)
    cpu.prepare(device, dtype)
    assert calls == [os.environ] * checked


# -- the cache


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"AVX", b"ALL" * 9999, None])
def test_a_cache_that_makes_no_sense_is_written_anew(tmp_path: Path, content: bytes | None) -> None:
    Machine(tmp_path, (cpu.LIMIT,)).decide()
    [cache] = (tmp_path / "cache" / "stretto").glob("onednn-*")
    cache.unlink()
    if content is None:
        cache.mkdir()  # not even a file
    else:
        cache.write_bytes(content)
    second = Machine(tmp_path, (cpu.LIMIT,))
    assert second.decide() == cpu.LIMIT
    assert second.probed == BOTH
    if content is not None:
        assert second.stored() == [cpu.LIMIT]


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    for _ in range(2):
        machine = Machine(tmp_path, (cpu.LIMIT,))
        assert machine.decide() == cpu.LIMIT
        assert machine.probed == BOTH


def test_nobodys_home() -> None:
    environ = {"XDG_CACHE_HOME": "/given", "HOME": "/home"}
    assert cpu.cache_file(environ, "").parent == Path("/given/stretto")
    assert cpu.cache_file({"HOME": "/home"}, "").parent == Path("/home/.cache/stretto")
    assert cpu.cache_file({}, "").parent == Path("/dev/null/.cache/stretto"), "nothing can be kept"


# -- what is said


@pytest.mark.parametrize(
    ("lives", "words"),
    [(cpu.UNLIMITED, "works"), (cpu.LIMIT, "traps on it"), (None, "could not")],
)
def test_one_line_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lives: str | None, words: str
) -> None:
    caplog.set_level(logging.INFO)
    machine = Machine(tmp_path, (lives,) if lives else ())
    machine.decide(None if lives else lambda _: None)
    [record] = caplog.records
    assert words in record.getMessage()
    assert "\n" not in record.getMessage()
    assert machine.stored() == ([lives] if lives else []), "what could not be told is not kept"


# -- children


def child(script: str) -> tuple[str, ...]:
    return (
        sys.executable,
        "-c",
        f"import os, signal, sys\nlimit = os.environ.get({cpu.VARIABLE!r})\n{script}",
    )


KILL = "os.kill(os.getpid(), signal.{})"


@pytest.mark.parametrize(
    ("script", "lived"),
    [
        ("", True),
        (KILL.format("SIGILL"), False),
        (KILL.format("SIGSEGV"), False),
        (KILL.format("SIGKILL"), None),  # no memory
        ("sys.exit('No module named torch')", None),
    ],
    ids=["lives", "illegal", "segfault", "killed", "fails"],
)
def test_how_a_child_ends(script: str, lived: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cpu.VARIABLE, raising=False)
    assert cpu.survives(cpu.UNLIMITED, child(script)) is lived


def test_a_child_that_dies_without_the_limit_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(cpu.VARIABLE, raising=False)
    command = child(f"if limit != {cpu.LIMIT!r}: " + KILL.format("SIGILL"))
    machine = Machine(tmp_path, ())
    assert machine.decide(lambda limit: cpu.survives(limit, command)) == cpu.LIMIT


def test_a_child_that_cannot_be_started_or_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu.survives(cpu.UNLIMITED, ("/nowhere/python",)) is None
    monkeypatch.setattr(cpu, "PATIENCE_S", 0.01)
    assert cpu.survives(cpu.UNLIMITED, child("signal.pause()")) is None


def test_the_real_child_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cpu.VARIABLE, raising=False)
    assert cpu.find_limit() in BOTH


# -- in time: after imports, before anything is computed


LIMITED = """
import os, sys
os.environ.pop("ONEDNN_MAX_CPU_ISA", None)
from stretto import cpu
cpu.limit_onednn = lambda environ: environ.update(ONEDNN_MAX_CPU_ISA="AVX2")
{use}
import torch
print(os.environ.get("ONEDNN_MAX_CPU_ISA"), torch.ops.mkldnn._is_mkldnn_bf16_supported())
"""


def limited(use: str) -> str:
    """Whether the variable is set after `use`, and whether oneDNN goes by it: under AVX2 it takes
    no bfloat16."""
    code = LIMITED.format(use=use)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN"
)
def test_tests_decide_before_anything_is_computed() -> None:
    assert limited("import tests.conftest") == "AVX2 False"


@pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN"
)
def test_a_host_decides_before_anything_is_computed(tiny_dir: Path) -> None:
    load = (
        "from stretto.models.qwen3_omni.load import Source\nimport stretto.stage.host.host, torch\n"
    )
    load += f"Source.open({str(tiny_dir)!r}, 'cpu', "
    assert limited(load + "torch.bfloat16)") == "AVX2 False"
    assert limited(load + "None)").startswith("None")


def test_every_source_of_weights_asks(
    tiny_config: OmniConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, str]] = []
    monkeypatch.setattr(cpu, "prepare", lambda *what: calls.append(what))
    for dtype in (None, torch.bfloat16, torch.float16):
        Source.open(tiny_config, "cpu", dtype, "dummy")
    assert calls == [("cpu", "float32"), ("cpu", "bfloat16"), ("cpu", "float16")]
