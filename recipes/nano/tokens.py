"""The tokenizer: byte-level BPE of 2048 tokens trained on the recipe's own text, in the files of a
Qwen2 tokenizer.

Special tokens, their order, the rule that cuts text into pieces and the chat template are the
released model's. Called by every step that reads or writes text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from recipes.nano import corpus, grammar, shape
from recipes.nano.report import say
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.testing.tiny_tokenizer import (
    CHAT_TEMPLATE,
    ROLES,
    add_special,
    cut_into_bytes,
    tokenizer_config,
)

FILE = "tokenizer.json"


def train(work: Path, pairs: int = 100_000, sentences: int | None = None) -> None:
    tokenizer = Tokenizer(models.BPE())
    cut_into_bytes(tokenizer)
    trainer = trainers.BpeTrainer(
        vocab_size=shape.NUM_BPE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = corpus.texts()[:sentences]
    tokenizer.train_from_iterator(_text(texts, pairs), trainer)
    assert tokenizer.get_vocab_size() == shape.NUM_BPE
    add_special(tokenizer)
    (work / FILE).write_text(tokenizer.to_str(pretty=False), encoding="utf-8")
    text = Text.open(work)
    count = sum(len(text.encode(t)) for t in texts)
    letters = sum(map(len, texts))
    say(
        "tokenizer",
        f"{shape.NUM_BPE} tokens, {letters / count:.2f} characters per token; roles {text.roles}",
    )


def _text(texts: Sequence[str], pairs: int) -> Iterator[str]:
    rng = Random("tokenizer")
    yield from texts
    for _ in range(pairs):
        pair = grammar.pair(rng)
        yield pair.question
        yield pair.answer
    for role in ROLES:  # each must become one token
        for _ in range(pairs):
            yield role


@dataclass(frozen=True)
class Text:
    """The trained tokenizer and the ids the recipe needs."""

    tokenizer: Tokenizer

    @classmethod
    def open(cls, work: Path) -> Text:
        return cls(Tokenizer.from_file(str(work / FILE)))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_many(self, texts: list[str]) -> list[list[int]]:
        return [e.ids for e in self.tokenizer.encode_batch(texts, add_special_tokens=False)]

    def words(self, texts: list[str]) -> list[npt.NDArray[np.int64]]:
        """Of each text, the number of the word that each token is of; words are what spaces
        part."""
        found = []
        for text, e in zip(
            texts, self.tokenizer.encode_batch(texts, add_special_tokens=False), strict=True
        ):
            spaces = np.cumsum([c == " " for c in text])
            found.append(spaces[[end - 1 for _, end in e.offsets]])
        return found

    def decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    @cached_property
    def roles(self) -> dict[str, int]:
        found = {role: self.encode(role) for role in ("system", "user", "assistant")}
        assert all(len(ids) == 1 for ids in found.values()), found
        return {role: ids[0] for role, ids in found.items()}

    @cached_property
    def newline(self) -> int:
        (i,) = self.encode("\n")
        return i

    @cached_property
    def config(self) -> OmniConfig:
        return shape.config(self.roles)

    def turn(self, role: str, content: list[int]) -> list[int]:
        t = self.config.tokens
        return [t.im_start, self.roles[role], self.newline, *content, t.im_end, self.newline]

    @property
    def opening(self) -> list[int]:
        return [self.config.tokens.im_start, self.roles["assistant"], self.newline]


def write_files(work: Path, folder: Path) -> None:
    """The tokenizer's files of a checkpoint."""
    raw = json.loads((work / FILE).read_text(encoding="utf-8"))
    (folder / FILE).write_text(json.dumps(raw, ensure_ascii=False), encoding="utf-8")
    vocab = raw["model"]["vocab"]
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    merges = [m if isinstance(m, str) else " ".join(m) for m in raw["model"]["merges"]]
    (folder / "merges.txt").write_text("".join(f"{m}\n" for m in merges), encoding="utf-8")
    config = tokenizer_config(shape.special_ids(), longest=4096)
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2) + "\n", encoding="utf-8"
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
