"""The engine's settings on a command line: `stretto serve` and `stretto generate` take the same ones.

Imports neither the engine nor torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stretto.connector.switches import OverlapSwitches
from stretto.control.devices import spread
from stretto.control.settings import EngineConfig, HostSettings
from stretto.device import cards, find_device
from stretto.prompt.settings import PoolSettings
from stretto.server.settings import read, stated

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
    """From all places that settings can be stated in; `fixed` are fields of `EngineConfig` that are no settings.
    `here`: it will run on this machine, whose cards are spread over its replicas."""
    switches = stated(OverlapSwitches, flags, environ, file)
    host = read(HostSettings, flags, environ, file, switches=switches)
    config = read(EngineConfig, flags, environ, file, **fixed)
    device = config.devices[0] if config.devices else find_device()
    config = replace(config, host=replace(host, device=device))
    return spread(config, len(cards())) if here else config


def serving_config(
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    file: Mapping[str, Any] | None,
    max_requests: int,
    here: bool = True,
) -> EngineConfig:
    prompts = read(PoolSettings, flags, environ, file)
    return engine_config(flags, environ, file, here, max_requests=max_requests, prompts=prompts)
