import numpy as np
import pytest
import torch

from stretto.errors import Invalid
from stretto.kernels.reference.sampling import SamplingRows, counter_noise, sample
from stretto.types import SamplingParams

CPU = torch.device("cpu")


def logits(rows: int, size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 3


def draws(
    params: list[SamplingParams], scores: torch.Tensor, numbers: list[int], **kwargs
) -> list[int]:
    return sample(scores, SamplingRows.of(params, CPU), torch.tensor(numbers), **kwargs).tolist()


def test_matches_the_reference_processors() -> None:
    """The same scores survive as in the library's chain of processors, and the same noise picks the
    same token."""
    from transformers.generation.logits_process import (
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    gen = torch.Generator().manual_seed(1)
    for case in range(40):
        scores = logits(1, 200, case)
        history = torch.randint(0, 200, (1, 9), generator=gen)
        p = SamplingParams(
            temperature=0.3 + 0.05 * case, top_k=[0, 1, 5, 50][case % 4], top_p=[1.0, 0.8,
            0.3][case % 3],
            repetition_penalty=[1.0, 1.3][case % 2],
        )  # fmt: skip
        want = RepetitionPenaltyLogitsProcessor(p.repetition_penalty)(history, scores.clone())
        want = TemperatureLogitsWarper(p.temperature)(history, want)
        if p.top_k:
            want = TopKLogitsWarper(p.top_k)(history, want)
        if p.top_p < 1:
            want = TopPLogitsWarper(p.top_p)(history, want)
        noise = torch.empty(1, 200).exponential_(1, generator=gen)
        seen = torch.zeros(1, 200, dtype=torch.bool).scatter_(1, history, True)
        got = draws([p], scores, [0], seen=seen, noise=lambda *_, n=noise: n)
        assert got == (want.softmax(-1) / noise).argmax(-1).tolist(), p


def test_ties_at_the_top_k_border_are_kept() -> None:
    scores = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    p = SamplingParams(temperature=1.0, top_k=2)
    picked = {draws([p], scores, [n])[0] for n in range(200)}
    assert picked == {1, 2, 3}


def test_a_requests_draws_do_not_depend_on_its_batch() -> None:
    params = [
        SamplingParams(temperature=0.5 + 0.1 * i, top_k=i * 7, top_p=1 - 0.05 * i, seed=i)
        for i in range(8)
    ]
    params[3] = SamplingParams()  # a greedy one among them
    scores = logits(8, 500)
    together = draws(params, scores, list(range(8)))
    alone = [draws([params[i]], scores[i : i + 1], [i])[0] for i in range(8)]
    assert together == alone
    assert together[3] == int(scores[3].argmax())


def test_seed_and_draw_number_both_matter() -> None:
    scores = torch.zeros(1, 1000)
    p, q = SamplingParams(temperature=1.0, seed=5), SamplingParams(temperature=1.0, seed=6)
    a = [draws([p], scores, [n])[0] for n in range(50)]
    assert a == [draws([p], scores, [n])[0] for n in range(50)]
    b = [draws([q], scores, [n])[0] for n in range(50)]
    assert len(set(a)) > 40
    assert sum(x == y for x, y in zip(a, b, strict=True)) < 5


def test_frequencies_follow_the_probabilities() -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    n = 20_000
    rows = SamplingRows.of([SamplingParams(temperature=1.0, seed=s) for s in range(n)], CPU)
    picks = sample(probs.log().expand(n, 4), rows, torch.zeros(n, dtype=torch.int64))
    shares = torch.bincount(picks, minlength=4) / n
    assert torch.allclose(shares, probs, atol=0.015)


def test_noise_is_exponential_and_uncorrelated() -> None:
    seeds = torch.arange(-50, 50)
    e = counter_noise(seeds, torch.zeros(100, dtype=torch.int64), 4000).numpy()
    assert np.isfinite(e).all()
    assert (e > 0).all()
    assert abs(e.mean() - 1) < 0.01
    assert abs(e.var() - 1) < 0.03
    corr = np.corrcoef(e)
    assert np.abs(corr - np.eye(100)).max() < 0.09
    assert abs(np.corrcoef(e[:, :-1].ravel(), e[:, 1:].ravel())[0, 1]) < 0.01


def test_suppressed_tokens_are_never_picked() -> None:
    scores = logits(1, 50)
    suppress = torch.zeros(50, dtype=torch.bool)
    suppress[scores.argmax()] = True
    assert draws([SamplingParams()], scores, [0], suppress=suppress) == [
        int(scores[0].topk(2).indices[1])
    ]
    hot = SamplingParams(temperature=50.0)
    picked = {draws([hot], scores, [n], suppress=suppress)[0] for n in range(300)}
    assert int(scores.argmax()) not in picked
    assert len(picked) > 30


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1), ("top_p", 0), ("top_p", 1.5), ("top_k", -3), ("repetition_penalty", 0)],
)
def test_bad_parameters_name_the_field(field: str, value: float) -> None:
    with pytest.raises(Invalid, match=field) as e:
        SamplingParams(**{field: value})
    assert e.value.param == field
