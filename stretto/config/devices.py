"""What settings depend on the cards of this machine: where hosts go, and how many rows a card has
memory for. Called when settings are read and by `stretto serve`; imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from stretto.config.engine import EngineConfig
from stretto.config.placement import places
from stretto.config.server import ServerConfig
from stretto.errors import Invalid
from stretto.hardware import card_memory, card_of

GIB = 1 << 30
ROWS_BY_MEMORY = ((48 * GIB, 128), (24 * GIB, 64), (8 * GIB, 32))
"""Rows of a stage's batch, by the memory beside the weights: a row of a few thousand tokens takes
about 0.4 GiB."""
MIN_ROWS = 16
FLOAT8_SHARE = 0.55
"""Part of a checkpoint's bytes that is left where its experts, nine tenths of it, have 8 bits."""


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


def fit_card(
    engine: EngineConfig, server: ServerConfig, directory: Path, explicit: Collection[str]
) -> tuple[EngineConfig, ServerConfig]:
    """Set as many rows as a card has memory for, and twice as many requests, unless these settings
    are `explicit`. `stretto serve` calls it when it knows its model."""
    host = engine.host
    memory = None
    if "max_rows" not in explicit and engine.placement == "one":
        memory = card_memory(host.device)
    if memory is not None:
        size = sum(f.stat().st_size for f in directory.glob("*.safetensors"))
        weights = size * (FLOAT8_SHARE if host.expert_weights == "float8" else 1)
        host = replace(host, max_rows=rows_for(memory - int(weights)))
    rows = host.max_rows * engine.num_pipelines
    if "max_concurrent" not in explicit:
        server = replace(server, max_concurrent=2 * rows)
    if "max_live" not in explicit:
        server = replace(server, max_live=max(2, rows))
    return replace(engine, host=host, max_requests=server.engine_requests), server


def rows_for(spare: int) -> int:
    """Rows for the bytes of a card beside the weights."""
    return next((rows for least, rows in ROWS_BY_MEMORY if spare >= least), MIN_ROWS)
