"""Every training step of the recipe runs, at a size where it learns nothing; and what the talker is
taught with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load, load_file, save_file

from recipes.nano import (
    aids,
    codec,
    codes,
    corpus,
    export,
    grow,
    hide,
    layout,
    phones,
    talker,
    thinker,
)
from recipes.nano.audio import HOP
from recipes.nano.decoder import segment_mask
from recipes.nano.festival import NO_WORD, PAUSE, PHONES, Uttered
from recipes.nano.shape import CODES, GROUPS
from tests.recipes.conftest import Made

FRAMES = 6
CPU = torch.device("cpu")


@pytest.fixture
def work(made: Made, tmp_path: Path) -> Path:
    """The untrained parts, and codes of four chunks."""
    for file in ("tokenizer.json", thinker.FILE, talker.FILE, codec.DECODER):
        shutil.copy(made.work / file, tmp_path)
    rng = np.random.default_rng(0)
    chunks = [0, 1, talker.HELD, 3]
    count = sum(len(corpus.chunk_texts(c)) for c in chunks)
    table = rng.integers(0, CODES, (count * FRAMES, GROUPS)).astype(np.uint16)
    codes.write(tmp_path, chunks, [FRAMES] * count, table, _labels(count))
    return tmp_path


def _labels(count: int) -> phones.Labels:
    """Two frames of each of three words."""
    one = np.stack((np.arange(FRAMES) + 1, np.arange(FRAMES) + 1, np.arange(FRAMES) // 2), axis=1)
    return np.tile(one, (count, 1)).astype(np.uint8)


def _report(work: Path, step: str) -> dict[str, object]:
    found: dict[str, object] = json.loads((work / f"report-{step}.json").read_text())
    return found


def test_the_thinkers_step(work: Path) -> None:
    thinker.train(work, thinker.Settings(60, batch=2, rows=8, quiz=2, device="cpu", steps=2))
    assert _report(work, "thinker")["steps"] == 2


def test_the_codecs_step(work: Path, tmp_path: Path) -> None:
    audio, rng = tmp_path / "audio", np.random.default_rng(1)
    audio.mkdir()
    for chunk in (0, 1):
        count = len(corpus.chunk_texts(chunk))
        spoken = [(rng.standard_normal(2 * HOP) * 3000).astype(np.int16) for _ in range(count)]
        corpus.save(audio, chunk, spoken, phones.unknown(2 * count))
    settings = codec.Settings(
        60,
        audio,
        first_hours=1e-4,
        batch=2,
        long=24,
        compile=False,
        tiny=True,
        device="cpu",
        steps=2,
    )
    codec.train(work, settings)
    assert _report(work, "codec")["steps"] == 2
    read = codes.read(work)
    assert len(read.codes) == 180 * 2
    assert (read.labels == phones.UNKNOWN).all()
    codes.trim(work, tmp_path / "few", 1)
    assert (codes.read(tmp_path / "few").codes == read.codes[: 80 * 2]).all()


def test_the_talkers_step_and_what_is_exported_of_it(work: Path) -> None:
    settings = talker.Settings(60, batch=2, sampled=16, epochs=1, device="cpu", steps=2)
    talker.train(work, settings)
    report = _report(work, "talker")
    assert report["steps"] == 2
    assert report["best"]["step"] == 2  # type: ignore[index]
    last = load_file(work / talker.LAST)
    save_file(last | {"codec_head.weight": last["codec_head.weight"] + 1}, work / talker.LAST)
    best, last = export.collect(work), export.collect(work, last=True)
    assert best.keys() == last.keys()
    head = "talker.codec_head.weight"
    assert [name for name in best if not torch.equal(best[name], last[name])] == [head]
    assert float((last[head] - best[head]).mean()) == pytest.approx(1, abs=0.01)


def test_labels_say_what_is_heard_in_a_frame() -> None:
    names = ("hh", "ay", "pau", "dh")
    ends = np.array([0.5, 1.6, 2.2, 3.0]) * HOP
    ids = np.array([PHONES.index(n) for n in names], np.uint8)
    said = Uttered(
        np.zeros(3 * HOP + 1, np.int16),
        ids,
        np.array([0, 0, NO_WORD, 1], np.uint8),
        ends.astype(np.int32),
    )
    hh, ay, dh = ids[0], ids[1], ids[3]
    assert phones.labels(said).tolist() == [
        [hh, ay, 0], [ay, PAUSE, 0], [dh, dh, 1], [PAUSE, PAUSE, NO_WORD],
    ]  # fmt: skip


def test_a_frame_is_led_to_the_text_of_its_word(made: Made) -> None:
    text = made.text
    answer = "extraordinary cats, sleep"
    ids, (words,) = text.encode(answer), text.words([answer])
    assert [text.decode(np.array(ids)[words == w].tolist()) for w in range(3)] == [
        "extraordinary", " cats,", " sleep"
    ]  # fmt: skip
    frames = np.repeat([0, NO_WORD, 1, 2], [2, 1, 30, 1]).astype(np.int64)
    user = text.turn("user", text.encode("Go"))
    e = layout.example(
        text.config, user, text.opening, ids, len(frames), "nano", layout.Said(words, frames)
    )
    first = int((e.frame == 0).nonzero()[0][0])
    assert (
        e.low[first] == e.high[first] == first
    )  # of the long word, only the first token has been fed
    assert (e.low[first + 1], e.high[first + 1]) == (first, first + 1)
    assert e.low[first + 2] == layout.NONE
    assert (
        e.text[e.low[first + 32] : e.high[first + 32] + 1].tolist()
        == np.array(ids)[words == 1].tolist()
    )
    assert (
        e.text[e.low[first + 33] : e.high[first + 33] + 1].tolist()
        == np.array(ids)[words == 2].tolist()
    )
    batch = layout.side_by_side([(e, 0), (e, len(frames))], 256)
    size = len(e.text)
    assert (batch.low[0, size : 2 * size][e.low >= 0] == e.low[e.low >= 0] + size).all()


def test_hidden_codes_do_not_reach_the_talker(made: Made) -> None:
    text = made.text
    model, embedding = (
        talker.load(made.work, text, CPU),
        torch.randn(text.config.thinker.text.vocab_size, 256),
    )
    helper = aids.Aids(model.model, text.config.talker.text.hidden_size)
    user = text.turn("user", text.encode("Go"))
    e = layout.example(text.config, user, text.opening, text.encode("Yes, I go."), 8, "nano")
    rng = np.random.default_rng(0)
    table = rng.integers(0, CODES, (8, GROUPS)).astype(np.uint16)
    other = np.concatenate((rng.integers(0, CODES, (7, GROUPS)), table[7:])).astype(
        np.uint16
    )  # another past

    def last(frames: codes.Codes, rate: float) -> float:
        """The loss of the end code, the only row that both tables have in common as target."""
        data = grow.Data.place(layout.side_by_side([(e, 0)], 64), frames, phones.unknown(8), CPU)
        with torch.no_grad():
            found = talker.losses(
                model, helper, embedding, data, torch.tensor([0]), 8, talker.View(rate)
            )
        return float(found.end)

    assert last(table, 1.0) == last(other, 1.0)
    assert last(table, 0.0) != last(other, 0.0)


def test_less_is_hidden_at_the_end_of_training() -> None:
    torch.manual_seed(0)
    start, end = (hide.hidden(4000, 64, torch.tensor(done), CPU) for done in (0.0, 1.0))
    for found, nothing in ((start, hide.NOTHING_FIRST), (end, hide.NOTHING_LAST)):
        rows = found.float().mean(dim=1)
        assert nothing - 0.03 < float((rows == 0).float().mean()) < nothing + 0.1
        assert hide.ALL - 0.03 < float((rows == 1).float().mean()) < hide.ALL + 0.1
    frames = torch.arange(4000 * 64).view(4000, 64)
    moved = (
        hide.elsewhere(frames, torch.tensor(float(frames.numel()), dtype=torch.float64)) != frames
    )
    assert 0.5 * hide.ELSEWHERE < float(moved.float().mean()) < 1.5 * hide.ELSEWHERE


def test_attention_on_the_word_is_what_the_loss_wants(made: Made) -> None:
    model = talker.Talker(made.text.config)
    helper = aids.Aids(model.model, made.text.config.talker.text.hidden_size)
    mask = segment_mask(torch.ones(1, 4, dtype=torch.long))
    low, high = torch.tensor([[-1, -1, 0, 1]]), torch.tensor([[-1, -1, 1, 2]])
    q, k = torch.zeros(1, 4, 64), torch.zeros(1, 4, 64)
    q[0, :, 0], k[0, 1, 0] = 800.0, 1.0  # everything looks at row 1
    for attention in helper.watched:
        attention.seen = q, k
    loss, share = helper.where(low, high, mask)
    assert float(share) > 0.999
    assert float(loss) < 1e-3
    _, elsewhere = helper.where(
        torch.tensor([[-1, -1, 2, 3]]), torch.tensor([[-1, -1, 2, 3]]), mask
    )
    assert float(elsewhere) < 1e-3


def test_phones_that_are_not_known_do_not_count(made: Made) -> None:
    helper = aids.Aids(talker.Talker(made.text.config).model, 256)
    states, there = torch.randn(1, 3, 256), torch.tensor([[True, True, False]])
    wanted = torch.tensor([[[3, 4], [phones.UNKNOWN, phones.UNKNOWN], [3, 4]]])
    alone = helper.phones(states[:, :1], wanted[:, :1], there[:, :1])
    torch.testing.assert_close(helper.phones(states, wanted, there), alone)


def test_speech_that_is_made_meanwhile_is_taken_in(work: Path, made: Made, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = codec.Codec()
    model.quantizer.cluster(torch.randn(600, codec.LATENT), rounds=1)
    codec._save(work, model)
    audio, rng = tmp_path / "audio", np.random.default_rng(2)
    audio.mkdir()
    spoken = [(rng.standard_normal(3 * HOP - 7) * 3000).astype(np.int16) for _ in range(100)]
    labels = np.tile(_labels(1)[:3], (100, 1))

    def rows(said: codes.Spoken) -> layout.Batch:
        return talker._rows(made.text, said, "more", 1)

    data = grow.Data.room(200, 700, CPU)
    growing = grow.Growing(work, audio, data, rows, CPU, pause=0.0)
    growing.look()
    assert len(data) == 0
    corpus.save(audio, 500, spoken, labels)
    corpus.save(audio, 501, spoken, labels)
    corpus.save(audio, 502, spoken, labels)  # no room for this one
    growing.look()
    rows_, frames = (int(n) for n in data.size.tolist())
    assert frames == 600
    assert growing.full
    table, counts = codec.encode_chunk(growing.encoder, spoken, CPU)
    assert counts == [3] * 100
    assert (data.table[:300].numpy() == table).all()
    assert (data.labels[300:600].numpy() == labels).all()
    assert int(data.before[:rows_].max()) == 599
    assert data.text[rows_:].sum() == 0
    for path in (*work.glob("codes-[0-9].npy"), *work.glob("codes-index-*.npz")):
        path.unlink()
    growing.save()
    back = codes.read(work)
    assert (back.codes == np.concatenate((table, table))).all()
    assert back.texts == corpus.chunk_texts(500) + corpus.chunk_texts(501)


def test_sound_in_a_question_is_rows_of_zeros(made: Made) -> None:
    text = made.text
    model, embedding = (
        talker.load(made.work, text, CPU),
        torch.randn(text.config.thinker.text.vocab_size, 256),
    )
    ids = torch.tensor([[5, layout.NONE, 7]])
    none = torch.full((1, 3), layout.NONE)
    rows = model.inputs(embedding, ids, none, none[..., None].expand(-1, -1, GROUPS - 1))
    assert (rows[0].abs().sum(-1) == 0).tolist() == [False, True, False]
    assert not talker.Talker(text.config).hidden_projection(torch.randn(2, 256)).any()


def test_an_export_is_renewed_where_weights_changed(work: Path, made: Made, tmp_path: Path) -> None:
    """Names, sizes and the talker's bytes stay; what changed is as a whole export would have it."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(made.checkpoint, folder)
    before = {p.name: p.read_bytes() for p in folder.glob("model-*.safetensors")}
    parts = load_file(work / thinker.FILE)
    save_file({**parts, "lm_head.weight": parts["lm_head.weight"] * 2}, work / thinker.FILE)
    export.renew(work, folder)
    changed = set()
    for name, data in before.items():
        assert (folder / name).stat().st_size == len(data)
        old, new = load(data), load_file(folder / name)
        changed |= {n for n in new if not torch.equal(old[n], new[n])}
    assert changed == {"thinker.lm_head.weight"}
