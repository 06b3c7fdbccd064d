"""A checkpoint's config.json, field by field. A field that a model needs and the file does not
state is an error that names it: the defaults of other libraries differ from the released models, so
none is guessed. Imports no torch."""

from __future__ import annotations

from typing import Any

from stretto.errors import CheckpointError
from stretto.layers.config import DecoderConfig, MoeConfig

MAX_SIZE = 1 << 24  # of a dimension: one hundred times the largest vocabulary
MAX_NUMBER = 1e15
# layers, experts, codebooks: each is an object before anything is known of their memory
MAX_PARTS = 1024


class Section:
    """One JSON object with typed access; errors name the file and the dotted path of the field."""

    def __init__(self, raw: object, where: str, path: str = "") -> None:
        self.where = where
        self.path = path
        if not isinstance(raw, dict):
            raise CheckpointError(f"{where}: {path or 'the top level'} must be an object")
        self.raw: dict[str, Any] = raw

    def fail(self, key: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {self.path}{key} {what}")

    def section(self, key: str) -> Section:
        return Section(self.get(key), self.where, f"{self.path}{key}.")

    def get(self, key: str) -> Any:
        if self.raw.get(key) is None:
            raise self.fail(key, "is missing")
        return self.raw[key]

    def integer(self, key: str, low: int = 1, high: int = MAX_SIZE) -> int:
        v = self.get(key)
        if isinstance(v, bool) or not isinstance(v, int):
            raise self.fail(key, f"must be an integer, got {v!r}")
        if v < low:
            raise self.fail(key, f"must be at least {low}, got {v}")
        if v > high:
            raise self.fail(key, f"must be at most {high:,}")
        return v

    def count(self, key: str, low: int = 1) -> int:
        """Of parts that are made one by one, such as layers."""
        return self.integer(key, low, MAX_PARTS)

    def id(self, key: str, vocab: int) -> int:
        v = self.integer(key, 0)
        if v >= vocab:
            raise self.fail(key, f"is {v}, outside the vocabulary of {vocab}")
        return v

    def number(self, key: str) -> float:
        v = self.get(key)
        if isinstance(v, bool) or not isinstance(v, int | float):
            raise self.fail(key, f"must be a number, got {v!r}")
        if not abs(v) <= MAX_NUMBER:  # nan and infinity too, which Python's JSON has
            raise self.fail(key, f"must be at most {MAX_NUMBER:g}")
        return float(v)

    def flag(self, key: str) -> bool:
        v = self.get(key)
        if not isinstance(v, bool):
            raise self.fail(key, f"must be true or false, got {v!r}")
        return v

    def ints(self, key: str) -> tuple[int, ...]:
        v = self.get(key)
        if not isinstance(v, list) or not all(
            isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in v
        ):
            raise self.fail(key, f"must be a list of integers, got {v!r}")
        if len(v) > MAX_PARTS or max(v, default=0) > MAX_SIZE:
            raise self.fail(
                key, f"must be at most {MAX_PARTS:,} numbers, each at most {MAX_SIZE:,}"
            )
        return tuple(v)

    def rope(self) -> Section:
        """`rope_parameters` (transformers 5) or `rope_scaling` beside a flat `rope_theta` (the
        released file)."""
        if isinstance(self.raw.get("rope_parameters"), dict):
            merged = dict(self.raw["rope_parameters"])
        else:
            merged = dict(self.raw.get("rope_scaling") or {})
        merged.setdefault("rope_theta", self.raw.get("rope_theta"))
        return Section(merged, self.where, f"{self.path}rope_parameters.")


def decoder_config(s: Section, *, mrope: bool, moe: bool, shared: bool) -> DecoderConfig:
    heads, kv = s.integer("num_attention_heads"), s.integer("num_key_value_heads")
    if heads % kv:
        raise s.fail(
            "num_attention_heads", f"({heads}) must be a multiple of num_key_value_heads ({kv})"
        )
    rope, head_dim = s.rope(), s.integer("head_dim")
    section: tuple[int, int, int] | None = None
    if mrope:
        sizes = rope.ints("mrope_section")
        if len(sizes) != 3 or sum(sizes) * 2 != head_dim:
            raise rope.fail(
                "mrope_section",
                f"must be three sizes that sum to head_dim/2 = {head_dim // 2}, got {sizes}",
            )
        section = (sizes[0], sizes[1], sizes[2])
    experts = None
    if moe:
        experts = MoeConfig(
            num_experts=s.count("num_experts" if "num_experts" in s.raw else "num_local_experts"),
            top_k=s.integer("num_experts_per_tok"),
            expert_size=s.integer("moe_intermediate_size"),
            norm_topk=s.flag("norm_topk_prob"),
            shared_size=s.integer("shared_expert_intermediate_size") if shared else None,
        )
        if experts.top_k > experts.num_experts:
            raise s.fail(
                "num_experts_per_tok",
                f"({experts.top_k}) exceeds num_experts ({experts.num_experts})",
            )
    if s.raw.get("hidden_act", "silu") != "silu" or s.raw.get("attention_bias", False):
        raise s.fail("hidden_act/attention_bias", "other than silu/false is not supported")
    return DecoderConfig(
        vocab_size=s.integer("vocab_size"),
        hidden_size=s.integer("hidden_size"),
        num_layers=s.count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=head_dim,
        rms_eps=s.number("rms_norm_eps"),
        rope_theta=rope.number("rope_theta"),
        mrope_section=section,
        max_positions=s.integer("max_position_embeddings"),
        dense_size=None if moe else s.integer("intermediate_size"),
        moe=experts,
    )
