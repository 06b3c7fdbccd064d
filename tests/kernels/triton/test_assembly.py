"""What kernels do in assembly, which Triton's interpreter cannot run: here a reader of the few
instructions does, for every byte, beside PyTorch."""

from __future__ import annotations

import re

import pytest
import torch

from stretto.kernels.reference.quantized import FLOAT8

linear = pytest.importorskip("stretto.kernels.triton.linear")
packed = pytest.importorskip("stretto.kernels.triton.packed")

Registers = dict[str, list[int]]


def halves(word: int) -> list[torch.Tensor]:
    bits = torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32).to(torch.uint16)
    return list(bits.view(torch.bfloat16))


def joined(low: torch.Tensor, high: torch.Tensor) -> int:
    bits = torch.stack((low, high)).to(torch.bfloat16).view(torch.uint16).to(torch.int64)
    return int(bits[0] | bits[1] << 16)


def fma(a: int, b: int, c: int) -> int:
    """Two in one register; products of bfloat16 are exact in float64, so it rounds once."""
    x, y, z = (halves(word) for word in (a, b, c))
    return joined(*(x[i].double() * y[i].double() + z[i].double() for i in (0, 1)))


def prmt(a: int, b: int, selector: int) -> int:
    source = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    found = []
    for i in range(4):
        choice = selector >> 4 * i & 15
        byte = source[choice & 7]
        found.append((0xFF if byte & 0x80 else 0) if choice & 8 else byte)
    return int.from_bytes(bytes(found), "little")


def lop3(a: int, b: int, c: int, table: int) -> int:
    assert table == 0xEA, "(a and b) or c"
    return a & b | c


def run(text: str, operands: dict[int, int]) -> dict[int, int]:
    """One thread's words after the instructions, by operand."""
    known = {f"${i}": word for i, word in operands.items()}
    does = {
        "mov.b32": lambda a: a, "prmt.b32": prmt, "lop3.b32": lop3, "fma.rn.bf16x2": fma,
        "shr.u32": lambda a, n: a >> n, "shl.b32": lambda a, n: a << n & 0xFFFFFFFF,
        "and.b32": lambda a, b: a & b,
    }  # fmt: skip
    for line in re.findall(r"([a-z][a-z0-9.]+) ([^;{}]+);", text):
        instruction, rest = line
        to, *inputs = rest.replace(" ", "").split(",")
        known[to] = does[instruction](*(known[i] if i in known else int(i, 0) for i in inputs))
    return {int(name[1:]): word for name, word in known.items() if name.startswith("$")}


def code(text: object) -> str:
    """Without the declarations."""
    return re.sub(r"\.reg [^;]+;", "", str(getattr(text, "value", text)))


def test_every_byte_of_float8() -> None:
    """But NaN, which no weight may be."""
    for first in range(0, 256, 4):
        source = torch.arange(first, first + 4, dtype=torch.uint8)
        word = int.from_bytes(bytes(source.tolist()), "little")
        found = run(code(linear.WIDEN), {2: word})
        wide = torch.stack([*halves(found[0]), *halves(found[1])])
        wanted = source.view(FLOAT8).to(torch.bfloat16)
        keep = wanted.isfinite()
        assert torch.equal(wide[keep], wanted[keep])
        assert torch.equal(wide[keep].signbit(), wanted[keep].signbit())


@pytest.mark.parametrize("zero", [-8, 0, 7, 8])
@pytest.mark.parametrize("scale", [0.0123, -0.7, 2.0**-24])
def test_every_byte_of_two_nibbles(zero: int, scale: float) -> None:
    narrow = torch.tensor(scale).bfloat16()
    two_scales = joined(narrow, narrow)
    less = torch.tensor(-136.0 - zero)
    two_less = joined(less, less)
    given = {5: two_less, 6: two_less, 7: two_scales, 8: two_scales}
    for first in range(0, 256, 4):
        source = torch.arange(first, first + 4, dtype=torch.uint8)
        word = int.from_bytes(bytes(source.tolist()), "little")
        found = run(code(packed.NIBBLES), {4: word, **given})
        low = torch.stack([*halves(found[0]), *halves(found[1])])
        high = torch.stack([*halves(found[2]), *halves(found[3])])
        for numbers, wide in ((source & 15, low), (source >> 4, high)):
            wanted = (numbers.float() - 8 - zero) * narrow.float()
            assert torch.equal(wide, wanted.bfloat16())
