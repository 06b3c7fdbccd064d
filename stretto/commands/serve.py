"""`stretto serve` and `stretto env`: their flags, output and exit codes. `cli.py` calls them."""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib.metadata
import json
import logging
import os
import platform
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from stretto import __version__
from stretto.config.cluster import ClusterConfig
from stretto.config.devices import check_cards, fit_card
from stretto.config.engine import check_model
from stretto.config.flags import add_flags, table
from stretto.config.loader import RECORDS, Settings, load_settings, unknown_variables
from stretto.config.server import ServerConfig
from stretto.errors import Invalid, StrettoError
from stretto.hardware import cards
from stretto.hub import MODEL_HELP, find_model
from stretto.observe.logs import FORMAT
from stretto.signals import end_on_signals

if TYPE_CHECKING:  # `stretto --help` should not wait for a web server to be imported
    from stretto.config.engine import EngineConfig
    from stretto.engine.protocol import EngineClient
    from stretto.family import ModelInfo
    from stretto.server.run import Server
    from stretto.server.service import Service

log = logging.getLogger("stretto.server")

POLL_SECONDS = 0.2
# prompts are built in a thread, which should not wait for the event loop's pauses, nor it for them
SWITCH_S = 0.001
Run = Callable[[str | None, "EngineConfig", ServerConfig, ClusterConfig], int]
"""Serves elsewhere than in this process, until it is stopped."""
PACKAGES = (
    "torch",
    "numpy",
    "safetensors",
    "tokenizers",
    "starlette",
    "uvicorn",
    "msgspec",
    "soundfile",
    "triton",
)
OTHER_VARIABLES = {
    "STRETTO_MODEL": "the checkpoint directory or its name on the hub, as MODEL",
    "STRETTO_CONFIG": "a YAML file, as `--config`",
    "STRETTO_KERNELS": "`off`: no kernels of our own; `force`: for float32 too",
    "STRETTO_KERNELS_FLOAT8": "`products`: prompts' rows become FP8 where weights are, for speed",
    "STRETTO_KERNELS_CARD": "a card such as `sm_86` whose limits kernels keep to, for tests",
    "STRETTO_KERNELS_DEPENDENT_LAUNCH": "`off`: kernels start after the one in front has ended",
    "STRETTO_TUNING": "a file of launch parameters, instead of what `stretto tune` keeps",
    "STRETTO_LOG": "how much the processes of the stages log, such as `INFO`",
    "STRETTO_TEST_DEVICE": "where tests run",
}
"""Variables without a flag, and what they hold."""
REMOVED_VARIABLES = {"STRETTO_LOOK_US": "receivers of the shm connector sleep at once"}
"""Variables of an earlier version, and why they have no effect."""


def add_serve_parser(jobs: Any, backends: Mapping[str, Run] = MappingProxyType({})) -> None:
    """`backends`: what runs the server if it is not to run here, by the name of `--backend`."""
    serve = jobs.add_parser(
        "serve",
        help="serve a model to OpenAI's clients, with a page to talk to",
        usage="stretto serve [MODEL] [FLAGS]",
        description="Serve a model over HTTP, as OpenAI's API. Every flag can also be set in the "
        "environment "
        "(STRETTO_PORT=8001) or in a YAML file (port: 8001); flags win over the environment, that "
        "over the file.",
    )
    serve.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    serve.add_argument(
        "--config", type=Path, metavar="FILE.yaml", help="a YAML file with flags' names"
    )
    serve.add_argument(
        "--settings-table", action="store_true", help="print all settings as Markdown, and end"
    )
    add_flags(serve, RECORDS)
    serve.set_defaults(job=lambda args: run_serve(args, backends))


def add_env_parser(jobs: Any) -> None:
    env = jobs.add_parser(
        "env",
        help="describe this machine and installation, for reports",
        usage="stretto env [MODEL] [--cards] [--json]",
    )
    env.add_argument("model", nargs="?", help="a checkpoint to describe too, as for `serve`")
    env.add_argument(
        "--cards", action="store_true", help="and on which cards it fits, with how much KV cache"
    )
    env.add_argument("--json", action="store_true", help="as JSON")
    env.set_defaults(job=run_env)


# ---- serve


def run_serve(args: argparse.Namespace, backends: Mapping[str, Run]) -> int:
    if args.settings_table:
        sys.stdout.write(settings_table())
        return 0
    end_on_signals()
    from stretto.server.origins import warning
    from stretto.server.run import set_up_logs

    settings = load_settings(vars(args), os.environ)
    config, cluster = settings.server, settings.cluster
    set_up_logs(config.log_format, config.log_level)
    sys.setswitchinterval(SWITCH_S)
    for text in settings.warnings:
        _say(f"stretto: warning: {text}")
    for text in variable_warnings(os.environ):
        _say(f"stretto: warning: {text}")
    if about_access := warning(config):
        _say(f"stretto: warning: {about_access}")
    try:
        if cluster.backend != "local":
            run_elsewhere = backends[cluster.backend]
            return run_elsewhere(settings.model, settings.engine, config, cluster)
        return _serve(settings)
    except StrettoError as e:
        if config.log_format != "json":
            raise
        log.error("%s", e)
        return 2 if isinstance(e, Invalid) else 1


def variable_warnings(environ: Mapping[str, str]) -> list[str]:
    """A line for each variable of ours that is set and has no effect."""
    lines = []
    for name, suggestion in unknown_variables(environ, OTHER_VARIABLES).items():
        if name in REMOVED_VARIABLES:
            lines.append(f"{name} was removed: {REMOVED_VARIABLES[name]}")
        else:
            hint = f"; {suggestion}" if suggestion else ""
            lines.append(f"{name} is set, but there is no such setting{hint}")
    return lines


def _serve(settings: Settings) -> int:
    from stretto.registry import open_model
    from stretto.server.run import run

    explicit = settings.explicit
    directory = checkpoint(settings.model)
    engine_config, config = fit_card(settings.engine, settings.server, directory, explicit)
    opened = open_model(directory)
    # before anything starts
    check_model(engine_config, opened.pipeline.names, opened.info.max_positions, explicit)
    check_cards(engine_config, opened.pipeline.names, len(cards()))
    return asyncio.run(run(config, lambda: load_engine(directory, engine_config), announce))


async def announce(server: Server) -> None:
    """Print how far loading is, and in the end the address of the server."""
    last = ""
    while (progress := server.service.progress).state == "loading":
        line = ", ".join(f"{stage}: {what}" for stage, what in progress.stages.items())
        if line and line != last:
            _say(f"stretto: {line}")
            last = line
        await asyncio.sleep(POLL_SECONDS)
    if progress.state == "ready":
        # All that is loaded stays: full collections should not scan it while answers are made.
        gc.collect()
        gc.freeze()
        if server.config.log_format == "json":
            log.info("ready: %s serves %s", server.config.url, server.service.engine().info.name)
        else:
            _say(greeting(server.config, server.service))


def settings_table() -> str:
    """Everything that can be set, for `docs/settings.md`."""
    others = "\n".join(f"| `{name}` | {what} |" for name, what in OTHER_VARIABLES.items())
    return (
        f"{table(RECORDS)}\n## Variables without a flag\n\n| variable | what "
        f"|\n|---|---|\n{others}\n"
    )


async def load_engine(directory: Path, config: EngineConfig) -> EngineClient:
    """An engine that is still loading, so that its progress can be seen from the start."""
    from stretto.engine.engine import PipelineEngine

    engine = PipelineEngine(directory, config)
    start = asyncio.create_task(engine.start(), name="start engine")
    _starting.add(start)  # or nothing would hold it
    start.add_done_callback(_started)
    return engine


_starting: set[asyncio.Task[None]] = set()


def _started(start: asyncio.Task[None]) -> None:
    _starting.discard(start)
    if not start.cancelled() and (error := start.exception()) is not None:
        known = isinstance(error, StrettoError)
        log.error("the model cannot be served: %s", error, exc_info=None if known else error)


def checkpoint(model: str | None) -> Path:
    """The model's directory; without a model, that of the embedded one."""
    directory = find_model(model or None, lambda line: _say(f"stretto: {line}"))
    if not model:
        _say(
            "stretto: no model given: serving the embedded one (a synthetic voice, a small domain)"
        )
    return directory


def greeting(config: ServerConfig, service: Service) -> str:
    """The lines to print when the server is ready: its addresses, and a request to paste."""
    engine = service.engine()
    name = service.model_names(engine)[0]
    path, body, then = _example(engine.info)
    curl = ["curl", "-s"]
    if config.uds:
        curl += ["--unix-socket", config.uds]
    if config.ssl_certfile:
        curl.append("-k")
    if config.needs_key:
        curl += ["-H", "Authorization: Bearer $KEY"]
    base = "http://localhost" if config.uds else config.url
    curl += [
        base + path,
        "-H",
        "Content-Type: application/json",
        "-d",
        json.dumps({"model": name, **body}),
    ]
    example = " ".join([*(_quote(c) for c in curl), then]).rstrip()
    voices = f" ({', '.join(engine.info.voices)})" if engine.info.voices else ""
    weights = f"  weights  {engine.info.weights}\n" if engine.info.weights else ""
    return (
        f"\nStretto {__version__} serves {name}{voices}\n{weights}"
        f"  room     {config.max_concurrent} requests at once, {engine.info.max_positions} tokens "
        f"each\n"
        f"  page     {base}/\n  API      {base}/v1\n  metrics  "
        f"{config.metrics_url or f'{base}/metrics'}\n\n"
        f"Try it:\n  {example}\n"
    )


def _example(info: ModelInfo) -> tuple[str, dict[str, Any], str]:
    """A request that the model can answer: its path, its body, and what follows curl."""
    if "text" not in info.output_modalities:  # a voice may have to be made first
        voice = info.default_voice or ("NAME" if info.cloning else None)
        how = (
            {"voice": voice}
            if voice is not None
            else {"instructions": "An old man, warm and unhurried."}
        )
        return (
            "/v1/audio/speech",
            {"input": "Hello, how are you?", **how, "response_format": "wav"},
            "-o answer.wav",
        )
    question = [{"role": "user", "content": "Hello!"}]
    if "audio" not in info.output_modalities:
        return "/v1/chat/completions", {"messages": question, "max_tokens": 60}, ""
    body = {
        "messages": question,
        "modalities": ["text", "audio"],
        "audio": {"voice": info.default_voice, "format": "wav"},
        "max_tokens": 60,
        "max_audio_frames": 100,
    }
    then = (
        "|\n    python3 -c 'import sys,json,base64; "
        'm=json.load(sys.stdin)["choices"][0]["message"]["audio"]; '
        'print(m["transcript"]); open("answer.wav","wb").write(base64.b64decode(m["data"]))\''
    )
    return "/v1/chat/completions", body, then


def _quote(word: str) -> str:
    return f'"{word}"' if "$KEY" in word else shlex.quote(word)


# ---- env


def run_env(args: argparse.Namespace) -> int:
    if args.cards and args.model is None:
        raise Invalid("--cards is of a checkpoint: name a MODEL", "cards")
    facts = describe() | describe_model(args.model, args.cards)
    text = (
        json.dumps(facts, indent=2)
        if args.json
        else "\n".join(f"{k:<12} {v}" for k, v in facts.items())
    )
    sys.stdout.write(text + "\n")
    return 0


def describe() -> dict[str, str]:
    facts = {
        "stretto": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "machine": platform.machine(),
        "cpus": str(os.cpu_count()),
    }
    for name in PACKAGES:
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            facts[name] = "not installed"
    return facts | _gpus()


def describe_model(model: str | None, on_cards: bool = False) -> dict[str, str]:
    """A checkpoint's family, how its weights are stored, and which cards it fits."""
    if model is None:
        return {}
    from stretto.registry import card_rooms, model_type, open_model

    directory = find_model(model, lambda line: _say(f"stretto: {line}"))
    weights = open_model(directory).info.weights or "not quantised"
    facts = {"model": str(directory), "family": model_type(directory), "weights": weights}
    return facts | (card_rooms(directory) if on_cards else {})


def _gpus() -> dict[str, str]:
    import torch

    if not torch.cuda.is_available():
        return {"gpu": "none"}
    cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    named = {f"gpu{i}": f"{c.name}, {c.total_memory / 2**30:.0f} GiB" for i, c in enumerate(cards)}
    return {"cuda": str(torch.version.cuda), **named}


def _say(line: str) -> None:
    """Print a line for people, or log it where logs are JSON."""
    if os.environ.get(FORMAT) == "json":
        log.info("%s", line.strip().removeprefix("stretto: "))
        return
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
