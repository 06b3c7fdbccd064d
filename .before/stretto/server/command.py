"""`stretto serve` and `stretto env`: flags, what is printed, and how it ends. `cli.py` wires them in."""

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
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stretto import __version__
from stretto.connector import looking
from stretto.connector.switches import OverlapSwitches, variable_of
from stretto.errors import Invalid, StrettoError
from stretto.server.config import ServerConfig, setting
from stretto.server.settings import add_flags, read, read_yaml, unknown_variables
from stretto.types import ExpertWeights

if TYPE_CHECKING:  # `stretto --help` should not wait for a web server to be imported
    from stretto.orchestrator.api import Engine
    from stretto.orchestrator.settings import EngineConfig
    from stretto.server.run import Server
    from stretto.server.service import Service

log = logging.getLogger("stretto.server")

POLL_SECONDS = 0.2
SWITCH_S = 0.001  # prompts are built in a thread, which should not wait for the event loop's pauses, nor it for them
TITLES = {
    "model": "the model",
    "address": "where to listen",
    "clients": "who may call",
    "limits": "limits",
    "logging": "what to see",
}
PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "starlette", "uvicorn", "msgspec", "soundfile", "triton")
OTHER_VARIABLES = (
    "STRETTO_MODEL",
    "STRETTO_CONFIG",
    "STRETTO_KERNELS",
    "STRETTO_TUNING",
    looking.VARIABLE,
    *(variable_of(f.name) for f in fields(OverlapSwitches)),
    "STRETTO_TEST_DEVICE",
)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """How the model is run: what of the engine's configuration people change. None leaves it to the engine."""

    device: str | None = setting(None, "model", "cpu, cuda, cuda:1 ... (default: cuda if there is one)", "DEVICE")
    dtype: Literal["float32", "bfloat16", "float16"] | None = setting(
        None, "model", "of weights and arithmetic (default: bfloat16 on a GPU)"
    )
    load_format: Literal["safetensors", "dummy"] = setting("safetensors", "model", "dummy: random weights")
    expert_weights: ExpertWeights = setting(  # noqa: RUF009 - a field, which ruff does not see behind an alias
        "full", "model", "of the thinker; float8: half the bytes, so larger batches are faster; other answers than full"
    )
    max_model_len: int | None = setting(None, "model", "longest context, in tokens", "TOKENS")
    placement: str = setting(
        "one", "model", "stages by process: one, two, processes, or such as thinker,talker+code2wav", "HOSTS"
    )
    replicas: int = setting(1, "model", "pipelines side by side", "N")
    max_rows: int | None = setting(None, "model", "requests in a stage's batch", "N")
    thinker_blocks: int | None = setting(None, "model", "size of the thinker's cache, in blocks of 16 tokens", "N")
    talker_blocks: int | None = setting(None, "model", "size of the talker's cache, in blocks of 16 frames", "N")
    threads: int | None = setting(None, "model", "of arithmetic on a CPU, for each process", "N")
    prompt_workers: int = setting(2, "model", "processes that prepare large requests and media, at most", "N")
    prompt_cpu_s: int = setting(60, "model", "CPU time that preparing one request may take", "SECONDS")
    prompt_memory_mb: int = setting(2048, "model", "memory that preparing one request may take, in MiB", "MIB")
    share_prefix_cache: bool = setting(
        False, "model", "prompts of one API key speed up those of others, who can then guess at them"
    )

    def engine(self, max_requests: int) -> EngineConfig:
        from stretto.orchestrator.settings import EngineConfig, HostSettings, parse_placement
        from stretto.prompt.pool import PoolSettings

        host = HostSettings()
        host = replace(
            host,
            device=self.device or find_device(),
            dtype=self.dtype,
            load_format=self.load_format,
            expert_weights=self.expert_weights,
            max_context=self.max_model_len or host.max_context,
            max_rows=self.max_rows or host.max_rows,
            thinker_blocks=self.thinker_blocks or host.thinker_blocks,
            talker_blocks=self.talker_blocks or host.talker_blocks,
            threads=self.threads or host.threads,
        )
        return EngineConfig(
            parse_placement(self.placement),
            replicas=self.replicas,
            max_requests=max_requests,
            share_prefix_cache=self.share_prefix_cache,
            prompts=PoolSettings(self.prompt_workers, self.prompt_cpu_s, self.prompt_memory_mb),
            host=host,
        )


def find_device() -> str:
    """Whether there is a GPU, without the seconds that asking torch takes."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return "cuda" if not hidden and any(Path("/dev").glob("nvidia[0-9]*")) else "cpu"


def add_serve_parser(jobs: Any) -> None:
    serve = jobs.add_parser(
        "serve",
        help="serve a model to OpenAI's clients, with a page to talk to",
        description="Serve a model over HTTP, as OpenAI's API. Every flag can also be set in the environment "
        "(STRETTO_PORT=8001) or in a YAML file (port: 8001); flags win over the environment, that over the file.",
    )
    serve.add_argument("model", nargs="?", help="checkpoint directory (default: a tiny built-in model, to try things)")
    serve.add_argument("--config", type=Path, metavar="FILE.yaml", help="a YAML file with flags' names")
    add_flags(serve, ModelConfig, {"model": TITLES["model"]})
    add_flags(serve, ServerConfig, {k: v for k, v in TITLES.items() if k != "model"})
    serve.set_defaults(job=run_serve)


def add_env_parser(jobs: Any) -> None:
    env = jobs.add_parser("env", help="describe this machine and installation, for reports")
    env.add_argument("--json", action="store_true", help="as JSON")
    env.set_defaults(job=run_env)


# ---- serve


def run_serve(args: argparse.Namespace) -> int:
    from stretto.server.logs import set_up
    from stretto.server.origins import warning
    from stretto.server.run import run

    model, model_config, config = settle(vars(args), os.environ)
    set_up(config.log_format, config.log_level)
    sys.setswitchinterval(SWITCH_S)
    for name in unknown_variables(os.environ, (ModelConfig, ServerConfig), OTHER_VARIABLES):
        _say(f"stretto: warning: {name} is set, but there is no such setting")
    if words := warning(config):
        _say(f"stretto: warning: {words}")
    engine_config = model_config.engine(config.max_concurrent)
    with checkpoint(model) as directory:
        return asyncio.run(run(config, lambda: load_engine(directory, engine_config), announce))


async def announce(server: Server) -> None:
    """Tells how far loading is, and in the end where to find the server."""
    last = ""
    while (progress := server.service.progress).state == "loading":
        line = ", ".join(f"{stage}: {what}" for stage, what in progress.stages.items())
        if line and line != last:
            _say(f"stretto: {line}")
            last = line
        await asyncio.sleep(POLL_SECONDS)
    if progress.state == "ready":
        # What is loaded stays: full collections should not look through it while answers are on their way.
        gc.collect()
        gc.freeze()
        _say(greeting(server.config, server.service))


def settle(flags: dict[str, Any], environ: Mapping[str, str]) -> tuple[str | None, ModelConfig, ServerConfig]:
    """Model and configuration from all the places they can be stated in."""
    path = flags.get("config") or environ.get("STRETTO_CONFIG")
    file = read_yaml(path, (ModelConfig, ServerConfig), ("model",)) if path else {}
    model = flags.get("model") or environ.get("STRETTO_MODEL") or file.get("model")
    return model, read(ModelConfig, flags, environ, file), read(ServerConfig, flags, environ, file)


async def load_engine(directory: Path, config: EngineConfig) -> Engine:
    """An engine that is still loading, so that its progress can be seen from the start."""
    from stretto.orchestrator.engine import PipelineEngine

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


@contextmanager
def checkpoint(model: str | None) -> Iterator[Path]:
    """The model's directory; without one, the tiny model in a folder that goes away in the end."""
    if model is not None:
        if not Path(model).is_dir():
            raise Invalid(f"{model}: there is no such directory", "model")
        yield Path(model)
        return
    from stretto.models.qwen3_omni.tiny import write_tiny

    with tempfile.TemporaryDirectory(prefix="stretto-") as folder:
        _say("stretto: no model given: serving the tiny built-in one (its words mean nothing)")
        write_tiny(Path(folder) / "tiny")
        yield Path(folder) / "tiny"


def greeting(config: ServerConfig, service: Service) -> str:
    """What is printed when the server is ready: where, and a line to paste."""
    engine = service.engine()
    name = service.model_names(engine)[0]
    body = {
        "model": name,
        "messages": [{"role": "user", "content": "Hello!"}],
        "modalities": ["text", "audio"],
        "audio": {"voice": engine.info.default_voice, "format": "wav"},
        "max_tokens": 60,
        "max_audio_frames": 100,
    }
    curl = ["curl", "-s"]
    if config.uds:
        curl += ["--unix-socket", config.uds]
    if config.ssl_certfile:
        curl.append("-k")
    if config.api_key:
        curl += ["-H", "Authorization: Bearer $KEY"]
    base = "http://localhost" if config.uds else config.url
    curl += [f"{base}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", json.dumps(body)]
    paste = " ".join(_quote(c) for c in curl)
    return (
        f"\nStretto {__version__} serves {name} ({', '.join(engine.info.voices)})\n"
        f"  page     {base}/\n  API      {base}/v1\n  metrics  {base}/metrics\n\n"
        f"Try it:\n  {paste} |\n"
        '    python3 -c \'import sys,json,base64; m=json.load(sys.stdin)["choices"][0]["message"]["audio"]; '
        'print(m["transcript"]); open("answer.wav","wb").write(base64.b64decode(m["data"]))\'\n'
    )


def _quote(word: str) -> str:
    return f'"{word}"' if "$KEY" in word else shlex.quote(word)


# ---- env


def run_env(args: argparse.Namespace) -> int:
    facts = describe()
    text = json.dumps(facts, indent=2) if args.json else "\n".join(f"{k:<12} {v}" for k, v in facts.items())
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


def _gpus() -> dict[str, str]:
    import torch

    if not torch.cuda.is_available():
        return {"gpu": "none"}
    cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    named = {f"gpu{i}": f"{c.name}, {c.total_memory / 2**30:.0f} GiB" for i, c in enumerate(cards)}
    return {"cuda": str(torch.version.cuda), **named}


def _say(line: str) -> None:
    """To people at a terminal; the log has its own way."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
