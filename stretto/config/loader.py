"""Reads configuration records from flags, the environment and a YAML file, in that order of
precedence.

`collect` gathers the values of all three, by setting; `Sources.record` makes a record of it.
`load_settings` reads all that `stretto serve` needs. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from stretto.config.cluster import ClusterConfig
from stretto.config.devices import spread_replicas
from stretto.config.engine import (
    EngineConfig,
    HostSettings,
    OverlapSwitches,
    PoolSettings,
    check_connector,
)
from stretto.config.flags import kind_of
from stretto.config.names import explain
from stretto.config.server import ServerConfig
from stretto.config.setting import (
    PREFIX,
    TUNE,
    default_of,
    flag_of,
    is_tuning,
    name_of,
    names_of,
    old_names,
    settings_of,
    variable_of,
)
from stretto.errors import Invalid
from stretto.hardware import cards, find_device

C = TypeVar("C")
ENGINE_RECORDS = (EngineConfig, HostSettings, OverlapSwitches)
"""The settings of an engine, wherever it runs."""
RECORDS = (*ENGINE_RECORDS, ServerConfig, PoolSettings, ClusterConfig)
"""All settings."""
TRUE_WORDS = ("1", "true", "yes", "on")
FALSE_WORDS = ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class SourceValue:
    value: Any
    where: str
    """How an error message names it: `port`, STRETTO_PORT, or `launch_lead_ms`."""


@dataclass(frozen=True, slots=True)
class Sources:
    """The values from flags, environment and file, by setting."""

    values: Mapping[str, SourceValue]
    warnings: tuple[str, ...] = ()
    """Sentences about old names that the user has written."""

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def record(self, record: type[C], **fixed: Any) -> C:
        """`fixed`: fields that are no settings."""
        fields = {}
        for f in settings_of(record):
            source = self.values.get(name_of(f))
            if source is not None:
                fields[f.name] = _parse(source, kind_of(record, f), f)
            elif f.metadata["served"] is not MISSING:
                fields[f.name] = default_of(f)
        return record(**fields, **fixed)


@dataclass(frozen=True, slots=True)
class Settings:
    """All that `stretto serve` reads."""

    model: str | None
    engine: EngineConfig
    server: ServerConfig
    cluster: ClusterConfig
    explicit: frozenset[str] = frozenset()
    """Names of the settings that flags, environment or file have."""
    warnings: tuple[str, ...] = ()


def load_settings(
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    file: Mapping[Any, Any] | None = None,
    file_name: str = "the file",
) -> Settings:
    """`file`: settings by name, in place of the YAML file that --config names."""
    path = flags.get("config") or environ.get("STRETTO_CONFIG")
    if file is None and path:
        file, file_name = read_yaml(path), str(path)
    file = normalize(file or {}, file_name, ("model",))
    sources = collect(flags, environ, file)
    server = sources.record(ServerConfig)
    cluster = sources.record(ClusterConfig)
    engine = engine_config(
        sources,
        this_machine=cluster.backend == "local",
        max_requests=server.engine_requests,
        prompts=sources.record(PoolSettings),
    )
    model = flags.get("model") or environ.get("STRETTO_MODEL") or file.get("model")
    return Settings(model, engine, server, cluster, frozenset(sources.values), sources.warnings)


def engine_config(sources: Sources, this_machine: bool = True, **fixed: Any) -> EngineConfig:
    """`fixed`: fields of `EngineConfig` that are no settings. `this_machine`: the engine runs here,
    and its replicas are spread over the cards that are here."""
    host = sources.record(HostSettings, switches=sources.record(OverlapSwitches))
    config = sources.record(EngineConfig, **fixed)
    check_connector(config.connector)
    device = config.devices[0] if config.devices else find_device()
    config = replace(config, host=replace(host, device=device))
    return spread_replicas(config, len(cards())) if this_machine else config


# ---- the values of all three places


@dataclass(frozen=True, slots=True)
class _Place:
    """One of the places that settings come from. `values` and `tune` by name, with underscores."""

    values: Mapping[str, Any]
    tune: Mapping[str, Any]
    spell: Callable[[str], str]
    name: Literal["flags", "environment", "file"]


def collect(
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    file: Mapping[str, Any] | None = None,
    records: Sequence[type[Any]] = RECORDS,
) -> Sources:
    """Each setting from the first place that gives it. `records`: those that have flags; the
    environment and the file (`normalize`d) may hold settings of others too."""
    variables = {
        name.removeprefix(PREFIX).lower(): value
        for name, value in environ.items()
        if name.startswith(PREFIX) and name == name.upper()
    }
    places = [
        _place("flags", flags, flag_of, records),
        _place("environment", variables, variable_of, RECORDS),
        _place("file", file or {}, _yaml_key, RECORDS),
    ]
    values: dict[str, SourceValue] = {}
    warnings: list[str] = []
    for f in settings_of(*RECORDS):
        for place in places:
            found = _find(f, place, warnings)
            if found is not None:
                values.setdefault(name_of(f), found)
    return Sources(values, tuple(warnings))


def _yaml_key(name: str) -> str:
    return name.replace("_", "-")


def _place(
    name: Literal["flags", "environment", "file"],
    values: Mapping[str, Any],
    spell: Callable[[str], str],
    records: Sequence[type[Any]],
) -> _Place:
    tune_values = values.get(TUNE)
    tune = parse_tune(tune_values, spell(TUNE), records) if tune_values is not None else {}
    return _Place(values, tune, spell, name)


def _find(f: Field[Any], place: _Place, warnings: list[str]) -> SourceValue | None:
    """The setting's value in this place. An old name adds a warning."""
    name = name_of(f)
    values = place.tune if is_tuning(f) else place.values
    where = place.spell(name) if place.name == "environment" and not is_tuning(f) else name
    for old in old_names(f):
        if old not in place.values:
            continue
        value = place.values[old]
        new = _spelling(f, value, place)
        if name in values:
            raise Invalid(
                f"{place.spell(old)} is the old name of {new}: give only the new one", old
            )
        warnings.append(
            f"{_old_spelling(old, value, place)} is now {new}; the next version knows only that"
        )
        return SourceValue(value, place.spell(old) if place.name == "environment" else old)
    return SourceValue(values[name], where) if name in values else None


def _old_spelling(name: str, value: Any, place: _Place) -> str:
    return flag_of(f"no_{name}") if place.name == "flags" and value is False else place.spell(name)


def _spelling(f: Field[Any], value: Any, place: _Place) -> str:
    """The setting's new spelling in this place, for a user of an old name."""
    name = name_of(f)
    if not is_tuning(f):
        return place.spell(name)
    text = {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value
    match place.name:
        case "flags":
            return f"--tune {name}={text}"
        case "environment":
            return f"STRETTO_TUNE={name}={text}"
        case "file":
            return f"tune: {{{name}: {text}}}"


def parse_tune(values: Any, where: str, records: Sequence[type[Any]] = RECORDS) -> dict[str, Any]:
    """Tuning settings by name, of `NAME=VALUE,...`, of a list of such texts, or of a mapping.
    `records`: those whose tuning settings may be there."""
    if isinstance(values, Mapping):
        pairs = [(str(name), value) for name, value in values.items()]
    else:
        texts = values if isinstance(values, list) else [values]
        pairs = [_pair(item, where) for text in texts for item in _items(str(text))]
    names = [name_of(f) for f in settings_of(*records) if is_tuning(f)]
    out = {}
    for written, value in pairs:
        name = written.strip().replace("-", "_")
        if name not in names:
            raise Invalid(_unknown_tune(name, where, names), TUNE)
        out[name] = value
    return out


def _items(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _pair(item: str, where: str) -> tuple[str, str]:
    name, equals, value = item.partition("=")
    if not equals:
        raise Invalid(f"{where} takes NAME=VALUE,..., got {item!r}", TUNE)
    return name, value.strip()


def _unknown_tune(name: str, where: str, names: Sequence[str]) -> str:
    others = {name_of(f) for f in settings_of(*RECORDS) if not is_tuning(f)}
    if name in others:
        return f"{where}: {name} is a setting of its own, {flag_of(name)}"
    hint = explain(name, names, lambda n: n if n in names else flag_of(n))
    return f"{where}: there is no tuning setting {name!r}; {hint or _listed(names)}"


def _listed(names: Collection[str]) -> str:
    return f"there are {', '.join(sorted(names))}"


# ---- the file and the environment


def read_yaml(path: str | Path) -> dict[Any, Any]:
    import yaml  # only when there is a file

    try:
        raw = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise Invalid(f"{path}: cannot be read ({' '.join(str(e).split())})", "config") from None
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise Invalid(f"{path}: must hold names and values", "config")
    return raw


def normalize(raw: Mapping[Any, Any], where: str, others: Sequence[str] = ()) -> dict[str, Any]:
    """Values by their settings' names, however these were written. An unknown name is an error, not
    a silent default."""
    out = {str(k).replace("-", "_"): v for k, v in raw.items()}
    known = names_of(settings_of(*RECORDS)) | set(others)
    if unknown := sorted(set(out) - known):
        hints = [_unknown_key(name, known) for name in unknown]
        raise Invalid(f"{where}: {'; '.join(hints)}", "config")
    return out


def _unknown_key(name: str, known: Collection[str]) -> str:
    hint = explain(name, known, lambda n: _switched(n, _yaml_key, "{}: off"))
    return f"unknown {_yaml_key(name)}" + (f" ({hint})" if hint else "")


def _switched(name: str, spell: Callable[[str], str], off: str) -> str:
    """The spelling of a setting in a place where no name begins with `no_`."""
    switch = name.removeprefix("no_")
    return off.format(spell(switch)) if switch != name else spell(name)


def unknown_variables(environ: Mapping[str, str], others: Collection[str] = ()) -> dict[str, str]:
    """Variables that look like ours and mean nothing: most likely misspelt. Each with what it may
    have been meant for, if that is known."""
    known = {variable_of(name) for name in names_of(settings_of(*RECORDS))} | set(others)
    names = {variable.removeprefix(PREFIX).lower() for variable in known}
    unknown = sorted(v for v in environ if v.startswith(PREFIX) and v not in known)
    return {v: _meant_variable(v.removeprefix(PREFIX).lower(), names) for v in unknown}


def _meant_variable(name: str, names: Collection[str]) -> str:
    return explain(name, names, lambda n: _switched(n, variable_of, "{}=off"))


# ---- values


def _parse(source: SourceValue, kind: Any, f: Field[Any]) -> Any:
    """A value of YAML, a flag's or text of the environment, as a field's type."""
    value, where = source.value, source.where
    if value is None:
        return None
    if f.metadata["parse"] is not None:
        return f.metadata["parse"](str(value))
    if get_origin(kind) is tuple:
        return tuple(_parts(value))
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            choices = ", ".join(get_args(kind))
            raise Invalid(f"{where} must be one of {choices}, got {value!r}", where)
        return value
    try:
        return _PARSERS[kind](value)
    except (TypeError, ValueError):
        raise Invalid(f"{where} must be {_KINDS[kind]}, got {value!r}", where) from None


def _parts(value: Any) -> Iterator[str]:
    parts = value.split(",") if isinstance(value, str) else value
    for part in parts if isinstance(parts, list | tuple) else [parts]:
        if text := str(part).strip():
            yield text


def _bool(value: Any) -> bool:
    word = str(value).strip().lower()
    if word not in TRUE_WORDS + FALSE_WORDS:
        raise ValueError(word)
    return word in TRUE_WORDS


def _int(value: Any) -> int:
    if isinstance(value, bool | float):
        raise TypeError(value)
    return int(value)


_PARSERS: dict[Any, Callable[[Any], Any]] = {bool: _bool, int: _int, float: float, str: str}
_KINDS = {bool: "on or off", int: "a whole number", float: "a number", str: "text"}
