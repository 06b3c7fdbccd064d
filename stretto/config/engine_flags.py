"""The engine's settings on a command line: `stretto serve` and `stretto generate` take the same
ones.

Imports neither the engine nor torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stretto.config.connectors import check_connector
from stretto.config.devices import spread
from stretto.config.engine import EngineConfig, HostSettings
from stretto.config.loader import read, stated
from stretto.config.overlaps import OverlapSwitches
from stretto.config.preprocess import PoolSettings
from stretto.config.server import ServerConfig
from stretto.hardware import card_memory, cards, find_device

RECORDS = (EngineConfig, HostSettings, OverlapSwitches)
"""What an engine has, wherever it runs; a server has `PoolSettings` too."""

TITLES = {
    "model": "the model, and where it runs",
    "memory": "memory and caches",
    "limits": "limits",
    "tuning": "tuning",
    "logging": "what to see",
    "cluster": "on a cluster of machines",
    "overlap": "overlaps, to compare with and without (the answers are the same)",
}


def engine_config(
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    file: Mapping[str, Any] | None = None,
    here: bool = True,
    **fixed: Any,
) -> EngineConfig:
    """From all places that settings can be stated in; `fixed` are fields of `EngineConfig` that are
    no settings. `here`: it will run on this machine, whose cards are spread over its replicas."""
    switches = stated(OverlapSwitches, flags, environ, file)
    host = read(HostSettings, flags, environ, file, switches=switches)
    config = read(EngineConfig, flags, environ, file, **fixed)
    check_connector(config.connector)
    device = config.devices[0] if config.devices else find_device()
    config = replace(config, host=replace(host, device=device))
    return spread(config, len(cards())) if here else config


GIB = 1 << 30
ROWS = ((48 * GIB, 128), (24 * GIB, 64), (8 * GIB, 32))
"""Rows of a stage's batch, by the memory beside the weights: a row of a few thousand tokens takes
about 0.4 GiB."""
FEWEST = 16
# of the bytes of a checkpoint whose experts are kept in 8 bits: they are nine tenths of it
FLOAT8 = 0.55


def fit_card(
    engine: EngineConfig, server: ServerConfig, directory: Path, said: Collection[str]
) -> tuple[EngineConfig, ServerConfig]:
    """As many rows as a card has memory for, and twice as many requests, where nobody said how many
    (`said`: names of settings that were stated anywhere). Called by `stretto serve` when it knows
    its model."""
    host = engine.host
    memory = (
        card_memory(host.device) if "max_rows" not in said and engine.placement == "one" else None
    )
    if memory is not None:
        size = sum(f.stat().st_size for f in directory.glob("*.safetensors"))
        host = replace(
            host,
            max_rows=rows_for(
                memory - int(size * (FLOAT8 if host.expert_weights == "float8" else 1))
            ),
        )
    rows = host.max_rows * engine.num_pipelines
    if "max_concurrent" not in said:
        server = replace(server, max_concurrent=2 * rows)
    if "max_live" not in said:
        server = replace(server, max_live=max(2, rows))
    return replace(engine, host=host, max_requests=server.engine_requests), server


def rows_for(spare: int) -> int:
    """Rows for the bytes of a card beside the weights."""
    return next((rows for least, rows in ROWS if spare >= least), FEWEST)


def serving_config(
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    file: Mapping[str, Any] | None,
    max_requests: int,
    here: bool = True,
) -> EngineConfig:
    prompts = read(PoolSettings, flags, environ, file)
    return engine_config(flags, environ, file, here, max_requests=max_requests, prompts=prompts)
