"""How prompts are built beside the server. Light, since the command line reads it; `pool.py` goes
by it."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.config.setting import check_finite, setting
from stretto.errors import Invalid

MOST = {"workers": 1024, "cpu_s": 86_400, "memory_mb": 1 << 20}
"""The largest values; the least is 1."""


@dataclass(frozen=True, slots=True)
class PoolSettings:
    workers: int = setting(
        2,
        "prompts",
        "processes that prepare large requests and media, at most",
        "N",
        name="prompt_workers",
    )
    cpu_s: int = setting(
        60,
        "prompts",
        "CPU time that preparing one request may take",
        "SECONDS",
        name="prompt_cpu_s",
    )
    memory_mb: int = setting(
        2048,
        "prompts",
        "memory that preparing one request may take, in MiB",
        "MIB",
        name="prompt_memory_mb",
    )
    grammar_cpu_s: float = setting(
        1.0, "prompts", "CPU time that compiling one JSON schema may take", "SECONDS"
    )
    grammar_memory_mb: int = setting(
        64, "prompts", "memory that compiling one JSON schema may take, in MiB", "MIB"
    )
    start_timeout_s: float = setting(
        120.0, "prompts", "time in which the process that prepares requests must be up", "SECONDS",
        name="prompt_start_timeout_s",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_finite(self)
        for name, most in MOST.items():
            if not 1 <= getattr(self, name) <= most:
                raise Invalid(
                    f"prompt_{name} must be from 1 to {most}, got {getattr(self, name)}",
                    f"prompt_{name}",
                )
        if not 0 < self.grammar_cpu_s <= 3600:
            raise Invalid(
                f"grammar_cpu_s must be above 0, at most 3600, got {self.grammar_cpu_s}",
                "grammar_cpu_s",
            )
        if self.grammar_memory_mb < 1:
            raise Invalid(
                f"grammar_memory_mb must be at least 1, got {self.grammar_memory_mb}",
                "grammar_memory_mb",
            )
        if not self.start_timeout_s > 0:
            raise Invalid(
                f"prompt start_timeout_s must be positive, got {self.start_timeout_s}",
                "prompt_start_timeout_s",
            )
