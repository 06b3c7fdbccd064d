"""Which stages share a host, and the device that a host names: it sees only the card that it uses.
Pure; imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from stretto.errors import Invalid
from stretto.hardware import VISIBLE, card_of

DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?")


@dataclass(frozen=True, slots=True)
class HostPlace:
    """One host of a placement: its stages in data-flow order, and where they run."""

    stages: tuple[str, ...]
    # None: as the settings say; with replicas, one for each of them in turn, joined by |
    device: str | None = None

    @property
    def name(self) -> str:
        return "+".join(self.stages)

    def of_replica(self, number: int) -> HostPlace:
        """This host in one replica, with the device of that replica alone."""
        if self.device is None:
            return self
        devices = self.device.split("|")
        return replace(self, device=devices[number % len(devices)])


Placement = Literal["one", "two", "processes"] | tuple[HostPlace, ...]
"""Which stages share a host: all of them, the first one and the rest, each alone, or as named."""


def places(placement: Placement, stages: Sequence[str]) -> tuple[HostPlace, ...]:
    """The hosts of a pipeline with these stages."""
    match placement:
        case "one":
            return (HostPlace(tuple(stages)),)
        case "two" if len(stages) > 1:
            return (HostPlace((stages[0],)), HostPlace(tuple(stages[1:])))
        case "two" | "processes":
            return tuple(HostPlace((stage,)) for stage in stages)
    named = [s for host in placement for s in host.stages]
    if sorted(named) != sorted(stages):
        text = ", ".join(host.name for host in placement)
        raise Invalid(
            f"a placement must name each of {', '.join(stages)} once, got {text!r}", "placement"
        )
    order = {stage: i for i, stage in enumerate(stages)}
    return tuple(
        replace(host, stages=tuple(sorted(host.stages, key=order.__getitem__)))
        for host in placement
    )


# ---- as text


def parse_placement(text: str) -> Placement:
    """`one`, `two`, `processes`, or stages joined by + and hosts by comma, each with its device if
    it has its own: `a@cuda:0, b+c@cuda:1`, or `a@0, b+c@1`. A device for each of two replicas:
    `a@0|2, b+c@1|3`."""
    if text in ("one", "two", "processes"):
        return text  # type: ignore[return-value]
    hosts = []
    for part in text.split(","):
        stages, _, device = part.strip().partition("@")
        devices = "|".join(_device(d.strip()) for d in device.split("|"))
        hosts.append(HostPlace(tuple(s.strip() for s in stages.split("+")), devices or None))
    return tuple(hosts)


def parse_devices(text: str) -> tuple[str, ...]:
    """`cuda:0, cuda:1`, or `0, 1`"""
    return tuple(_device(part.strip()) for part in text.split(",") if part.strip())


def _device(name: str) -> str:
    """A number alone is that of a card."""
    name = f"cuda:{name}" if name.isdecimal() else name
    if name and not DEVICE.fullmatch(name):
        raise Invalid(
            f"a device must be cpu, cuda, or cuda with the number of a card (cuda:1), got {name!r}",
            "device",
        )
    return name


def parse_replicas(text: str) -> int | tuple[int, int]:
    """`4`, or `1:8`"""
    least, colon, most = (part.strip() for part in text.partition(":"))
    if not least.isdecimal() or (colon and not most.isdecimal()):
        raise Invalid(
            f"replicas must be a number, or from:to such as 1:8, got {text!r}", "replicas"
        )
    return (int(least), int(most)) if colon else int(least)


# ---- cards


def visible_device(device: str, cards: Sequence[str]) -> tuple[str, Mapping[str, str]]:
    """What a host calls its device, and the environment in which it does. It sees no other card, so
    nothing that it calls can land on one; a library that takes the first card takes the right
    one."""
    card = card_of(device)
    if card is None or card >= len(cards):
        return device, {}
    return "cuda:0", {VISIBLE: cards[card]}
