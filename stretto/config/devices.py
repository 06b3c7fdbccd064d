"""Which host runs on which device: replicas are spread over cards, and a host is shown the one that
it uses.

Called by whoever reads settings and by the engine before it starts anything. Pure; imports no
torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from stretto.config.engine import EngineConfig, places
from stretto.errors import Invalid
from stretto.hardware import VISIBLE, card_of


def spread(config: EngineConfig, cards: int) -> EngineConfig:
    """One replica for each card, where nothing says otherwise: settings that name no device on a
    machine with cards."""
    if config.devices or isinstance(config.replicas, tuple) or config.replicas == 1:
        return config
    if card_of(config.host.device) is None:
        return config
    if isinstance(config.placement, tuple) and any(h.device for h in config.placement):
        return config
    if config.replicas > cards:
        raise Invalid(
            f"{config.replicas} replicas, each on a card of its own, but there {_are(cards)}; to "
            f"let replicas "
            "share a card, name it (--device cuda:0)", "replicas",
        )  # fmt: skip
    return replace(config, devices=tuple(f"cuda:{i}" for i in range(config.replicas)))


def check_cards(config: EngineConfig, stages: Sequence[str], cards: int) -> None:
    """Refuse devices that this machine does not have. Before anything is started."""
    for number in range(config.num_pipelines):
        one = config.replica(number)
        for place in places(one.placement, stages):
            card = card_of(device := place.device or one.host.device)
            if card is not None and card >= cards:
                raise Invalid(
                    f"{place.name} is placed on {device}, but there {_are(cards)}{_instead(cards)}",
                    "placement",
                )


def shown(device: str, cards: Sequence[str]) -> tuple[str, Mapping[str, str]]:
    """What a host calls its device, and the environment in which it does. It sees no other card, so
    nothing that it calls can land on one; a library that takes the first card takes the right
    one."""
    card = card_of(device)
    if card is None or card >= len(cards):
        return device, {}
    return "cuda:0", {VISIBLE: cards[card]}


def _instead(cards: int) -> str:
    return "" if cards else "; --device cpu runs without a GPU"


def _are(cards: int) -> str:
    return {0: "is no GPU", 1: "is one (cuda:0)"}.get(
        cards, f"are {cards} (cuda:0 to cuda:{cards - 1})"
    )
