"""Whether this CPU does what it announces, before torch computes on it.

Some virtual machines announce AMX but trap on it: the first product of bfloat16 matrices inside
oneDNN then kills the process with "Illegal instruction". `prepare` finds that out in a child
process that may die, and limits oneDNN in this one (ONEDNN_MAX_CPU_ISA) only where it is needed.
oneDNN reads the variable when it is first used, so this comes before anything is computed:
`Source.open` calls it for every model that is loaded, the tests when they start. It costs nothing
in float32, on a GPU and on CPUs without AMX; elsewhere the answer is stored in the user's cache, by
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
OLD_VARIABLE = "DNNL_MAX_CPU_ISA"  # which oneDNN still reads
LIMIT = "AVX512_CORE_BF16"  # the highest set of instructions without AMX and float16
UNLIMITED = "ALL"
NARROW = ("bfloat16", "float16")
TRAPS = (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE)
"""Signals that end a child which met a missing instruction. Other ends have other reasons."""
PATIENCE_S = 120.0
CPUINFO = Path("/proc/cpuinfo")
STABLE = ("vendor_id", "cpu family", "model", "stepping", "flags")
"""Lines about a core in /proc/cpuinfo that do not change."""


def prepare(device: str, dtype: str) -> None:
    """Before the first tensor is computed on `device` in `dtype`: limit oneDNN if it would not
    survive otherwise."""
    if device == "cpu" and dtype in NARROW:
        limit_onednn(os.environ)


def survives(
    limit: str, command: tuple[str, ...] = (sys.executable, "-m", "stretto.cpu")
) -> bool | None:
    """Whether a child that computes under a limit lives. None: unknown (no memory, no torch, no
    time)."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", VARIABLE: limit}
    try:
        done = subprocess.run(
            command, env=env, timeout=PATIENCE_S, stdin=subprocess.DEVNULL, capture_output=True
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        log.info("the check of this CPU did not run: %s", e)
        return None
    if done.returncode == 0 or -done.returncode in TRAPS:
        return done.returncode == 0
    stderr = done.stderr[-500:].decode(errors="replace")
    log.info("the check of this CPU failed (%d): %s", done.returncode, stderr)
    return None


def limit_onednn(
    environ: MutableMapping[str, str],
    cpuinfo: Path = CPUINFO,
    probe: Callable[[str], bool | None] = survives,
) -> None:
    """Set VARIABLE in `environ` if this CPU needs it. A value that is there already is the user's,
    and stays."""
    cpu = "" if VARIABLE in environ or OLD_VARIABLE in environ else first_core(cpuinfo)
    if " amx" not in cpu:
        return
    cache = cache_file(environ, cpu)
    limit = ""
    with suppress(OSError):
        limit = cache.read_bytes()[:64].decode(errors="replace").strip()
    if limit not in (UNLIMITED, LIMIT):
        result = find_limit(probe)
        if result is None:
            log.warning("could not find out whether this CPU's AMX works: oneDNN is not limited")
            return
        limit = result
        with suppress(OSError):  # hosts that start together write the same
            cache.parent.mkdir(parents=True, exist_ok=True)
            cache.write_text(limit + "\n")
    if limit == UNLIMITED:
        log.info("this CPU's AMX works: oneDNN is not limited")
    else:
        log.warning("this CPU announces AMX but traps on it: oneDNN is limited to %s", limit)
        environ[VARIABLE] = limit


def first_core(cpuinfo: Path) -> str:
    """The STABLE lines about the first core; empty without such a file."""
    try:
        lines = cpuinfo.read_text(errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return ""
    return "\n".join(line for line in lines if line.startswith(STABLE))


def cache_file(environ: MutableMapping[str, str], cpu: str) -> Path:
    """The file is named after all that the answer depends on: another CPU, or another oneDNN, is
    checked again. Without a home directory nothing can be stored."""
    cache = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or os.devnull) / ".cache"
    digest = hashlib.sha256(f"{cpu}\n{version('torch')}".encode()).hexdigest()[:32]
    return Path(cache) / "stretto" / f"onednn-{digest}"


def find_limit(probe: Callable[[str], bool | None] = survives) -> str | None:
    """UNLIMITED if a child survives without a limit, else LIMIT; None if unknown."""
    for limit in (UNLIMITED, LIMIT):
        lived = probe(limit)
        if lived is not False:
            return limit if lived else None
    raise CpuError(
        f"this CPU dies in bfloat16, even if oneDNN is limited to {LIMIT}; use float32, "
        f"or set {VARIABLE} to skip this check"
    )


def main() -> None:
    """What models do most, in sizes for which oneDNN takes its best kernels: it compiles them for
    this CPU."""
    import resource

    import torch
    from torch.nn import functional as F

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it may die: no dump of it
    for name in NARROW:
        torch.set_default_dtype(getattr(torch, name))
        x = torch.ones(64, 256)
        for rows in (1, 5, 64):
            F.linear(x[:rows], torch.ones(512, 256), torch.ones(512))
            _ = x[:rows] @ torch.ones(256, 96)
        torch.bmm(x.view(4, 16, 256), x.view(4, 256, 16))
        F.conv1d(x[None], torch.ones(64, 64, 7))
        F.conv_transpose1d(x[None], torch.ones(64, 32, 8), stride=4)
        F.conv3d(torch.ones(4, 3, 2, 16, 16), torch.ones(64, 3, 2, 16, 16))
        q = x.view(1, 4, 64, 64)
        F.scaled_dot_product_attention(q, q, q)


if __name__ == "__main__":
    main()
