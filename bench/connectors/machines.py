"""Proves a link between two machines: what arrives is what was sent, how fast, and by which wire.

On the receiving machine, with its own address (Mooncake's devices: `rdma link` lists them):

    python -m bench connectors --parts machines listen --host 10.0.0.1 \\
        --connector mooncake --details protocol=rdma,device=mlx5_0 --out rdma.json

It prints an invitation, one line. On the sending machine, with its own address and device:

    python -m bench connectors --parts machines connect --host 10.0.0.2 \\
        --details protocol=rdma,device=mlx5_0

which reads that line from its standard input, so that the link's secret is in no command line. The
receiver compares the content of the first chunks of each size, then measures two links: one with a
single slot, where the time between two chunks is a round trip (the chunk there, its slot back), and
one with several, where chunks stream. Both ends say how many bytes the machine's RDMA ports counted
meanwhile: with `protocol=rdma` that must be at least what was sent. Exit status 0: proved."""

from __future__ import annotations

import argparse
import base64
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch

from bench.harness.env import describe
from bench.harness.results import parser, quantile, write
from stretto.errors import StrettoError
from stretto.transport import wire
from stretto.transport.contract import Chunk, Endpoint, LinkClosed, LinkOptions, Receiver, Sender
from stretto.transport.registry import Registry
from stretto.types import SECRET_BYTES, Mark, RequestId, Span

SIZES = (4 << 10, 256 << 10, 8 << 20)
COUNTS = {4 << 10: 2000, 256 << 10: 400, 8 << 20: 40}  # measured chunks
CHECKED = 16  # chunks of each size whose content is compared
SLOTS = {"round trip": 1, "stream": 8}
SLOT_BYTES = (8 << 20) + (1 << 16)
WAIT_S = 60.0
START_S = 600.0  # in which somebody pastes the invitation
COUNTERS = "*/ports/*/counters/"
RDMA = Path("/sys/class/infiniband")
_MARGIN = 4096


class Invitation(msgspec.Struct, frozen=True):
    secret: bytes
    endpoints: dict[str, Endpoint]

    def line(self) -> str:
        return base64.urlsafe_b64encode(msgspec.msgpack.encode(self)).decode()

    @classmethod
    def read(cls, line: str) -> Invitation:
        return msgspec.msgpack.decode(base64.urlsafe_b64decode(line.strip()), type=cls)


@dataclass(slots=True)
class Content:
    """Random bytes that both machines can make: those of each chunk begin elsewhere."""

    _bytes: torch.Tensor | None = None

    def of(self, number: int, size: int) -> torch.Tensor:
        if self._bytes is None:
            source = torch.Generator().manual_seed(0)
            shape = (max(SIZES) + _MARGIN,)
            self._bytes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=source)
        start = number * 61 % _MARGIN
        return self._bytes[start : start + size]

    def chunk(self, number: int, size: int) -> Chunk:
        rows = {"rows": self.of(number, size)}
        span = Span(number, number + 1)
        return wire.chunk(RequestId("machines"), span, Mark.MORE, rows, seq=number)

    def matches(self, chunk: Chunk, number: int, size: int) -> bool:
        same = torch.equal(chunk.tensors["rows"], self.of(number, size))
        return same and chunk.header.seq == number


def rdma_bytes(way: str) -> int | None:
    """What all RDMA ports of this machine have sent (`xmit`) or received (`rcv`). None: no port
    counts. The counters are in units of four bytes."""
    files = sorted(RDMA.glob(f"{COUNTERS}port_{way}_data"))
    return sum(4 * int(file.read_text()) for file in files) if files else None


def counted(way: str, before: int | None) -> int | None:
    now = rdma_bytes(way)
    return None if before is None or now is None else now - before


def total_bytes() -> int:
    return len(SLOTS) * sum(size * (CHECKED + COUNTS[size]) for size in SIZES)


def options(args: argparse.Namespace, slots: int, secret: bytes) -> LinkOptions:
    details = dict(part.split("=", 1) for part in args.details.split(",") if part)
    return LinkOptions(
        slots=slots, slot_bytes=SLOT_BYTES, secret=secret, host=args.host, details=details
    )


def send(senders: dict[str, Sender]) -> None:
    content = Content()
    for sender in senders.values():
        for size in SIZES:
            for number in range(CHECKED + COUNTS[size]):
                if not sender.put(content.chunk(number, size), WAIT_S):
                    raise StrettoError(f"no chunk was taken in {WAIT_S:g} s")


def take(receiver: Receiver, timeout: float) -> Chunk:
    chunk = receiver.take(timeout)
    if chunk is None:
        raise StrettoError(f"no chunk came in {timeout:g} s")
    return chunk


def receive(receiver: Receiver, size: int, content: Content, first_s: float) -> dict[str, Any]:
    """All chunks of one size: how many had other bytes, and when the measured ones came."""
    wrong = 0
    for number in range(CHECKED):
        chunk = take(receiver, WAIT_S if number else first_s)
        wrong += not content.matches(chunk, number, size)
        chunk.release()
    came = []
    for _ in range(COUNTS[size]):
        chunk = take(receiver, WAIT_S)
        came.append(time.perf_counter_ns())
        chunk.release()
    between_us = [(b - a) / 1000 for a, b in pairwise(came)]
    rate = size * len(between_us) / (came[-1] - came[0])
    return {"bytes": size, "wrong": wrong, "between_us": between_us, "gb_s": rate}


def shown(link: str, found: dict[str, Any]) -> str:
    us = found["between_us"]
    head = f"{link:10} {found['bytes'] >> 10:6} KiB  {CHECKED - found['wrong']}/{CHECKED} equal"
    times = f"p50 {quantile(us, 0.5):9.1f} us  p99 {quantile(us, 0.99):9.1f} us"
    return f"{head}  between chunks {times}  {found['gb_s']:6.2f} GB/s"


def problems(result: dict[str, Any], rdma: bool) -> list[str]:
    wrong = sum(found["wrong"] for link in result["links"].values() for found in link)
    found = [f"{wrong} chunks had other bytes than were sent"] if wrong else []
    came = result["rdma_bytes_received"]
    if rdma and came is None:
        found.append("no RDMA port of this machine counts bytes")
    elif rdma and came is not None and came < total_bytes():
        found.append(f"the RDMA ports received {came:,} bytes of the {total_bytes():,} sent")
    return found


def listen(args: argparse.Namespace) -> int:
    secret = secrets.token_bytes(SECRET_BYTES)
    connector = Registry().get(args.connector)
    receivers: dict[str, Receiver] = {}
    result: dict[str, Any] = {"env": describe(), "connector": args.connector, "links": {}}
    result["details"] = args.details
    before = rdma_bytes("rcv")
    try:
        for link, slots in SLOTS.items():
            name = f"machines-{link.replace(' ', '-')}"
            receivers[link] = connector.listen(name, options(args, slots, secret))
        endpoints = {link: receiver.endpoint for link, receiver in receivers.items()}
        print(f"paste this into the sender's input:\n{Invitation(secret, endpoints).line()}")
        sys.stdout.flush()
        content = Content()
        for link, receiver in receivers.items():
            result["links"][link] = []
            for size in SIZES:
                found = receive(receiver, size, content, START_S)
                result["links"][link].append(found)
                print(shown(link, found), flush=True)
    finally:
        for receiver in receivers.values():
            receiver.close()
    result["rdma_bytes_received"] = counted("rcv", before)
    result["problems"] = problems(result, "protocol=rdma" in args.details)
    write(args.out, result)
    print(f"RDMA ports received: {result['rdma_bytes_received']}; sent: {total_bytes():,} bytes")
    way = args.details or "the default settings"
    print("\n".join(result["problems"]) or f"proved: {args.connector} with {way}")
    return int(bool(result["problems"]))


def connect(args: argparse.Namespace) -> int:
    print("the invitation:", file=sys.stderr)
    invitation = Invitation.read(sys.stdin.readline())
    before = rdma_bytes("xmit")
    senders: dict[str, Sender] = {}
    try:
        for link, endpoint in invitation.endpoints.items():
            asked = options(args, endpoint.slots, invitation.secret)
            senders[link] = Registry().get(endpoint.connector).connect(endpoint, asked)
        send(senders)
        wait_for_the_end(senders)
    finally:
        for sender in senders.values():
            sender.close()
    print(f"sent {total_bytes():,} bytes; RDMA ports sent: {counted('xmit', before)}")
    return 0


def wait_for_the_end(senders: dict[str, Sender]) -> None:
    """The receiver closes its ends when it has all chunks."""
    try:
        while True:
            for sender in senders.values():
                sender.check()
            time.sleep(0.05)
    except LinkClosed:
        pass


def main(given: Sequence[str]) -> int:
    p = parser("connectors --parts machines", __doc__)
    p.add_argument("end", choices=("listen", "connect"))
    p.add_argument("--host", default="127.0.0.1", help="this machine's address on that network")
    p.add_argument("--connector", default="mooncake", help="of the listener: mooncake or tcp")
    p.add_argument("--details", default="", help="the connector's: protocol=rdma,device=mlx5_0")
    args = p.parse_args(given)
    try:
        return listen(args) if args.end == "listen" else connect(args)
    except StrettoError as e:
        print(f"not proved: {e}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
