"""The memory plan of a host: what its stages will take, looked at before anything is loaded.

Called by a family when it builds its stages, on the host's main thread. KV pools of open size get
what the rest leaves (`share_out`). A plan that does not fit is refused with its numbers and with
the settings that would make it smaller."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from stretto.config.engine import HostSettings
from stretto.errors import StageDead

GIB = 1 << 30
RESERVE = {"cuda": 2 * GIB, "cpu": GIB // 4}
"""Left for what comes and goes: activations of a step, graphs, workspaces of libraries."""


SPARE = 16
"""Pools that take what is left leave this part of the device's memory besides: graphs of large
steps keep theirs."""


class DoesNotFit(StageDead):
    """The host's stages need more memory than there is."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Bytes that one stage will take."""

    stage: str
    weights: int
    state: int  # KV pool, or slots of streams
    transient_bytes: int = 0  # needed while it loads only
    flags_hint: str = ""  # the flags that `state` follows
    alternative: str = ""  # what would make the weights smaller, with its flag
    # by how much; computed only when the plan does not fit
    saved_bytes: Callable[[], int] = field(default=lambda: 0, compare=False)

    @property
    def total(self) -> int:
        return self.weights + self.state


def needed(plans: Sequence[StagePlan]) -> int:
    """The most that is taken at any time: stages load one after the other."""
    peak = loaded = 0
    for p in plans:
        peak = max(peak, loaded + p.total + p.transient_bytes)
        loaded += p.total
    return peak


def check(
    plans: Sequence[StagePlan],
    free: int,
    reserve: int,
    where: str,
    card: int | None = None,
    others: bool = False,
) -> None:
    """Raise `DoesNotFit` with the numbers if the stages and the reserve are more than is free.
    `card`: what such a card has, where the device is one. `others`: other stages of the pipeline
    are in other hosts."""
    need = needed(plans) + reserve
    if need <= free:
        return
    largest = max(plans, key=lambda p: p.state)
    advice = []
    if largest.flags_hint:
        advice.append(f"lower {largest.flags_hint} (now {size(largest.state)})")
    for p in plans:
        if p.alternative:
            less = need - p.saved_bytes()
            advice.append(
                f"{p.alternative}: {size(less)}, which "
                f"{'fits' if less <= free else 'does not fit alone'}"
            )
    if card is not None and need <= card:
        advice.append(f"or use a card that nothing else uses: such a one has {size(card)}")
    elif card is not None:
        advice.append(_split(plans, card - reserve, others))
    raise DoesNotFit(
        f"{', '.join(map(_describe, plans))} and {size(reserve)} of reserve are {size(need)}, but "
        f"{where} has {size(free)} free" + ("; " if advice else "") + ", ".join(advice)
    )


def _describe(p: StagePlan) -> str:
    loading = f", while loading {size(p.transient_bytes)}" if p.transient_bytes else ""
    total = size(p.total + p.transient_bytes)
    return f"{p.stage} {total} (weights {size(p.weights)}, state {size(p.state)}{loading})"


def _split(plans: Sequence[StagePlan], room: int, others: bool) -> str:
    """Which placement on cards of this size would fit: the largest stages alone, as few cards as
    do."""
    order = sorted(plans, key=needed_alone)
    for rest in range(len(order) - 1, 0, -1):
        groups = [[p] for p in reversed(order[rest:])] + [order[:rest]]
        if all(needed(group) <= room for group in groups):
            hosts = ["+".join(p.stage for p in group) for group in groups]
            if others:  # the flag names them too, and where they are we do not know
                return f"or part {' and '.join(hosts)} in --placement, each on such a card"
            placement = ", ".join(f"{host}@{i}" for i, host in enumerate(hosts))
            return (
                f'or use {len(groups)} such cards: --placement "{placement}" (with --backend ray '
                f"without @)"
            )
    return "and no --placement on several such cards fits"


def needed_alone(plan: StagePlan) -> int:
    return plan.total + plan.transient_bytes


def size(count: int) -> str:
    for unit, one in (("GiB", GIB), ("MiB", 1 << 20)):
        if count >= one:
            return f"{count / one:.1f} {unit}"
    return f"{count / 1024:.0f} KiB"


def share_out(
    plan: Callable[[Mapping[str, int]], Sequence[StagePlan]],
    open_pools: Collection[str],
    s: HostSettings,
    room: int,
) -> int:
    """Blocks for each pool of open size: they share what the rest of the stages leaves of `room`
    bytes, so that each holds as many tokens as the other. None gets more than `max_rows` requests
    of full length can use, nor less than one of them needs (whether that fits is for `check` to
    say). `plan` makes the stages' plans for given pools."""
    one = -(-s.max_context // s.block_size)
    if not open_pools:
        return one
    zero, ten = (plan(dict.fromkeys(open_pools, n)) for n in (0, 10))
    each = (
        sum(b.state - a.state for a, b in zip(zero, ten, strict=True) if a.stage in open_pools) / 10
    )
    return max(one, min(int((room - needed(zero)) / each), one * s.max_rows))


def room_for_pools(device: torch.device, hosts: int = 1, share: float = 1.0) -> int:
    """Bytes on a GPU that weights and pools may take of all `hosts` that are still to load
    there."""
    _, total = torch.cuda.mem_get_info(device)
    return free_memory(device, share) - hosts * RESERVE["cuda"] - int(share * total) // SPARE


def card_memory(device: torch.device, share: float = 1.0) -> int | None:
    """Bytes that this process could take on such a card if nobody else used it; None: it is no
    card."""
    return int(share * torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else None


def free_memory(device: torch.device, share: float = 1.0) -> int:
    """Bytes that this process could take on a device now; of a GPU, at most its share."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return min(free, int(share * total))
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    group = Path("/sys/fs/cgroup")
    if (group / "memory.max").exists() and (
        limit := (group / "memory.max").read_text().strip()
    ) != "max":
        free = min(
            free,
            group_free(
                int(limit),
                (group / "memory.current").read_text(),
                (group / "memory.stat").read_text(),
            ),
        )
    return free


def group_free(limit: int, current: str, stat: str) -> int:
    """What a container may still take: files that it has read count as used, but make room when
    asked."""
    fields = dict(line.split() for line in stat.splitlines())
    return limit - int(current) + int(fields["active_file"]) + int(fields["inactive_file"])
