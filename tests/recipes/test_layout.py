"""The rows the talker is trained on are the rows the released model feeds it, and so are the
logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from recipes.nano import aids, codec, export, grow, layout, phones, talker, thinker
from recipes.nano.decoder import segment_mask
from recipes.nano.shape import CODES, GROUPS
from tests.recipes.conftest import Made

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def oracle(made: Made) -> Any:
    model = transformers.Qwen3OmniMoeForConditionalGeneration.from_pretrained(
        made.checkpoint, dtype=torch.float32
    )
    return model.eval()


class Seen:
    """What a module of the reference model was given and gave."""

    def __init__(self) -> None:
        self.calls: list[tuple[dict[str, Any], Any]] = []

    def hook(self) -> Callable[..., None]:
        return lambda module, args, kwargs, out: self.calls.append((kwargs | {"args": args}, out))


def test_training_rows_are_the_reference_models_own(made: Made, oracle: Any) -> None:
    text, config = made.text, made.text.config
    question = [text.encode("What is two plus three?"), text.encode("Say hello again.")]
    earlier = [*text.opening, 5, 6, 7, config.tokens.im_end, text.newline]
    user = [text.turn("user", q) for q in question]
    prompt = [
        *text.turn("system", text.encode("Answer briefly.")),
        *user[0],
        *earlier,
        *user[1],
        *text.opening,
    ]
    rows, logits, residual = Seen(), Seen(), Seen()
    hooks = [
        oracle.talker.model.register_forward_hook(rows.hook(), with_kwargs=True),
        oracle.talker.codec_head.register_forward_hook(logits.hook(), with_kwargs=True),
        *(
            h.register_forward_hook(residual.hook(), with_kwargs=True)
            for h in oracle.talker.code_predictor.lm_head
        ),
    ]
    frames = 14
    with torch.no_grad():
        ids, _ = oracle.generate(
            input_ids=torch.tensor([prompt]),
            speaker="nano",
            thinker_max_new_tokens=9,
            thinker_eos_token_id=config.tokens.im_end,
            talker_do_sample=False,
            talker_max_new_tokens=frames + 1,
            talker_repetition_penalty=1.0,
        )
    for h in hooks:
        h.remove()
    said = ids[0, len(prompt) : -1].tolist()  # the last token is never spoken
    assert len(said) == 8
    seen = torch.cat([kw["inputs_embeds"] for kw, _ in rows.calls], dim=1)[0]
    wanted = torch.cat([out for _, out in logits.calls], dim=1)[0]
    allowed = torch.tensor([*range(CODES), config.talker.codec.eos])
    code0 = allowed[wanted[-frames - 1 :][:frames][:, allowed].argmax(dim=-1)]
    assert int(code0.max()) < CODES
    others = torch.stack(
        [out[0, -1].argmax() for _, out in residual.calls[: frames * (GROUPS - 1)]]
    )
    codes = torch.cat((code0[:, None], others.view(frames, GROUPS - 1)), dim=1)

    example = layout.example(
        config, [i for u in user for i in u], text.opening, said, frames, "nano"
    )
    batch = layout.side_by_side([(example, 0)], 256)
    model = talker.load(made.work, text, torch.device("cpu"))
    embedding = thinker.load(
        made.work, text, torch.device("cpu")
    ).model.embed_tokens.weight.detach()
    table = codes.numpy().astype(np.uint16)
    data = grow.Data.place(batch, table, phones.unknown(frames), torch.device("cpu"))
    before = data.before.long()
    past = data.table[before.clamp_min(0)].long()
    mark = torch.where(before >= 0, past[..., 0], data.mark.long())
    past = torch.where(before[..., None] >= 0, past[..., 1:], layout.NONE)
    with torch.no_grad():
        x = model.inputs(embedding, data.text.long(), mark, past)
        hidden = model.model(x, data.positions.long(), segment_mask(data.segments))
        ours = model.codec_head(hidden)[0]
    size = len(seen)
    assert (
        size == len(example.text) - 1 + 1
    )  # all rows but none for the end code, whose row HF also runs
    torch.testing.assert_close(x[0, :size], seen, atol=2e-4, rtol=1e-3)
    last = torch.arange(size - frames - 1, size)
    torch.testing.assert_close(ours[last], wanted[-frames - 1 :], atol=2e-3, rtol=2e-3)

    # the rows where frames are due are those whose logits gave them
    due = data.frame[0] >= 0
    assert due.nonzero()[:, 0].tolist() == last[:-1].tolist()
    assert data.end[0].nonzero()[:, 0].tolist() == [size - 1]
    tables = model.code_predictor.tables()
    with torch.no_grad():
        fed = F.embedding(codes[:, 1:-1] + torch.arange(GROUPS - 2) * CODES, tables)
        predicted = model.code_predictor(
            hidden[0][due], model.model.codec_embedding(codes[:, 0]), fed
        )
    reference = torch.stack([out[0, -1] for _, out in residual.calls[: frames * (GROUPS - 1)]])
    torch.testing.assert_close(
        predicted.reshape(-1, CODES) / export.COOL, reference, atol=2e-3, rtol=2e-3
    )


def test_thinker_is_the_reference_models(made: Made, oracle: Any) -> None:
    ids = torch.tensor([made.text.turn("user", made.text.encode("What is a stretto?"))])
    model = thinker.load(made.work, made.text, torch.device("cpu"))
    with torch.no_grad():
        ours = model.lm_head(model(ids, torch.arange(ids.shape[1])[None], None))
        theirs = oracle.thinker(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=2e-3)


def test_examples_side_by_side_are_as_alone(made: Made) -> None:
    text, config = made.text, made.text.config
    torch.manual_seed(1)
    model = talker.Talker(config).eval()
    for p in model.parameters():  # where training starts, rows hardly look at each other
        p.data.add_(torch.randn_like(p) * 0.1)
    embedding = torch.randn(config.thinker.text.vocab_size, config.talker.thinker_hidden_size)
    helper = aids.Aids(model.model, config.talker.text.hidden_size)
    table = np.random.default_rng(0).integers(0, CODES, (30, GROUPS)).astype(np.uint16)
    made_ = [
        (
            layout.example(
                config, text.turn("user", text.encode(q)), text.opening, text.encode(a), n, "nano"
            ),
            start,
        )
        for q, a, n, start in (
            ("Say yes", "yes", 6, 0),
            ("Hello", "Hello there, you", 12, 6),
            ("No", "no", 12, 18),
        )
    ]
    device = torch.device("cpu")

    def code0(examples: list[tuple[layout.Example, int]]) -> torch.Tensor:
        data = grow.Data.place(
            layout.side_by_side(examples, 256), table, phones.unknown(30), device
        )
        assert len(data) == 1
        with torch.no_grad():
            found = talker.losses(
                model, helper, embedding, data, torch.tensor([0]), 30, talker.View()
            )
        weight = sum(len(e.frame[e.frame >= 0]) + talker.END_WEIGHT for e, _ in examples)
        return found.code0 * weight

    torch.testing.assert_close(code0(made_), sum(code0([e]) for e in made_), atol=1e-3, rtol=1e-4)


def test_a_checkpoint_comes_apart_into_what_it_was_made_of(made: Made, tmp_path: Path) -> None:
    export.take_apart(made.checkpoint, tmp_path)
    for file in (thinker.FILE, talker.FILE, codec.DECODER):
        before, after = load_file(made.work / file), load_file(tmp_path / file)
        wanted = {k for k in before if not k.endswith("code_offset")}
        assert set(after) == wanted
        assert all(torch.equal(before[k], after[k]) for k in wanted)
