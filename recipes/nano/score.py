"""Word error rates by an independent recogniser: Moonshine tiny (MIT), plain ONNX files on onnxruntime.

The files: `encoder_model.onnx` and `decoder_model_merged.onnx` of npm `@moonshine-ai/moonshine-js` 0.1.29
(dist/model/tiny/quantized), `tokenizer.bin` of PyPI `moonshine-voice` 0.0.73 (assets/tiny-en). What is scored are the
codes that `speak` wrote, decoded here, and the teacher's own speech beside them. Called by `__main__.py`."""

from __future__ import annotations

import re
import wave
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from recipes.nano import codec, corpus
from recipes.nano.audio import RATE, Floats, resample
from recipes.nano.grammar import number
from recipes.nano.report import gate, note, say
from recipes.nano.shape import CODES, GROUPS

HEARD_RATE = 16000
CONTROL = 10  # sentences of random codes
SECOND = 20  # sentences that a second recogniser hears
_SPELLING = {"favourite": "favorite", "colour": "color", "neighbours": "neighbors", "neighbour": "neighbor",
             "ok": "okay", "grey": "gray", "theatre": "theater", "harbour": "harbor", "goodbye": "good bye",
             "everyone": "every one", "someone": "some one", "travelled": "traveled"}  # fmt: skip


class Recogniser:
    def __init__(self, folder: Path) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        names = ("encoder_model.onnx", "decoder_model_merged.onnx")
        providers = ["CPUExecutionProvider"]
        self.encoder, self.decoder = (onnxruntime.InferenceSession(folder / n, options, providers) for n in names)
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
            ids.append(int(given["logits"][0, -1].argmax()))
            for key, value in given.items():
                name = key.replace("present", "past_key_values")
                if key.startswith("present") and (first or "decoder" in name):
                    cache[name] = value
            first = False
            if ids[-1] == 2:
                break
        text = b"".join(self.pieces[i] for i in ids if i > 2).decode("utf-8", "ignore")
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
    for word in re.sub(r"[^a-z0-9' ]", " ", text).split():
        written = number(int(word)) if word.isdigit() and int(word) <= 199 else word
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


def write_wav(path: Path, samples: Floats) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((np.clip(samples, -1, 1) * 32767).astype(np.int16).tobytes())


def decoded(work: Path, path: Path, random: bool = False) -> tuple[list[str], list[Floats]]:
    """What the codes of a file sound like; or, to know what a recogniser makes of noise, random ones of the lengths."""
    decoder = codec.load_decoder(work, torch.device("cpu"))
    with np.load(path) as file:
        texts, lengths, table = [str(t) for t in file["texts"]], file["lengths"], file["codes"]
    if random:
        texts, lengths = texts[:CONTROL], lengths[:CONTROL]
        table = np.random.default_rng(0).integers(0, CODES, (int(lengths.sum()), GROUPS))
    waves: list[npt.NDArray[np.float32]] = []
    for part in np.split(table, np.cumsum(lengths)[:-1]):
        with torch.no_grad():
            given = decoder(torch.from_numpy(part.astype(np.int64)).t()[None])[0, 0] if len(part) else torch.zeros(2400)
        waves.append(given.numpy())
    return texts, waves


class Listener(Protocol):
    def hear(self, samples: Floats) -> str: ...


def run(
    work: Path, speech: Path, recogniser: Path, audio: Path | None, wav: Path | None, second: Listener | None = None
) -> None:
    """`second`: another recogniser, asked about the first sentences of each kind."""
    listener = Recogniser(recogniser)
    sources: list[tuple[str, list[str], list[Floats]]] = []
    if audio is not None:
        taught = [a.astype(np.float32) / 32768 for a in corpus.load(audio, 0)]
        sources.append(("teacher", corpus.chunk_texts(0), taught))
    for path in sorted(speech.glob("codes-of-*.npz")):
        sources.append((path.stem.removeprefix("codes-of-"), *decoded(work, path)))
        if path.stem == "codes-of-codec":
            sources.append(("control", *decoded(work, path, random=True)))
    rates: dict[str, dict[str, float]] = {}
    for name, texts, waves in sources:
        heard = [listener.hear(w) for w in waves]
        pairs = list(zip(texts, heard, strict=True))
        parts = {"fixed": pairs[:40], "held-out": pairs[40:]} if len(pairs) == 80 else {"all": pairs}
        rates[name] = {part: round(error_rate(p), 4) for part, p in parts.items()}
        if second is not None:
            few = [(t, second.hear(w)) for t, w in zip(texts[-SECOND:], waves[-SECOND:], strict=True)]
            rates[name]["second opinion"] = round(error_rate(few), 4)
        say("score", f"{name}: {rates[name]}")
        for wanted, got in pairs:
            if words(wanted) != words(got):
                say("score", f"  {name}: {wanted} | {got}")
        if wav is not None:
            folder = wav / name
            folder.mkdir(parents=True, exist_ok=True)
            for i, w in enumerate(waves):
                write_wav(folder / f"{i:02d}.wav", w)
    for name, part, limit in (("codec", "fixed", 0.05), ("domain", "all", 0.10), ("sampled", "held-out", 0.20)):
        if name in rates:
            gate(
                "score",
                f"{name}, {part}: word error rate {rates[name][part]:.3f}, wanted below {limit}",
                rates[name][part] < limit,
            )
    if "control" in rates:
        rate = rates["control"]["all"]
        gate("score", f"control: word error rate of random codes {rate:.3f}, wanted above 0.9", rate > 0.9)
    note(work, "score", word_error_rate=rates)
