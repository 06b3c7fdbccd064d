"""How likely a stage says its tokens were: as the reference has it, alone or in a batch, whatever
is done to the logits before a pick; and requests that do not ask are as they were."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from stretto.models.qwen3_omni.load import Models
from stretto.stage.runner import logprobs
from stretto.stage.runner.graphs import STAGED, DecodeGraphs
from stretto.stage.runner.logprobs import Scored
from stretto.stage.stage import Output
from stretto.types import SamplingParams
from tests.oracle import media_inputs
from tests.prompts import make
from tests.solo import Options
from tests.stage.desk import CONFIG, Desk

ASKS: tuple[int | None, ...] = (0, None, 5, 20, None, 1)
KINDS = ("text", "text", "audio", "text", "image", "text")
CONFIGS = {
    "batched": CONFIG,
    "small chunks": replace(CONFIG, prefill_chunk=5, max_step_tokens=11, least_share=3),
    "preempted": replace(CONFIG, num_blocks=24, prefix_cache=False),
}


class Asking(Desk):
    """Keeps what each token is said to be like."""

    def collect(self, o: Output) -> None:
        self.logprobs_by_id: dict[str, list[Scored | None]] = getattr(
            self, "logprobs_by_id", defaultdict(list)
        )
        super().collect(o)
        if o.token is not None:
            self.logprobs_by_id[str(o.request.id)].append(o.logprobs)


class Replays(DecodeGraphs):
    """Graphs as a CPU can have them: a replay runs the step again and writes where the captured one
    wrote."""

    @torch.inference_mode()
    def capture(self, stream: object = None) -> None:
        for key in [(size, mode) for mode in self.modes for size in self.sizes]:
            run = self._prepare(key)
            inputs, picked = run()
            assert picked.hidden is not None

            def again(run: Any = run, picked: Any = picked) -> None:
                _, anew = run()
                picked.tokens.copy_(anew.tokens)
                picked.hidden.copy_(anew.hidden)

            self.graphs[key] = again, (inputs, picked)  # type: ignore[assignment]
            self._staged[key[0]] = [
                torch.zeros(3, key[0], dtype=torch.int64) for _ in range(STAGED)
            ]

    def run(self, graph: Any) -> None:
        self.replayed = getattr(self, "replayed", 0) + 1
        graph()


def options(i: int) -> Options:
    """Greedy and drawn, with penalties and without."""
    text = SamplingParams(
        temperature=0.9 * (i % 2), top_k=40, seed=i, repetition_penalty=[1.0, 1.3][i % 3 == 0]
    )
    return replace(Options(), text=text, max_text_tokens=5 + i, speak=False)


def submit(desk: Desk, models: Models, i: int, count: int | None, **more: Any) -> None:
    prompt = make(KINDS[i], models.config, seed=i)
    bias = [(3, 2.5)] if i == 3 else []
    desk.think(str(i), prompt, options(i), bias, logprobs=count, **more)


def reference(oracle: Any, models: Models, i: int, tokens: list[int]) -> torch.Tensor:
    """Log probabilities [tokens, vocabulary] by the reference, which reads the whole answer at
    once."""
    prompt = make(KINDS[i], models.config, seed=i)
    ids = torch.tensor([[*prompt.ids, *tokens[:-1]]], device=models.thinker.device)
    with torch.inference_mode():
        logits = oracle.thinker(
            input_ids=ids, attention_mask=torch.ones_like(ids), **media_inputs(prompt, ids.device)
        ).logits[0, -len(tokens) :]
    return torch.log_softmax(logits.float(), -1).cpu()


@pytest.fixture(scope="module")
def plain(models: Models) -> dict[str, list[int]]:
    """The tokens when nobody asks."""
    desk = Desk(models, "thinker")
    for i in range(len(ASKS)):
        submit(desk, models, i, None)
    desk.run()
    return dict(desk.tokens)


@pytest.mark.parametrize("name", CONFIGS)
def test_as_the_reference_has_it(
    name: str,
    models: Models,
    oracle: Any,
    plain: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logprobs, "SLICE", 2)
    desk = Asking(models, "thinker", CONFIGS[name], graphs=models.thinker.device.type == "cuda")
    for i, count in enumerate(ASKS):
        submit(desk, models, i, count)
    desk.run()
    assert desk.tokens == plain, "who asks gets the same answer, and so do the others"
    for i, count in enumerate(ASKS):
        logprobs_by_id, tokens = desk.logprobs_by_id[str(i)], desk.tokens[str(i)]
        assert len(logprobs_by_id) == len(tokens)
        if count is None:
            assert logprobs_by_id == [None] * len(tokens)
            continue
        expected = reference(oracle, models, i, tokens)
        for scored, token, row in zip(logprobs_by_id, tokens, expected, strict=True):
            assert scored is not None
            own, best = scored
            assert own == pytest.approx(float(row[token]), abs=1e-4)
            assert len(best) == count
            assert [v for _, v in best] == pytest.approx(row.topk(count).values.tolist(), abs=1e-4)
            assert [v for _, v in best] == pytest.approx(
                [float(row[id]) for id, _ in best], abs=1e-4
            )


def test_from_captured_steps(models: Models, oracle: Any, plain: dict[str, list[int]]) -> None:
    """Padded to the graphs' sizes, beside others, and with hidden rows that the next replay writes
    over."""
    desk = Asking(models, "thinker")
    graphs = desk.stage.runner.graphs = Replays(desk.adapter, sizes=(1, 4, 8))
    graphs.capture()
    for i, count in enumerate(ASKS):
        submit(desk, models, i, count)
    desk.run()
    assert graphs.replayed > 5
    assert desk.tokens == plain
    for i, count in enumerate(ASKS):
        if count is None:
            continue
        expected = reference(oracle, models, i, desk.tokens[str(i)])
        found = [scored[0] for scored in desk.logprobs_by_id[str(i)] if scored is not None]
        assert found == pytest.approx(
            [float(r[t]) for r, t in zip(expected, desk.tokens[str(i)], strict=True)], abs=1e-4
        )


def test_in_a_batch_as_alone(models: Models) -> None:
    together = Asking(models, "thinker")
    for i, count in enumerate(ASKS):
        submit(together, models, i, count)
    together.run()
    for i in (2, 3):
        alone = Asking(models, "thinker")
        submit(alone, models, i, ASKS[i])
        alone.run()
        for a, b in zip(alone.logprobs_by_id[str(i)], together.logprobs_by_id[str(i)], strict=True):
            assert a is not None
            assert b is not None
            assert a[0] == pytest.approx(b[0], abs=1e-4)
            assert [v for _, v in a[1]] == pytest.approx([v for _, v in b[1]], abs=1e-4)


def test_nobody_who_does_not_ask_pays(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is not run once more for them, alone or beside one who asks."""
    desk = Asking(models, "thinker")
    scored: list[int] = []
    head: Callable[[torch.Tensor], torch.Tensor] = models.thinker.logits
    monkeypatch.setattr(
        desk.adapter.rows, "head", lambda hidden: (scored.append(len(hidden)), head(hidden))[1]
    )
    submit(desk, models, 0, None)
    desk.run()
    assert scored == []
    submit(desk, models, 1, None)
    submit(desk, models, 3, 2)
    desk.run()
    assert scored == [1] * len(desk.tokens["3"])
