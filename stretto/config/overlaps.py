"""Switches that turn off one overlap each. Tests use them as oracles (the output is the same),
benches as ablations.

Read once at start from the configuration and, where that says nothing, the environment; then passed
down as a value. (The command line has put its flags, the environment and its file into the
configuration, in that order.)"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from stretto.config.setting import setting
from stretto.errors import Invalid

_WORDS = {
    "1": True,
    "true": True,
    "on": True,
    "yes": True,
    "0": False,
    "false": False,
    "off": False,
    "no": False,
}


@dataclass(frozen=True, slots=True)
class OverlapSwitches:
    """All are on by default; `STRETTO_ASYNC_D2H=0` and so on switch one off."""

    async_d2h: bool = setting(
        True, "overlap", "off: a step's payload is on the host before the loop goes on"
    )
    async_h2d: bool = setting(
        True, "overlap", "off: a stage is given a chunk only when it is on the device"
    )
    payload_stream: bool = setting(
        True, "overlap", "off: payloads are copied behind the step, on its stream"
    )
    zero_copy_encode: bool = setting(
        True, "overlap", "off: chunks are encoded into bytes, which are then copied"
    )
    just_in_time: bool = setting(
        True,
        "overlap",
        "off: a step is launched as soon as there is room, even if the device still has work",
    )
    give_way: bool = setting(
        True,
        "overlap",
        "off: frames are made beside prompts, even if all listeners have enough in hand",
    )

    @classmethod
    def read(cls, config: Mapping[str, object], environ: Mapping[str, str]) -> OverlapSwitches:
        """From a configuration table and the environment; the table wins. Unknown names are
        refused."""
        names = [field.name for field in fields(cls)]
        unknown = sorted(set(config) - set(names))
        if unknown:
            raise Invalid(f"no such overlap switch: {', '.join(unknown)}", param=unknown[0])
        values: dict[str, bool] = {}
        for name in names:
            if name in config:
                values[name] = _parse(name, config[name])
            elif (variable := variable_of(name)) in environ:
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
