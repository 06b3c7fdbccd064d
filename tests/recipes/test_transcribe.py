"""The step that teaches transcription to a finished checkpoint: what it computes in packed rows is
what the engine's prompt would give, and the teacher holds the answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from recipes.nano import encoded, listen, thinker, transcribe, voices, weights
from recipes.nano.encoded import Encoded
from recipes.nano.listen import Clips, Listener
from recipes.nano.tokens import Text
from recipes.nano.tower import Tower
from recipes.nano.transcribe import ANSWER, SHARED, TRANSCRIPT, TYPED, Layout, Step, Turn
from tests.recipes.conftest import Made

CPU = torch.device("cpu")
SIZES = (9, 14, 5)


def _fill(folder: Path, number: int) -> None:
    rng = np.random.default_rng(number)
    lengths = [int((0.5 + i % 4 * 0.4) * voices.RATE) for i in range(voices.CHUNK)]
    samples = (rng.standard_normal(sum(lengths)) * 3000).astype(np.int16)
    folder.mkdir(exist_ok=True)
    np.savez(folder / f"{number:04d}.npz", samples=samples, lengths=lengths)


@pytest.fixture
def text(made: Made) -> Text:
    return Text.open(made.work)


@pytest.fixture
def listener(made: Made, text: Text) -> Listener:
    torch.manual_seed(0)
    model = thinker.load(made.work, text, CPU)
    return Listener(text, Tower(text.config.thinker.audio), model).eval()


@pytest.fixture
def turns(text: Text) -> list[Turn]:
    end = text.config.tokens.im_end
    layout = Layout(text)
    pairs = [("Twelve.", "What is ten plus two?"), ("", "Open the door."), ("Hello!", "Hello.")]
    found = []
    for clip, pair in enumerate(pairs):
        answer, transcript = ([*text.encode(t), end] if t else [] for t in pair)
        found.append(layout.turn(clip, SIZES[clip], answer, transcript, prompt=0))
    return found


@pytest.mark.parametrize("kind", [ANSWER, TRANSCRIPT])
def test_a_branch_is_the_turn_alone(listener: Listener, turns: list[Turn], kind: int) -> None:
    """The logits of a packed branch are those of the turn that the engine would run."""
    torch.manual_seed(1)
    model = listener.thinker
    rows = torch.randn(len(SIZES), max(SIZES), listener.words.shape[1])
    expected = []
    with torch.no_grad():
        [(logits, tokens)] = transcribe.predict(model, transcribe.pack(turns)[0], rows, (kind,))
        for i, turn in enumerate(turns):
            ids = torch.from_numpy(turn.ids[turn.learn == kind])[None]
            if not ids.numel():
                continue
            size, count = torch.tensor([ids.shape[1]]), torch.tensor([SIZES[i]])
            none, prompt = size * 0, torch.tensor([int(kind == TRANSCRIPT)])
            x, real = listener.turn(
                rows[i : i + 1], count, ids * 0, none, none > 0, prompt, ids, size
            )
            states = listener.answered(x, real, torch.zeros_like(real, dtype=torch.int))
            expected.append((model.lm_head(states[0, -int(size) - 2 : -2]), ids[0]))
    assert torch.equal(tokens, torch.cat([ids for _, ids in expected]))
    torch.testing.assert_close(
        logits, torch.cat([each for each, _ in expected]), atol=1e-4, rtol=1e-3
    )


def test_one_branch_of_a_turn(turns: list[Turn]) -> None:
    answer = turns[0].alone(ANSWER)
    assert set(answer.branch.tolist()) == {SHARED, ANSWER}
    assert (answer.position == np.arange(len(answer.ids))).all()
    assert set(turns[1].alone(ANSWER).branch.tolist()) == {SHARED}


def test_typed_rows_are_the_thinkers_own(text: Text, listener: Listener) -> None:
    data = thinker.Data.place(thinker.rows(text, 2, "typed", transcribe.WIDTH), CPU)
    torch.manual_seed(2)
    batch = transcribe.conversations(data, 3)
    with torch.no_grad():
        [(logits, tokens)] = transcribe.predict(
            listener.thinker, batch, torch.zeros(1, 1, listener.words.shape[1]), (TYPED,)
        )
        torch.manual_seed(2)
        expected = data.loss(listener.thinker, 3)
    torch.testing.assert_close(F.cross_entropy(logits, tokens), expected)


def test_what_is_encoded_once_is_what_the_encoder_gives(
    listener: Listener, text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawn in any order, of two chunks; rows behind the end of a clip are zero."""
    as_it_is = lambda s, n: listener.ears(s.float() / 32768, n)  # noqa: E731
    for change in ("changed", "shifted"):
        monkeypatch.setattr(listener.ears, change, as_it_is)
    clips = Clips(text, tmp_path, 2 * voices.CHUNK, CPU, Encoded(tmp_path, 2 * voices.CHUNK))
    assert clips.encoded is not None
    both = Clips(text, tmp_path, 2 * voices.CHUNK, CPU)
    for number in (2, 3):
        _fill(tmp_path, number)
        both.add(number)
        alone = Clips(text, tmp_path, voices.CHUNK, CPU)
        alone.add(number)
        save_file(transcribe.encode(listener, alone, 2), clips.encoded.path(number))
    _fill(tmp_path, 4)  # nobody encoded it
    clips.look()
    assert clips.have == {2, 3}
    pick = torch.tensor([7, len(clips) - 1, len(clips) // 2, 7, 0])
    rows, counts = clips.encoded.draw(pick)
    with torch.no_grad():
        wanted, sizes = listen.heard(listener, *as_it_is(both.samples[pick], both.lengths[pick]))
    assert counts.tolist() == sizes.tolist()
    real = torch.arange(rows.shape[1]) < counts[:, None]
    torch.testing.assert_close(rows[real], wanted[:, : rows.shape[1]][real], atol=0.02, rtol=0.02)
    assert not rows[~real].any()


@pytest.fixture
def work(made: Made, text: Text, listener: Listener, tmp_path: Path) -> Path:
    for file in ("tokenizer.json", thinker.FILE):
        shutil.copy(made.work / file, tmp_path)
    weights.save(listener.tower, tmp_path / listen.FILE)
    for number in (*range(voices.HELD_CHUNKS + 1), voices.REMARKS + voices.HELD_CHUNKS):
        _fill(tmp_path / "v", number)
    transcribe.encode_all(tmp_path, tmp_path / "v", 1)
    return tmp_path


def test_the_teacher_holds_the_answers(work: Path, text: Text, listener: Listener) -> None:
    """At the first step the answers diverge by nothing; remarks have none to hold."""
    clips = Clips(text, work / "v", 400, CPU, Encoded(work / encoded.FOLDER, 400))
    clips.look()
    data = thinker.Data.place(thinker.rows(text, 4, "held", transcribe.WIDTH), CPU)
    settings = transcribe.Settings(60, work / "v", batch=8, text_rows=1)
    teacher = thinker.load(work, text, CPU)
    step = Step(listener.thinker, teacher, Layout(text), clips, data, settings)
    torch.manual_seed(0)
    loss, (cross, spoken, typed, _, agree) = step(False)
    assert float(agree) == 1
    assert abs(float(spoken)) < 1e-5
    assert abs(float(typed)) < 1e-5
    torch.testing.assert_close(loss.detach(), cross, atol=1e-3, rtol=1e-4)


def test_the_step(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {file: (work / file).read_bytes() for file in (listen.FILE, thinker.FILE)}
    settings = transcribe.Settings(60, work / "v", clips=400, batch=4, text_rows=1, first=8,
        every=0, quiz=2, rows=4, bfloat16=False, steps=1)  # fmt: skip
    transcribe.train(work, settings)
    assert json.loads((work / "report-transcribe.json").read_text())["steps"] == 1
    assert (work / listen.FILE).read_bytes() == before[listen.FILE]
    assert (work / transcribe.TEACHER).read_bytes() == before[thinker.FILE]
    old, new = load_file(work / transcribe.TEACHER), load_file(work / thinker.FILE)
    assert not torch.equal(old["lm_head.weight"], new["lm_head.weight"])
    name = "model.embed_tokens.weight"
    assert torch.equal(old[name], new[name])


def test_greedy_text_is_told_from_one_pass(work: Path, text: Text, listener: Listener) -> None:
    """What the quiz counts as right is what greedy decoding writes."""
    (quiz, _) = transcribe.quizzes(listener, text, work / "v", 3, (0.1,))
    pad = np.zeros(voices.RATE // 10, np.int16)
    sounds = [np.concatenate((pad, s, pad)) for s in voices.load(work / "v", 0)[:3]]
    wrote = listen.answers(listener, text, sounds, prompt=1)
    asked = [a.pair.question for a in voices.chunk(0)[:3]]
    right = sum(a == b for a, b in zip(asked, wrote, strict=True)) / 3
    assert transcribe.score(listener.thinker, quiz)[1] == pytest.approx(right)
