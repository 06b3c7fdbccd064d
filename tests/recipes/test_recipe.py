"""The recipe's own pieces: text, samples, codes, and the checkpoint in the engine."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from recipes.nano import card, codes, corpus, grammar, score, spectra, thinker
from recipes.nano.audio import resample
from recipes.nano.decoder import Router
from recipes.nano.graph import Schedule, Trainer
from recipes.nano.sentences import FIXED
from tests.recipes.conftest import Made


def test_a_question_has_one_answer() -> None:
    answers: dict[str, str] = {}
    for pair in grammar.domain():
        assert answers.setdefault(pair.question.lower(), pair.answer) == pair.answer
    assert len(answers) > 10_000


def test_training_text_has_nothing_held_out() -> None:
    rng = Random(1)
    held = {grammar.plain(p.question) for p in grammar.domain() if p.held_out}
    spoken = {grammar.plain(s) for s in (*FIXED, *grammar.held_out_sentences())}
    for _ in range(5000):
        pair = grammar.pair(rng)
        assert pair.kind == "say" or grammar.plain(pair.question) not in held
        assert grammar.plain(grammar.reading(rng)) not in spoken


def test_numbers_are_written_out() -> None:
    assert [grammar.number(n) for n in (0, 13, 40, 77, 100, 121)] == [
        "zero", "thirteen", "forty", "seventy seven", "one hundred", "one hundred and twenty one",
    ]  # fmt: skip


def test_chunks_hold_every_text_once() -> None:
    assert [t for c in range(corpus.num_chunks()) for t in corpus.chunk_texts(c)] == list(
        corpus.texts()
    )
    assert corpus.chunk_texts(0)[: len(FIXED)] == list(FIXED)


@pytest.mark.parametrize(("to", "rate"), [(24000, 32000), (16000, 24000)])
def test_resampling_keeps_a_tone_and_drops_what_does_not_fit(to: int, rate: int) -> None:
    tone = np.sin(2 * np.pi * 1000 * np.arange(rate) / rate).astype(np.float32)
    wanted = np.sin(2 * np.pi * 1000 * np.arange(to) / to)
    assert np.abs(resample(tone, to, rate) - wanted)[300:-300].max() < 1e-3
    high = np.sin(2 * np.pi * (to / 2 + 1500) * np.arange(rate) / rate).astype(np.float32)
    assert np.abs(resample(high, to, rate))[300:-300].max() < 1e-2


def test_codes_are_stored_in_nine_bits(tmp_path: Path) -> None:
    table = np.random.default_rng(0).integers(0, 512, (700, 16)).astype(np.uint16)
    counts = [5] * 79 + [700 - 5 * 79]
    labels = (np.arange(2100) % 256).astype(np.uint8).reshape(700, 3)
    codes.write(tmp_path, [0], counts, table, labels)
    back = codes.read(tmp_path)
    assert (back.codes == table).all()
    assert (back.labels == labels).all()
    assert back.frames == counts
    assert back.texts == corpus.chunk_texts(0)
    assert (tmp_path / "codes-0.npy").stat().st_size < 700 * 18 + 200
    few, rest = back.split(back.texts[:2])
    assert few.frames == [5, 5]
    assert len(rest.codes) == 690
    assert (rest.codes == table[10:]).all()
    assert (rest.labels == labels[10:]).all()


def test_spectral_loss_is_zero_for_the_same_sound() -> None:
    x = torch.randn(2, 9600, generator=torch.Generator().manual_seed(0)) * 0.1
    loss = spectra.SpectralLoss()
    assert float(loss(x, x)) == 0.0
    assert float(loss(x * 0.5, x)) > 0.3


def test_router_weighs_the_chosen_experts_only() -> None:
    router = Router(4, 8, 2)
    torch.nn.init.normal_(router.weight)
    weights, uneven = router(torch.randn(50, 8))
    assert ((weights > 0).sum(dim=-1) == 2).all()
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(50))
    assert float(uneven.detach()) >= 0.99


def test_the_tokenizer_reads_back_and_keeps_roles_whole(made: Made) -> None:
    for sentence in ("Hello, how are you?", "zyxwv 12 + 7?", "naïve"):
        assert made.text.decode(made.text.encode(sentence)) == sentence
    assert len({*made.text.roles.values()}) == 3


def test_the_checkpoint_loads_in_the_engine(made: Made) -> None:
    from stretto.models.qwen3_omni.load import Source

    source = Source.open(made.checkpoint, progress=False)
    talker = source.talker()
    assert source.thinker() is not None
    assert source.code2wav() is not None
    assert talker.config.tokens.user == made.text.roles["user"]
    assert sum(p.stat().st_size for p in made.checkpoint.iterdir()) <= 60_000_000


def test_thinker_rows_hold_whole_conversations(made: Made) -> None:
    made_ = thinker.rows(made.text, 6, "a test")
    end = made.text.config.tokens.im_end
    assert made_.ids.shape == (6, thinker.WIDTH)
    assert (made_.positions[made_.segments == 0] == 0).all()
    for ids, segments, learn in zip(made_.ids, made_.segments, made_.learn, strict=True):
        for n in range(1, int(segments.max()) + 1):
            said = ids[(segments == n) & learn]
            assert said[-1] == end
            assert made.text.decode(said.tolist())


def test_trainer_learns_and_leaves_the_average() -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(3, 3))
    target = torch.eye(3)

    def loss(bfloat16: bool) -> tuple[torch.Tensor, torch.Tensor]:
        far = (weight - target).square().mean()
        return far, far.detach()[None]

    schedule = Schedule(60, rate=0.05, warm_up=5, decay=0.0, average=0.9, max_steps=150)
    trainer = Trainer(
        "test", [weight], [weight], loss, schedule, ("far",), torch.device("cpu"), bfloat16=False
    )
    reached = trainer.run()
    assert reached["steps"] == 150
    assert float((weight.detach() - target).abs().max()) < 0.05
    assert torch.equal(weight.detach(), trainer.average[0])


def test_word_error_rate_counts_edits_in_normal_spelling() -> None:
    assert score.error_rate([("Two plus three is five.", "2 plus 3 is 5")]) == 0.0
    assert score.error_rate([("My favorite color.", "my favourite colour")]) == 0.0
    assert score.error_rate([("one two three four", "one too three")]) == 0.5
    assert (
        score.error_rate([("Fifteen, sixteen, seventeen. I cannot.", "1516-17. I can not")]) == 0.0
    )


def test_the_score_asks_every_kind_of_question_alike() -> None:
    pairs = score.domain_pairs()
    assert len({p.answer for p in pairs}) == len(pairs) == score.EACH * len(grammar.domain_kinds())
    assert all(p.held_out for p in pairs if p.kind in ("sum", "count"))
    asked = score.questions()
    assert [p.answer for p in asked[:80]] == corpus.chunk_texts(0)
    assert asked[80:] == pairs


class Deaf:
    """Hears every other sentence, and nothing else."""

    def __init__(self) -> None:
        self.said = iter(p.answer if i % 2 else "" for i, p in enumerate(score.questions()))

    def hear(self, samples: np.ndarray) -> str:  # type: ignore[type-arg]
        return next(self.said)


def test_rates_are_of_parts_and_kinds() -> None:
    pairs = score.questions()
    silence = [np.zeros(10, np.float32)] * len(pairs)
    found = score.rate(score.Speech("all", silence), pairs, Deaf(), Deaf())
    assert set(found) == {"fixed", "held-out", "domain", "second opinion", "kinds"}
    assert set(found["kinds"]) == set(grammar.domain_kinds())
    assert 0.3 < found["domain"] < 0.7
    few = score.rate(score.Speech("few", silence[:2]), pairs, Deaf(), None)
    wanted = [(pairs[0].answer, ""), (pairs[1].answer, pairs[1].answer)]
    assert few == {"fixed": round(score.error_rate(wanted), 4)}


def test_the_card_says_what_was_measured(tmp_path: Path) -> None:
    rates = {"fixed": 0.01, "held-out": 0.05, "domain": 0.125, "kinds": {"sum": 0.25, "talk": 0.0}}
    reports = {
        "score": {
            "word_error_rate": {"codec": rates, "sampled": rates},
            "ended": {"sampled": "220 of 220"},
            "exact": "219 of 220",
        },
        "heard": {
            "typed": 0.995,
            "right": {"rms": 0.75},
            "between": {"rms": [0.7, 0.8]},
            "kinds": {"sum": 0.5},
            "questions": 200,
            "transcripts": {"rms": [0.125, 0.05, 0.25]},
            "remarks": {"rms": 0.5},
        },
        "export": {"bytes": 59_305_050, "parameters": 29_528_513},
        "aloud": {"word_error_rate": {"1": 0.09, "6": 0.125, "long": 0.15}, "characters": 1763},
        "aloud-before": {"word_error_rate": {"1": 0.125, "6": 0.75, "long": 0.95}},
    } | {step: {"minutes": 6.5} | dict.fromkeys(shown, 1234) for step, shown in card.STEPS.items()}
    for step, values in reports.items():
        (tmp_path / f"report-{step}.json").write_text(json.dumps(values))
    text = card.text(tmp_path, "no pictures")
    for part in (
        "29.5 M",
        "59 MB",
        "| sampled | 1.0% | 5.0% | 12.5% |  |",
        "| sampled | 25.0% | 0.0% |",
        "Missed: sampled, domain.",
        "Wanted: 95 % and 85 %; missed with `rms`.",
        "sampled 220 of 220",
        "before they are spoken: 219 of 220",
        "| 99.5% | 75.0% (70.0% to 80.0%) |",
        "Wanted: 15 % in the better voice.",
        "| `rms` | 12.5% (5.0% to 25.0%) | 50.0% |",
        "| | 1 | 6 | 1,763 characters |",
        "| in one piece, as written | 12.5% | 75.0% | 95.0% |",
        "| as shipped | 9.0% | 12.5% | 15.0% |",
        "| talker | 6.5 | steps 1,234, hours 1,234 |",
        "no pictures",
    ):
        assert part in text


def test_a_picture_shows_where_the_sound_is(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    low = 0.5 * np.sin(2 * np.pi * 500 * np.arange(24000) / 24000).astype(np.float32)
    card.picture([low, low, np.zeros_like(low)], tmp_path / "a.png")
    shown = np.asarray(image.open(tmp_path / "a.png").convert("L"))
    darkest = int(shown[: card.PANEL].mean(axis=1).argmin())
    assert abs(darkest / card.PANEL - (1 - 500 / card.TOP_HZ)) < 0.06
    assert shown[-card.PANEL + 5 :].min() == 255  # silence
