"""Whether this CPU does what it announces, before torch computes on it.

Some virtual machines announce AMX but trap on it: the first product of bfloat16 matrices inside
oneDNN then kills the process with "Illegal instruction". `prepare` finds that out in a child
process that may die, and limits oneDNN in this one (ONEDNN_MAX_CPU_ISA) only where it is needed.
oneDNN reads the variable when it is first used, so this comes before anything is computed:
`Source.open` calls it for every model that is loaded, the tests when they start. It costs nothing
in float32, on a GPU and on CPUs without AMX; elsewhere the answer is kept in the user's cache, by
CPU and version of torch. `python -m stretto.cpu` is the child."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from stretto.errors import CpuError

log = logging.getLogger(__name__)

VARIABLE = "ONEDNN_MAX_CPU_ISA"
OTHER_NAMES = ("DNNL_MAX_CPU_ISA",)  # an older name, which oneDNN still reads
LIMIT = "AVX512_CORE_BF16"  # the highest set of instructions without AMX and float16
UNLIMITED = "ALL"
NARROW = ("bfloat16", "float16")
TRAPS = (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE)
"""How a child ends that ran into a missing instruction. Other ends have other reasons."""
PATIENCE_S = 120.0
CPUINFO = Path("/proc/cpuinfo")

Probe = Callable[[str], bool | None]
"""Computes under a limit, in a child: whether it lived; None: unknown (no memory, no
torch, no time)."""


def prepare(device: str, dtype: str) -> None:
    """Before the first tensor is computed on `device` in `dtype`: limit oneDNN if it would not
    survive otherwise."""
    if device == "cpu" and dtype in NARROW:
        limit_onednn(os.environ)


def limit_onednn(
    environ: MutableMapping[str, str],
    cpuinfo: Path = CPUINFO,
    cache: Path | None = None,
    probe: Probe | None = None,
) -> None:
    """Set VARIABLE in `environ` if this CPU needs it. A value that is there already is the user's,
    and stays."""
    if any(name in environ for name in (VARIABLE, *OTHER_NAMES)):
        return
    cpu = first_core(cpuinfo)
    if " amx" not in cpu:
        return
    kept = (cache or folder(environ)) / f"onednn-{digest(cpu)}"
    limit = recall(kept)
    if limit is None:
        limit = find_limit(probe or compute)
        if limit is None:
            log.warning("could not find out whether this CPU's AMX works: oneDNN is not limited")
            return
        keep(kept, limit)
    if limit == UNLIMITED:
        log.info("this CPU's AMX works: oneDNN is not limited")
    else:
        log.warning("this CPU announces AMX but traps on it: oneDNN is limited to %s", limit)
        environ[VARIABLE] = limit


def find_limit(probe: Probe) -> str | None:
    """UNLIMITED if a child survives without a limit, else LIMIT; None if unknown."""
    for limit in (UNLIMITED, LIMIT):
        lived = probe(limit)
        if lived is None:
            return None
        if lived:
            return limit
    raise CpuError(
        f"this CPU dies in bfloat16, even if oneDNN is limited to {LIMIT}; use float32, "
        f"or set {VARIABLE} to skip this check"
    )


def compute(
    limit: str, command: tuple[str, ...] = (sys.executable, "-m", "stretto.cpu")
) -> bool | None:
    """Run the child under a limit."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", VARIABLE: limit}
    try:
        done = subprocess.run(
            command, env=env, timeout=PATIENCE_S, stdin=subprocess.DEVNULL, capture_output=True
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        log.info("the check of this CPU did not run: %s", e)
        return None
    if done.returncode == 0:
        return True
    if -done.returncode in TRAPS:
        return False
    stderr = done.stderr[-500:].decode(errors="replace")
    log.info("the check of this CPU failed (%d): %s", done.returncode, stderr)
    return None


def main() -> None:
    """What models do most, in sizes for which oneDNN takes its best kernels: it compiles them for
    this CPU."""
    import resource

    import torch
    from torch.nn import functional as F

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it may die: no dump of it
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.ones(64, 256, dtype=dtype)
        for rows in (1, 5, 64):
            F.linear(x[:rows], torch.ones(512, 256, dtype=dtype), torch.ones(512, dtype=dtype))
            _ = x[:rows] @ torch.ones(256, 96, dtype=dtype)
        torch.bmm(x.view(4, 16, 256), x.view(4, 256, 16))
        F.conv1d(x[None], torch.ones(64, 64, 7, dtype=dtype))
        F.conv_transpose1d(x[None], torch.ones(64, 32, 8, dtype=dtype), stride=4)
        F.conv3d(
            torch.ones(4, 3, 2, 16, 16, dtype=dtype), torch.ones(64, 3, 2, 16, 16, dtype=dtype)
        )
        q = x.view(1, 4, 64, 64)
        F.scaled_dot_product_attention(q, q, q)


def first_core(cpuinfo: Path) -> str:
    """What the kernel lists of the first core and does not change; nothing without such a file."""
    try:
        lines = cpuinfo.read_text(errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return ""
    stable = ("vendor_id", "cpu family", "model", "stepping", "flags")
    return "\n".join(line for line in lines if line.startswith(stable))


def digest(cpu: str) -> str:
    """Of all that the answer may depend on: another CPU, or another oneDNN, is asked anew."""
    return hashlib.sha256(f"{cpu}\n{version('torch')}".encode()).hexdigest()[:32]


def folder(environ: MutableMapping[str, str]) -> Path:
    """Without a home nothing can be kept."""
    home = Path(environ.get("HOME") or os.devnull)
    return Path(environ.get("XDG_CACHE_HOME") or home / ".cache") / "stretto"


def recall(kept: Path) -> str | None:
    """What was found before; None if nothing was, or nothing that makes sense."""
    try:
        word = kept.read_bytes()[:64].decode(errors="replace").strip()
    except OSError:
        return None
    return word if word in (UNLIMITED, LIMIT) else None


def keep(kept: Path, limit: str) -> None:
    """Hosts that start together may each find out; what they write is the same."""
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(limit + "\n")


if __name__ == "__main__":
    main()
