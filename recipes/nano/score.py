"""Word error rates by an independent recogniser: Moonshine tiny (MIT), plain ONNX files on
onnxruntime.

The files: `encoder_model.onnx` and `decoder_model_merged.onnx` of npm `@moonshine-ai/moonshine-js`
0.1.29 (dist/model/tiny/quantized), `tokenizer.bin` of PyPI `moonshine-voice` 0.0.73
(assets/tiny-en); `scripts/recogniser.py` fetches them. What is scored is what users run: the
exported checkpoint, asked through the engine on a CPU. Beside it the teacher, the codec alone, and
two controls that must not be understood: random codes, and a random checkpoint. Called by
`__main__.py`."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Protocol

import numpy as np
import soundfile
import torch

from recipes.nano import codec, corpus, festival, grammar
from recipes.nano.audio import RATE, Floats, resample
from recipes.nano.report import gate, note, say
from recipes.nano.shape import CODES, GROUPS
from stretto import Engine
from stretto.registry import write_tiny

HEARD_RATE = 16000
EACH = 20  # questions of every kind of the domain
CONTROL = 10  # sentences of each control
AT_ONCE = 8  # requests: an answer does not depend on those beside it
DRAWS = 3  # how often everything is said with the checkpoint's own sampling
SECOND = slice(60, 80)  # what a second recogniser hears
GATES = (("codec", "fixed", 0.05), ("sampled", "domain", 0.10), ("sampled", "held-out", 0.20))
_SPELLING = {"favourite": "favorite", "colour": "color", "neighbours": "neighbors",
    "neighbour": "neighbor",
             "ok": "okay", "grey": "gray", "theatre": "theater", "harbour": "harbor",
             "goodbye": "good bye",
             "everyone": "every one", "someone": "some one", "travelled": "traveled",
             "cannot": "can not"}  # fmt: skip


_END = 2  # the recogniser's last special token


class Recogniser:
    def __init__(self, folder: Path) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        names = ("encoder_model.onnx", "decoder_model_merged.onnx")
        providers = ["CPUExecutionProvider"]
        self.encoder, self.decoder = (
            onnxruntime.InferenceSession(folder / n, options, providers) for n in names
        )
        self.past = [i.name for i in self.decoder.get_inputs() if "past" in i.name]
        self.out = [o.name for o in self.decoder.get_outputs()]
        self.pieces = _pieces((folder / "tokenizer.bin").read_bytes())

    def hear(self, samples: Floats) -> str:
        """What was said, from 24 kHz samples."""
        loud = resample(samples, HEARD_RATE, RATE)
        quiet = np.zeros(HEARD_RATE // 4, np.float32)
        loud = np.concatenate((quiet, loud / max(1e-6, float(np.abs(loud).max())) * 0.7, quiet))
        hidden = self.encoder.run(None, {"input_values": loud[None].astype(np.float32)})[0]
        cache = {name: np.zeros((1, 8, 0, 36), np.float32) for name in self.past}
        ids, first = [1], True
        for _ in range(int(len(loud) / HEARD_RATE * 8) + 4):
            fed = {
                "input_ids": np.array([ids[-1:]]),
                "encoder_hidden_states": hidden,
                "use_cache_branch": np.array([not first]),
            }
            given = dict(zip(self.out, self.decoder.run(None, fed | cache), strict=True))
            logits = given["logits"][0, -1]
            if (
                first
            ):  # something was said: without this, lists of numbers are often heard as nothing
                logits[_END] = -np.inf
            ids.append(int(logits.argmax()))
            for key, value in given.items():
                name = key.replace("present", "past_key_values")
                if key.startswith("present") and (first or "decoder" in name):
                    cache[name] = value
            first = False
            if ids[-1] == _END:
                break
        text = b"".join(self.pieces[i] for i in ids if i > _END).decode("utf-8", "ignore")
        return text.replace("▁", " ").strip()


def _pieces(raw: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(raw):
        size, at = raw[at], at + 1
        if size >= 128:
            size, at = raw[at] * 128 + size - 128, at + 1
        found.append(raw[at : at + size])
        at += size
    return found


def words(text: str) -> list[str]:
    """Words to compare: spelled one way, numbers written out."""
    text = (
        text.lower()
        .replace("to-day", "today")
        .replace("-", " ")
        .replace("’", "'")
        .replace("+", " plus ")
        .replace("=", " is ")
    )
    found = []
    text = re.sub(r"\b(\d\d)(?=\d\d\b)", r"\1 ", text)  # 1516 for fifteen, sixteen
    for word in re.sub(r"[^a-z0-9' ]", " ", text).split():
        written = grammar.number(int(word)) if word.isdigit() and int(word) <= 199 else word
        found += _SPELLING.get(written, written).replace("'", "").split()
    return found


def edits(wanted: list[str], heard: list[str]) -> int:
    row = list(range(len(heard) + 1))
    for i, a in enumerate(wanted, start=1):
        corner, row[0] = row[0], i
        for j, b in enumerate(heard, start=1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (a != b))
    return row[-1]


def error_rate(pairs: list[tuple[str, str]]) -> float:
    return sum(edits(words(a), words(b)) for a, b in pairs) / sum(len(words(a)) for a, _ in pairs)


# ---- what is said


@dataclass(frozen=True, slots=True, eq=False)
class Speech:
    """The texts of the score, or the first of them, as somebody said them; once, or several times
    over."""

    name: str
    waves: list[Floats]
    ended: list[bool] | None = None  # by itself; None for those who cannot go on
    exact: str = ""  # texts that are right, where there are any


def domain_pairs(each: int = EACH) -> list[grammar.Pair]:
    """So many questions of every kind, no answer twice; combinations that training never saw come
    first."""
    rng, found = Random("domain score"), []
    for pairs in grammar.domain_kinds().values():
        picked: dict[str, grammar.Pair] = {}
        for pair in sorted(rng.sample(pairs, len(pairs)), key=lambda p: not p.held_out):
            picked.setdefault(pair.answer, pair)
        found += [*picked.values()][:each]
    return found


def questions() -> list[grammar.Pair]:
    """The 80 sentences to repeat, then the questions of the domain."""
    rng = Random("speak")
    return [grammar.say(rng, text) for text in corpus.chunk_texts(0)] + domain_pairs()


def taught(work: Path, texts: list[str]) -> Iterator[Speech]:
    """Teacher, codec and random codes; those that the installed parts allow."""
    if shutil.which("festival") is None or not (work / codec.ENCODER).exists():
        say(
            "score",
            "festival or the codec's encoder is missing: no teacher, no codec, no random codes",
        )
        return
    with tempfile.TemporaryDirectory() as scratch:
        spoken = [u.samples for u in festival.speak(texts, Path(scratch))]
    yield Speech("teacher", [s.astype(np.float32) / 32768 for s in spoken])
    device = torch.device("cpu")
    encoder, decoder = codec.load_encoder(work, device), codec.load_decoder(work, device)
    table, sizes = codec.encode_chunk(encoder, spoken, device)
    parts = np.split(table.astype(np.int64), np.cumsum(sizes)[:-1])
    yield Speech("codec", [_decoded(decoder, part) for part in parts])
    rng = np.random.default_rng(0)
    noise = (rng.integers(0, CODES, (len(s) // codec.HOP, GROUPS)) for s in spoken[:CONTROL])
    yield Speech("random codes", [_decoded(decoder, table) for table in noise])


def _decoded(decoder: torch.nn.Module, table: Any) -> Floats:
    with torch.no_grad():
        given: Floats = decoder(torch.from_numpy(table).t()[None])[0, 0].numpy()
    return given


def asked(
    engine: Engine, name: str, pairs: list[grammar.Pair], draws: int = 1, **options: Any
) -> Speech:
    """What the engine answers, with the checkpoint's own sampling but for `options`."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        numbered = enumerate(pairs * draws)
        answers = [
            *pool.map(lambda one: engine.chat(one[1].question, seed=one[0], **options), numbered)
        ]
    wrong = [
        (p.question, a.text) for p, a in zip(pairs, answers, strict=False) if p.answer != a.text
    ]
    exact = f"{len(pairs) - len(wrong)} of {len(pairs)}"
    say("score", f"{name}: {exact} texts are right, not {wrong}")
    return Speech(
        name, [a.audio for a in answers], [a.finished.audio == "stop" for a in answers], exact
    )


def untrained(pairs: list[grammar.Pair]) -> Speech:
    """What a random checkpoint makes of the same path."""
    with tempfile.TemporaryDirectory() as folder:
        write_tiny(folder)
        with Engine(folder, device="cpu") as engine:
            return asked(
                engine, "random checkpoint", pairs[:CONTROL], max_text_tokens=16, max_frames=40
            )


# ---- what is heard


class Listener(Protocol):
    def hear(self, samples: Floats) -> str: ...


def _part(number: int) -> str:
    return "fixed" if number < 40 else "held-out" if number < 80 else "domain"


def rate(
    speech: Speech, pairs: list[grammar.Pair], listener: Listener, second: Listener | None
) -> dict[str, Any]:
    """Word error rates of the parts, of the kinds of questions, and by a second recogniser."""
    parts: dict[str, list[tuple[str, str]]] = {}
    kinds: dict[str, list[tuple[str, str]]] = {}
    for number, samples in enumerate(speech.waves):
        pair = pairs[number % len(pairs)]
        both = (pair.answer, listener.hear(samples))
        part = _part(number % len(pairs))
        parts.setdefault(part, []).append(both)
        if part == "domain":
            kinds.setdefault(pair.kind, []).append(both)
        if words(both[0]) != words(both[1]):
            say("score", f"  {speech.name}: {both[0]} | {both[1]}")
    found: dict[str, Any] = {part: round(error_rate(heard), 4) for part, heard in parts.items()}
    if second is not None and (few := speech.waves[SECOND]):
        heard = [(p.answer, second.hear(w)) for p, w in zip(pairs[SECOND], few, strict=True)]
        found["second opinion"] = round(error_rate(heard), 4)
    return found | (
        {"kinds": {k: round(error_rate(v), 4) for k, v in kinds.items()}} if kinds else {}
    )


def speeches(work: Path, checkpoint: Path, pairs: list[grammar.Pair]) -> Iterator[Speech]:
    yield from taught(work, [p.answer for p in pairs])
    with Engine(checkpoint, device="cpu") as engine:
        yield asked(engine, "sampled", pairs, DRAWS)
        yield asked(engine, "greedy", pairs, greedy_speech=True)
    yield untrained(pairs)


def run(
    work: Path, checkpoint: Path, recogniser: Path, wav: Path | None, second: Listener | None = None
) -> None:
    listener, pairs = Recogniser(recogniser), questions()
    rates: dict[str, dict[str, Any]] = {}
    ended: dict[str, str] = {}
    exact = ""
    for speech in speeches(work, checkpoint, pairs):
        rates[speech.name] = rate(speech, pairs, listener, second)
        say("score", f"{speech.name}: {rates[speech.name]}")
        if speech.ended is not None and speech.name in ("sampled", "greedy"):
            exact = speech.exact
            ended[speech.name] = f"{sum(speech.ended)} of {len(speech.ended)}"
            gate(
                "score", f"{speech.name}: {ended[speech.name]} end by themselves", all(speech.ended)
            )
        if wav is not None:
            (wav / speech.name).mkdir(parents=True, exist_ok=True)
            for i, w in enumerate(speech.waves):
                soundfile.write(wav / speech.name / f"{i}.wav", w, RATE)
    for name, part, limit in GATES:
        if name in rates:
            found = rates[name][part]
            gate(
                "score",
                f"{name}, {part}: word error rate {found:.3f}, wanted below {limit}",
                found < limit,
            )
    for name in (n for n in rates if n.startswith("random")):
        gate("score", f"{name}: word error rate {rates[name]['fixed']:.3f}, wanted above 0.9",
             rates[name]["fixed"] > 0.9)  # fmt: skip
    note(work, "score", word_error_rate=rates, ended=ended, exact=exact)
