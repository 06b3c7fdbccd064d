"""The proof of a link between two machines, here between two threads: it passes when all is well,
and fails where bytes differ or the RDMA ports counted too few."""

from __future__ import annotations

import io
import json
import sys
import threading
from pathlib import Path

import pytest

from bench.connectors import machines
from stretto.transport.contract import Chunk

SMALL = {1 << 10: 6, 9 << 10: 3}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Few chunks, and the counters of a machine without RDMA."""
    monkeypatch.setattr(machines, "SIZES", tuple(SMALL))
    monkeypatch.setattr(machines, "COUNTS", SMALL)
    monkeypatch.setattr(machines, "RDMA", tmp_path)
    return tmp_path


class Pipe(io.StringIO):
    """What the receiver prints; the invitation is its second line."""

    def __init__(self) -> None:
        super().__init__()
        self.invited = threading.Event()

    def flush(self) -> None:
        if self.getvalue().count("\n") >= 2:
            self.invited.set()


def prove(monkeypatch: pytest.MonkeyPatch, out: Path, *more: str) -> tuple[int, str]:
    """Status and output of the receiver."""
    pipe = Pipe()
    status: list[int] = []
    monkeypatch.setattr(sys, "stdout", pipe)
    ours = ["listen", "--connector", "tcp", "--out", str(out), *more]
    listener = threading.Thread(target=lambda: status.append(machines.main(ours)))
    listener.start()
    assert pipe.invited.wait(60.0)
    monkeypatch.setattr(sys, "stdin", io.StringIO(pipe.getvalue().splitlines()[1] + "\n"))
    assert machines.main(["connect", *more]) == 0
    listener.join()
    return status[0], pipe.getvalue()


def test_a_link_is_proved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status, said = prove(monkeypatch, tmp_path / "out.json")
    assert status == 0
    assert said.count("16/16 equal") == 2 * len(SMALL)
    assert "proved: tcp with the default settings" in said
    found = json.loads((tmp_path / "out.json").read_text())
    assert [len(f["between_us"]) for f in found["links"]["stream"]] == [5, 2]
    assert found["problems"] == []


def test_other_bytes_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    honest = machines.Content.chunk

    def chunk(self: machines.Content, number: int, size: int) -> Chunk:
        made = honest(self, number, size)
        if number == 3:
            made.tensors = {"rows": made.tensors["rows"] ^ 1}
        return made

    monkeypatch.setattr(machines.Content, "chunk", chunk)
    status, said = prove(monkeypatch, tmp_path / "out.json")
    assert status == 1
    assert "4 chunks had other bytes than were sent" in said


def test_rdma_that_did_not_carry_the_bytes_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    status, said = prove(monkeypatch, tmp_path / "out.json", "--details", "protocol=rdma")
    assert (status, "no RDMA port of this machine counts bytes" in said) == (1, True)
    counters = tmp_path / "mlx5_0" / "ports" / "1" / "counters"
    counters.mkdir(parents=True)
    (counters / "port_rcv_data").write_text("7\n")
    (counters / "port_xmit_data").write_text("9\n")
    assert machines.rdma_bytes("rcv") == 28
    status, said = prove(monkeypatch, tmp_path / "out.json", "--details", "protocol=rdma")
    assert (status, "the RDMA ports received 0 bytes of the" in said) == (1, True)
    sent = iter((0, machines.total_bytes()))
    monkeypatch.setattr(machines, "rdma_bytes", lambda way: next(sent) if way == "rcv" else None)
    assert prove(monkeypatch, tmp_path / "out.json", "--details", "protocol=rdma")[0] == 0


def test_what_cannot_be_opened_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert machines.main(["listen", "--connector", "pigeon"]) == 1
    assert capsys.readouterr().err.startswith("not proved: ")
