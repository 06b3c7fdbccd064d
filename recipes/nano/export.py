"""The trained parts as one checkpoint in the released layout: the same tensor names, one tensor per
expert.

What nothing trains (the vision tower; the audio tower, if `listen` has not run) gets small random
weights. Called by `__main__.py`."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from recipes.nano import codec, listen, shape, talker, thinker, tokens
from recipes.nano.report import gate, note, say
from recipes.nano.tokens import Text
from stretto import embedded
from stretto.models.random_weights import spread
from stretto.testing.qwen3_omni import PREPROCESSOR, checkpoint_shapes

SHARD = 16_300_000  # bytes
LIMIT = 60_000_000
COOL = 0.25  # a power of two: bfloat16 loses nothing
"""Temperature of codes 1 to 15. The released model draws them at a fixed 1.0, so this is written
into the heads that give their logits. README.md says what it was chosen by."""
HEADS = "talker.code_predictor.lm_head."
GENERATION = {
    "talker_max_new_tokens": 1024,
    "talker_repetition_penalty": 1.0,
    "talker_temperature": 0.2,
    "talker_top_k": 20,
    "talker_top_p": 0.9,
}
IDEAS = ["What is a stretto?", "Say: the old farmer carried a heavy basket across the bridge.",
    "Who are you?",
         "What is seven plus eight?", "Count from one to ten", "Tell me a joke"]  # fmt: skip
Tensors = dict[str, torch.Tensor]
AUDIO = "thinker.audio_tower."
PARTS = (
    (AUDIO, listen.FILE),
    ("thinker.", thinker.FILE),
    ("talker.", talker.FILE),
    ("code2wav.", codec.DECODER),
)


def _split(name: str, tensor: torch.Tensor) -> Tensors:
    """A tensor of all experts as one tensor per expert and projection."""
    head, _, last = name.rpartition(".")
    found: Tensors = {}
    for i, w in enumerate(tensor):
        if last == "gate_up_proj":
            found[f"{head}.{i}.gate_proj.weight"], found[f"{head}.{i}.up_proj.weight"] = w.chunk(2)
        else:
            found[f"{head}.{i}.down_proj.weight"] = w
    return found


def collect(work: Path, last: bool = False) -> Tensors:
    """Every tensor of the checkpoint, bfloat16. `last`: of the talker, the weights at the end of
    its training."""
    text = Text.open(work)
    wanted = checkpoint_shapes(text.config)
    trained: Tensors = {}
    for prefix, file in PARTS:
        path = work / (talker.LAST if last and file == talker.FILE else file)
        for name, tensor in load_file(path).items() if prefix != AUDIO or path.exists() else ():
            full = prefix + name
            parts = _split(full, tensor) if ".experts." in full else {full: tensor}
            trained |= {k: v for k, v in parts.items() if k in wanted or prefix != "code2wav."}
    unknown = set(trained) - set(wanted)
    if unknown:
        raise SystemExit(f"no such tensors in the released layout: {sorted(unknown)[:5]}")
    found: Tensors = {}
    for name, size in wanted.items():
        if name in trained:
            assert tuple(trained[name].shape) == tuple(size), (name, trained[name].shape, size)
            sharper = 1 / COOL if name.startswith(HEADS) else 1.0
            found[name] = (trained[name].float() * sharper).to(torch.bfloat16).contiguous()
            continue
        if not name.startswith(("thinker.visual.", "thinker.audio_tower.")):
            raise SystemExit(f"nothing was trained for {name}")
        mean, std = spread(name, size)
        noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(
            size, dtype=np.float32
        )
        found[name] = torch.from_numpy(mean + std * noise).to(torch.bfloat16)
    return found


def take_apart(folder: Path, work: Path) -> None:
    """The parts of a checkpoint as the training steps keep them, to go on from."""
    found: dict[str, Tensors] = {}
    experts: dict[str, dict[int, Tensors]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            part = next((p for p, _ in PARTS if name.startswith(p)), None)
            head, middle, tail = name.partition(".experts.")
            if middle:
                number, projection, _ = tail.split(".")
                experts.setdefault(head + ".experts", {}).setdefault(int(number), {})[
                    projection
                ] = tensor
            elif part is not None and not name.startswith("thinker.visual."):
                cooled = COOL if name.startswith(HEADS) else 1.0
                found.setdefault(part, {})[name.removeprefix(part)] = (tensor.float() * cooled).to(
                    tensor.dtype
                )
    for name, numbered in experts.items():
        part = next(p for p, _ in PARTS if name.startswith(p))
        rest = name.removeprefix(part)
        each = [numbered[i] for i in range(len(numbered))]
        joined = [torch.cat((e["gate_proj"], e["up_proj"])) for e in each]
        found[part][f"{rest}.gate_up_proj"] = torch.stack(joined)
        found[part][f"{rest}.down_proj"] = torch.stack([e["down_proj"] for e in each])
    for part, file_name in PARTS:
        save_file(found[part], work / file_name)


def write(work: Path, folder: Path, last: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = collect(work, last)
    shards: list[Tensors] = [{}]
    used = 0
    for name, tensor in tensors.items():
        if used + tensor.nbytes > SHARD:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += tensor.nbytes
    where: dict[str, str] = {}
    for i, shard in enumerate(shards, start=1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, file)
    total = sum(t.nbytes for t in tensors.values())
    _json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))},
    )
    _json(folder / "generation_config.json", GENERATION)
    _json(folder / "preprocessor_config.json", PREPROCESSOR)
    _json(folder / embedded.EXAMPLE_PROMPTS, IDEAS)
    tokens.write_files(work, folder)
    _json(folder / "config.json", shape.config_json(Text.open(work).roles))
    size = sum(p.stat().st_size for p in folder.iterdir())
    say("export", f"{len(tensors)} tensors in {len(shards)} files")
    gate("export", f"{size / 1e6:.2f} MB, wanted at most {LIMIT / 1e6:.0f}", size <= LIMIT)
    note(work, "export", bytes=size, parameters=total // 2)


def renew(work: Path, folder: Path) -> None:
    """Write the tensors that changed into the files of an earlier export; all else stays as it is,
    to the byte."""
    tensors = collect(work)
    for file in sorted(folder.glob("model-*.safetensors")):
        data = bytearray(file.read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        changed = 0
        for name, about in json.loads(data[8:start]).items():
            if name == "__metadata__":
                continue
            a, b = (start + at for at in about["data_offsets"])
            new = tensors[name].view(torch.uint8).numpy().tobytes()
            if data[a:b] != new:
                data[a:b] = new
                changed += 1
        if changed:
            file.write_bytes(data)
        say("export", f"{file.name}: {changed} tensors changed")


def _json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
