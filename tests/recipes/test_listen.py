"""The step that teaches the audio encoder: what it computes is what the engine computes, and it
runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from recipes.nano import listen, thinker, voices
from recipes.nano.listen import Clips, Ears, Listener
from recipes.nano.tokens import Text
from recipes.nano.tower import Tower, rows_of
from stretto.models.qwen3_omni.audio_encoder import AudioEncoder
from stretto.models.qwen3_omni.config import audio_tokens
from stretto.preprocess.mel import mel
from tests.recipes.conftest import Made

CPU = torch.device("cpu")


def _sound(seconds: float, seed: int) -> np.ndarray:  # type: ignore[type-arg]
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(int(seconds * voices.RATE)) * 3000).astype(np.int16)


def _fill(folder: Path, number: int) -> None:
    lengths = [int((0.5 + i % 4 * 0.4) * voices.RATE) for i in range(voices.CHUNK)]
    folder.mkdir(exist_ok=True)
    np.savez(folder / f"{number:04d}.npz", samples=_sound(sum(lengths) / voices.RATE + 1,
        number)[: sum(lengths)],
             lengths=lengths)  # fmt: skip


@pytest.fixture
def text(made: Made) -> Text:
    return Text.open(made.work)


@pytest.fixture
def listener(made: Made, text: Text) -> Listener:
    torch.manual_seed(0)
    return Listener(
        text, Tower(text.config.thinker.audio), thinker.load(made.work, text, CPU)
    ).eval()


@pytest.fixture
def clips(text: Text, tmp_path: Path) -> Clips:
    _fill(tmp_path / "v", 2)
    found = Clips(text, tmp_path / "v", 12, CPU)
    found.look()
    return found


@pytest.mark.parametrize("frames", [100, 137, 191, 500])
def test_the_tower_is_the_engines_encoder(text: Text, frames: int) -> None:
    torch.manual_seed(frames)
    config = text.config.thinker.audio
    tower, encoder = Tower(config).eval(), AudioEncoder(config)
    state = tower.state_dict()
    with torch.no_grad():
        for i, layer in enumerate(encoder.layers):
            for kind in ("weight", "bias"):
                parts = [state.pop(f"layers.{i}.self_attn.{q}_proj.{kind}") for q in "qkv"]
                getattr(layer.self_attn.qkv, kind).copy_(torch.cat(parts))
        assert not encoder.load_state_dict(state, strict=False).unexpected_keys
        sound = torch.randn(config.num_mel_bins, frames)
        rows, counts = tower(F.pad(sound, (0, 500 - frames))[None], torch.tensor([frames]))
        wanted = encoder.encode(sound)
    assert int(counts) == len(wanted) == audio_tokens(frames)
    torch.testing.assert_close(rows[0, : len(wanted)], wanted, atol=1e-5, rtol=1e-4)


def test_rows_are_counted_as_the_engine_counts_them() -> None:
    frames = torch.arange(0, 501)
    assert rows_of(frames, 100).tolist() == [audio_tokens(n) for n in frames.tolist()]


def test_ears_hear_what_the_engine_hears() -> None:
    sound = _sound(1.4, 1)
    padded = torch.from_numpy(
        np.pad(sound, (0, listen.SAMPLES - len(sound))).astype(np.float32) / 32768
    )
    seen, frames = Ears()(padded[None], torch.tensor([len(sound)]))
    wanted = mel(sound.astype(np.float32) / 32768)
    inner = wanted.shape[1] - 2  # the last two frames of a clip see its end mirrored
    assert int(frames) == wanted.shape[1]
    np.testing.assert_allclose(seen[0, :, :inner].numpy(), wanted[:, :inner], atol=1e-3)
    assert not seen[0, :, wanted.shape[1] :].any()


def test_spelling_is_ctc() -> None:
    torch.manual_seed(3)
    scores = torch.randn(3, 20, 7, requires_grad=True)
    counts, sizes = torch.tensor([20, 14, 9]), torch.tensor([4, 5, 2])
    spelled = torch.tensor([[1, 1, 2, 3, 0], [5, 4, 4, 0, 2], [2, 3, 0, 0, 0]])
    loss = listen.spelling_loss(scores, counts, spelled, sizes)
    wanted = F.ctc_loss(
        scores.log_softmax(-1).transpose(0, 1), spelled, counts, sizes, blank=6, reduction="sum"
    )
    torch.testing.assert_close(loss, wanted / sizes.sum())
    (mine,) = torch.autograd.grad(loss, scores, retain_graph=True)
    (theirs,) = torch.autograd.grad(wanted / sizes.sum(), scores)
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-3)


def test_what_cannot_be_spelled_does_not_count() -> None:
    scores = torch.randn(1, 3, 7, requires_grad=True)
    loss = listen.spelling_loss(
        scores, torch.tensor([3]), torch.tensor([[1, 2, 3, 4]]), torch.tensor([4])
    )
    loss.backward()
    assert float(loss.detach()) == 0
    assert scores.grad is not None
    assert torch.isfinite(scores.grad).all()


def test_a_typed_turn_is_the_thinkers_own(listener: Listener, clips: Clips, text: Text) -> None:
    """Rows that are not real change nothing: the same logits as for the plain ids of the turn."""
    pick = torch.arange(3)
    typed, count = clips.typed[pick].long(), clips.num_typed[pick].long()
    answer, size = clips.answer[pick].long(), clips.num_answer[pick].long()
    nothing = torch.zeros(3, listen.ROWS, listener.words.shape[1])
    with torch.no_grad():
        as_text = torch.ones(3, dtype=torch.bool)
        x, real = listener.turn(nothing, count * 0, typed, count, as_text, count * 0, answer, size)
        hidden = listener.answered(x, real, torch.zeros_like(real, dtype=torch.int))
        for i in range(3):
            said = [*answer[i, : int(size[i])].tolist(), text.newline]
            ids = torch.tensor(
                [[*text.turn("user", typed[i, : int(count[i])].tolist()), *text.opening, *said]]
            )
            plain = listener.thinker(ids, torch.arange(ids.shape[1])[None], None)
            torch.testing.assert_close(hidden[i][real[i]], plain[0], atol=1e-4, rtol=1e-3)


def test_a_transcription_turn_is_the_chat_templates(
    listener: Listener, clips: Clips, text: Text
) -> None:
    """The rows of the sound, then the server's prompt: the same logits as for the turn in full."""
    rows = torch.randn(1, listen.ROWS, listener.words.shape[1])
    size = clips.num_transcript[:1].long()
    said = clips.transcript[:1].long()
    none, count = size * 0, torch.tensor([9])
    with torch.no_grad():
        x, real = listener.turn(
            rows, count, said * 0, none, none > 0, none + 1, said[:, : int(size)], size
        )
        hidden = listener.answered(x, real, torch.zeros_like(real, dtype=torch.int))[real]
        embed = listener.thinker.model.embed_tokens
        start, end = (torch.tensor([i]) for i in listener.marks)
        prompt = text.encode("Transcribe the audio into text.")
        turn = text.turn("user", prompt)
        behind = [*turn[3:], *text.opening, *said[0, : int(size)].tolist(), text.newline]
        parts = (embed(torch.tensor(turn[:3])), embed(start), rows[0, :9], embed(end))
        plain = torch.cat((*parts, embed(torch.tensor(behind))))[None]
        wanted = listener.thinker.model(plain, torch.arange(plain.shape[1])[None], None)[0]
    torch.testing.assert_close(hidden, wanted, atol=1e-4, rtol=1e-3)
    assert text.decode(said[0, : int(size)].tolist()) == voices.chunk(2)[0].pair.question


def test_questions_of_held_out_voices_are_not_learned(text: Text, tmp_path: Path) -> None:
    for number in range(voices.HELD_CHUNKS):
        _fill(tmp_path, number)
        _fill(tmp_path, voices.REMARKS + number)
    clips = Clips(text, tmp_path, 12, CPU)
    clips.look()
    assert len(clips) == 0
    learned = [n for n in (*range(40), *range(voices.REMARKS, 5010)) if not voices.held_out(n)]
    assert len(learned) == 40 - 2 + 12 - 2
    spoken = {a.voice for n in learned for a in voices.chunk(n)}
    assert not spoken & {voice for _, voice in voices.HELD_OUT}
    assert not any(a.pair.held_out for n in range(voices.HELD_CHUNKS, 40) for a in voices.chunk(n))


@pytest.fixture
def work(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the step begins; nobody is asked anything, which takes long."""
    for file in ("tokenizer.json", thinker.FILE):
        shutil.copy(made.work / file, tmp_path)
    for number in range(voices.HELD_CHUNKS + 1):
        _fill(tmp_path / "v", number)
    monkeypatch.setattr(listen, "quiz", lambda *_: ({"rms": 0.0}, {"rms": 1.0}))
    monkeypatch.setattr(thinker, "exactness", lambda m, t, pairs: {p.kind: 0.0 for p in pairs})
    return tmp_path


def _settings(work: Path, **more: bool) -> listen.Settings:
    return listen.Settings(60, work / "v", clips=8, batch=2, text_batch=1, first=8, rows=4,
                           device="cpu", steps=1, **more)  # type: ignore[arg-type]  # fmt: skip


def test_the_step(work: Path) -> None:
    before = (work / thinker.FILE).read_bytes()
    listen.train(work, _settings(work))
    report = json.loads((work / "report-listen.json").read_text())
    assert report["steps"] == 1
    assert (work / listen.FILE).exists()
    assert (work / thinker.FILE).read_bytes() != before


def test_a_remark_is_written_down_only(
    listener: Listener, text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no answer: its turn ends with the server's prompt, whatever the shares are."""
    number = voices.REMARKS + voices.HELD_CHUNKS
    _fill(tmp_path, number)
    clips = Clips(text, tmp_path, 12, CPU)
    clips.look()
    assert not clips.num_answer[: len(clips)].any()
    asked = {a.pair.question for a in voices.chunk(number)}
    said = clips.transcript[0, : int(clips.num_transcript[0]) - 1].tolist()
    assert text.decode(said) in asked

    asked_for: list[tuple[bool, bool]] = []
    turn = listener.turn

    def watched(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        asked_for.append((bool(given[4].any()), bool((given[5] > 0).all())))
        return turn(*given)

    monkeypatch.setattr(listener, "turn", watched)
    monkeypatch.setattr(listen, "TYPED", 1.0)
    with torch.no_grad():
        listen.losses(listener, clips, torch.arange(4), 0.0)
    assert asked_for == [(False, True)]


MEETING = """
import sys
import torch
import torch.distributed as dist
from recipes.nano.graph import Schedule, Trainer

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
weight = torch.nn.Parameter(torch.full((3,), float(rank)))


def loss(bfloat16):
    return (weight * (1 + rank)).sum(), torch.zeros(1)


schedule = Schedule(3600, rate=0.1, warm_up=1, decay=0.0, max_steps=4 if rank else 8)
Trainer("meeting", [weight], [weight], loss, schedule, ("none",), torch.device("cpu"), False,
    block=2, after_block=lambda step: print(step, weight.tolist())).run()  # fmt: skip
"""


def test_processes_that_train_together_agree(tmp_path: Path) -> None:
    """Their weights are one after each block of steps, and they end when the first has ended."""
    command = [sys.executable, "-c", MEETING]
    running = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "meeting")], stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    said = [p.communicate()[0].decode().splitlines() for p in running]
    blocks = [[line for line in lines if line[0] in "246"] for lines in said]
    assert blocks[0] == blocks[1]
    assert [line[0] for line in blocks[0]] == ["2", "4"]


def test_what_is_spoken_does_not_depend_on_the_process() -> None:
    """Sound made in one process is learned from in another."""
    command = [sys.executable, "-c", "from recipes.nano import voices\nprint(voices.chunk(5000))"]
    said = {
        subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True,
            check=True).stdout
        for seed in "12"
    }  # fmt: skip
    assert len(said) == 1
