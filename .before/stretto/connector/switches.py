"""Switches that turn off one overlap each. They exist as oracles (same output, tested) and for the ablation bench.

Read once at start from the configuration and, above it, the environment; then passed down as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from stretto.errors import Invalid

_WORDS = {"1": True, "true": True, "on": True, "yes": True, "0": False, "false": False, "off": False, "no": False}


@dataclass(frozen=True, slots=True)
class OverlapSwitches:
    """All on is how the engine works; `STRETTO_ASYNC_D2H=0` and so on switch one off."""

    async_d2h: bool = True  # off: a step's payload is on the host before the loop goes on
    async_h2d: bool = True  # off: a chunk is handed to the stage only when it is on the device
    payload_stream: bool = True  # off: payload copies queue behind the step on the compute stream
    zero_copy_encode: bool = True  # off: chunks are encoded into a bytes object, which is then copied
    just_in_time: bool = True  # off: a step is launched as soon as there is room, though the device has work yet

    @classmethod
    def read(cls, config: Mapping[str, object], environ: Mapping[str, str]) -> OverlapSwitches:
        """From a configuration table and the environment; the environment wins. Unknown names are refused."""
        names = [field.name for field in fields(cls)]
        unknown = sorted(set(config) - set(names))
        if unknown:
            raise Invalid(f"no such overlap switch: {', '.join(unknown)}", param=unknown[0])
        values: dict[str, bool] = {}
        for name in names:
            if name in config:
                values[name] = _parse(name, config[name])
            if (variable := variable_of(name)) in environ:
                values[name] = _parse(variable, environ[variable])
        return cls(**values)


def variable_of(name: str) -> str:
    """The environment's name of a switch."""
    return f"STRETTO_{name.upper()}"


def _parse(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in _WORDS:
        return _WORDS[value.strip().lower()]
    raise Invalid(f"{name} must be on or off, got {value!r}", param=name)
