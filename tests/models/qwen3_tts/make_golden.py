"""Writes the golden files that tests compare with: what the model's own package makes of the tiny
checkpoints.

Run by hand, in an environment of its own, where the package's five differences to today's
`transformers` are patched:

    pip install --no-deps qwen-tts==0.1.1 && pip install librosa einops
    python -m tests.models.qwen3_tts.make_golden

Tests need none of this. A test of the checkpoints' digests says when files must be made anew."""

from __future__ import annotations

import functools
import importlib.machinery
import json
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers  # before the stubs: it looks at import which packages there are
from safetensors.torch import load_file

from tests.models.qwen3_tts.cases import (
    GOLDEN,
    KINDS,
    NOISE_SAMPLES,
    SEED,
    cases,
    clip,
    digests,
    write,
)
from tests.models.qwen3_tts.ids import assistant_ids, instruct_ids

PACKETS = 8  # frames whose samples are kept


def stub() -> None:
    """Imported by the package for another of its codecs."""
    for name in (
        "sox",
        "onnxruntime",
        "torchaudio",
        "torchaudio.compliance",
        "torchaudio.compliance.kaldi",
    ):
        if name not in sys.modules:
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    sys.modules["torchaudio.compliance"].kaldi = sys.modules["torchaudio.compliance.kaldi"]


def shim() -> None:
    """What the package expects of an older `transformers`."""
    import transformers.masking_utils as masks
    import transformers.modeling_rope_utils as ropes
    import transformers.utils.generic as generic

    generic.check_model_inputs = lambda f=None: f or (lambda g: g)

    def default(config: Any, device: Any = None, **_: Any) -> Any:
        theta = getattr(config, "rope_theta", None) or config.rope_parameters["rope_theta"]
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return 1.0 / theta ** (
            torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
        ), 1.0

    ropes.ROPE_INIT_FUNCTIONS["default"] = default

    def renamed(f: Any) -> Any:
        def call(*a: Any, input_embeds: Any = None, cache_position: Any = None, **k: Any) -> Any:
            return f(
                *a, **({"inputs_embeds": input_embeds} if input_embeds is not None else {}), **k
            )

        return call

    masks.create_causal_mask = renamed(masks.create_causal_mask)
    masks.create_sliding_window_causal_mask = renamed(masks.create_sliding_window_causal_mask)
    transformers.PreTrainedConfig.pad_token_id = None
    from qwen_tts.core.models import modeling_qwen3_tts as q

    for cls in (
        q.Qwen3TTSTalkerForConditionalGeneration,
        q.Qwen3TTSTalkerCodePredictorModelForConditionalGeneration,
    ):

        def placed(self: Any, *a: Any, _old: Any = cls.forward, **k: Any) -> Any:
            past, x = k.get("past_key_values"), k.get("inputs_embeds")
            start = 0 if past is None else past.get_seq_length()
            k["cache_position"] = torch.arange(
                start, start + (x.shape[1] if x is not None and x.shape[1] > 1 else 1)
            )
            return _old(self, *a, **k | {"position_ids": None})

        cls.forward = functools.wraps(cls.forward)(placed)


def load(folder: Path) -> tuple[Any, Any]:
    from qwen_tts.core.models.configuration_qwen3_tts import Qwen3TTSConfig
    from qwen_tts.core.models.modeling_qwen3_tts import Qwen3TTSForConditionalGeneration
    from qwen_tts.core.tokenizer_12hz.configuration_qwen3_tts_tokenizer_v2 import (
        Qwen3TTSTokenizerV2Config,
    )
    from qwen_tts.core.tokenizer_12hz.modeling_qwen3_tts_tokenizer_v2 import (
        Qwen3TTSTokenizerV2Model,
    )

    below = folder / "speech_tokenizer"
    config, codec = (json.loads((f / "config.json").read_text()) for f in (folder, below))
    model = Qwen3TTSForConditionalGeneration._from_config(
        Qwen3TTSConfig(**config), attn_implementation="eager"
    ).eval()
    vocoder = Qwen3TTSTokenizerV2Model._from_config(
        Qwen3TTSTokenizerV2Config(**codec), attn_implementation="eager"
    ).eval()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    vocoder.load_state_dict(load_file(below / "model.safetensors"))
    return model, vocoder


def official(model: Any, case: dict[str, Any], sample: bool = False) -> torch.Tensor:
    def ids(x: list[int]) -> torch.Tensor:
        return torch.tensor([x])

    clone, ref_ids = None, None
    if "vector" in case:
        ref = torch.tensor(case["ref_codes"]) if "ref_codes" in case else None
        vector = torch.tensor(case["vector"])
        clone = {
            "ref_code": [ref], "ref_spk_embedding": [vector], "x_vector_only_mode": [ref is None],
            "icl_mode": [ref is not None],
        }  # fmt: skip
        ref_ids = None if ref is None else [ids(assistant_ids(case["ref_text"])[:-3])]
    codes, _ = model.generate(
        input_ids=[ids(assistant_ids(case["text"]))],
        instruct_ids=[ids(instruct_ids(case["instruct"]))] if "instruct" in case else None,
        voice_clone_prompt=clone, ref_ids=ref_ids, languages=[case.get("language", "auto")],
        speakers=[case.get("speaker")], non_streaming_mode=case["whole"],
        max_new_tokens=case["max_new"],
        do_sample=sample, subtalker_dosample=sample,
    )  # fmt: skip
    return codes[0]


@torch.no_grad()
def main() -> None:
    stub()
    shim()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp())
    samples = None
    for kind, size in KINDS:
        folder = write(root, kind, size)
        model, codec = load(folder)
        found = []
        for case in cases(kind, size):
            torch.manual_seed(SEED)
            found.append(
                {
                    "codes": official(model, case).tolist(),
                    "sampled": official(model, case, True).tolist(),
                }
            )
        golden: dict[str, Any] = {"digests": digests(folder), "cases": found}
        if kind == "base":
            wav = torch.from_numpy(clip(NOISE_SAMPLES))
            mask = torch.ones(1, len(wav), dtype=torch.long)
            golden["clip"] = codec.encode(wav[None], mask, return_dict=True).audio_codes[0].tolist()
            golden["vector"] = model.extract_speaker_embedding(wav.numpy(), 24000).tolist()
        if samples is None:
            codes = torch.tensor(found[0]["codes"] + found[1]["codes"])
            samples = codec.decoder(codes.T[None])[0, 0, : PACKETS * 1920]
            np.save(GOLDEN / "samples.npy", samples.numpy())
        (GOLDEN / f"{kind}-{size}.json").write_text(json.dumps(golden) + "\n")
        sys.stdout.write(f"{kind} {size} {[len(f['codes']) for f in found]}\n")


if __name__ == "__main__":
    main()
