"""Which cards of this machine an engine's hosts go on. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stretto.config.engine import EngineConfig
from stretto.config.placement import places
from stretto.errors import Invalid
from stretto.hardware import card_of


def spread_replicas(config: EngineConfig, cards: int) -> EngineConfig:
    """One replica for each card, where no setting names a device on a machine with cards. Called
    when settings are read."""
    if config.devices or isinstance(config.replicas, tuple) or config.replicas == 1:
        return config
    if card_of(config.host.device) is None:
        return config
    if isinstance(config.placement, tuple) and any(h.device for h in config.placement):
        return config
    if config.replicas > cards:
        raise Invalid(
            f"{config.replicas} replicas, each on a card of its own, but there "
            f"{_number_of(cards)}; to let replicas share a card, name it (--device cuda:0)",
            "replicas",
        )
    return replace(config, devices=tuple(f"cuda:{i}" for i in range(config.replicas)))


def check_cards(config: EngineConfig, stages: Sequence[str], cards: int) -> None:
    """Refuse devices that this machine does not have. Called before anything is started."""
    for number in range(config.num_pipelines):
        one = config.replica(number)
        for place in places(one.placement, stages):
            device = place.device or one.host.device
            card = card_of(device)
            if card is not None and card >= cards:
                instead = "" if cards else "; --device cpu runs without a GPU"
                raise Invalid(
                    f"{place.name} is placed on {device}, but there {_number_of(cards)}{instead}",
                    "placement",
                )


def _number_of(cards: int) -> str:
    return {0: "is no GPU", 1: "is one (cuda:0)"}.get(
        cards, f"are {cards} (cuda:0 to cuda:{cards - 1})"
    )
