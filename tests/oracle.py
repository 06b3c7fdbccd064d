"""The `transformers` model as an oracle: loading it, and running one request with all that it
computed on the way.

Batch 1, float32, eager attention: other settings are not a valid reference for the talker."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stretto.preprocess.prompt import AudioClip, Patches, Prompt


def load_oracle(
    directory: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    experts: str = "eager",
    **options: Any,
) -> Any:
    """The reference model; every tensor of the checkpoint must have found its place. `options` go
    to `from_pretrained`."""
    from transformers import Qwen3OmniMoeForConditionalGeneration
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model, report = Qwen3OmniMoeForConditionalGeneration.from_pretrained(
        directory,
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation=experts,
        output_loading_info=True,
        **options,
    )
    assert not any(
        report[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
    ), report
    # The talker reads this field when a prompt has both audio and pictures, and its config class
    # lacks it.
    model.talker.config.audio_config = model.config.thinker_config.audio_config
    return model.to(device).eval()


@dataclass(slots=True)
class OracleRun:
    """One request through the reference. Rows are float32 on the CPU, without the batch axis."""

    text: list[int]  # generated ids, the end token included
    accept_rows: torch.Tensor  # [prompt + generated - 1, thinker hidden] at the accept layer
    talker_prompt: torch.Tensor  # [rows, talker hidden], the talker's prefill input
    talker_positions: torch.Tensor  # [3, rows]
    talker_inputs: torch.Tensor  # [steps - 1, talker hidden], the input of each decode step
    codec_logits: torch.Tensor  # [steps, codec vocabulary], raw, the prefill's last row first
    first_codes: list[int]  # every sampled codebook-0 token, the end token included
    codes: torch.Tensor  # [frames, 16]
    waveform: torch.Tensor  # [samples]


def media_inputs(prompt: Prompt, device: torch.device | str = "cpu") -> dict[str, Any]:
    """A prompt's media as keyword arguments of the reference's `generate` and `thinker.forward`."""
    kwargs: dict[str, Any] = {}
    if prompt.audios:
        frames = [a.mel.shape[1] for a in prompt.audios]
        features = np.zeros((len(frames), prompt.audios[0].mel.shape[0], max(frames)), np.float32)
        mask = torch.zeros(len(frames), max(frames), dtype=torch.long)
        for i, audio in enumerate(prompt.audios):
            features[i, :, : frames[i]] = audio.mel
            mask[i, : frames[i]] = 1
        kwargs |= {"input_features": torch.from_numpy(features), "feature_attention_mask": mask}
    if prompt.images:
        kwargs["pixel_values"] = torch.from_numpy(np.concatenate([p.values for p in prompt.images]))
        kwargs["image_grid_thw"] = torch.tensor([p.grid for p in prompt.images])
    if prompt.videos:
        kwargs["pixel_values_videos"] = torch.from_numpy(
            np.concatenate([p.values for p in prompt.videos])
        )
        kwargs["video_grid_thw"] = torch.tensor([p.grid for p in prompt.videos])
        kwargs["video_second_per_grid"] = torch.tensor([p.seconds_per_grid for p in prompt.videos])
    kwargs = {k: v.to(device) for k, v in kwargs.items()}
    if prompt.audio_in_video:
        kwargs["use_audio_in_video"] = True
    return kwargs


@dataclass(slots=True)
class _Recorder:
    thinker: list[Any] = field(default_factory=list)
    talker: list[Any] = field(default_factory=list)
    inputs: list[torch.Tensor] = field(default_factory=list)
    positions: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)


@contextmanager
def _recording(model: Any) -> Iterator[_Recorder]:
    """Keep what the two language models return inside `generate`, and the talker's inputs and
    logits."""
    seen = _Recorder()

    def keep(results: list[Any], call: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            results.append(call(*args, **kwargs))
            return results[-1]

        return wrapped

    def before(module: Any, args: Any, kwargs: Any) -> None:
        seen.inputs.append(kwargs["inputs_embeds"][0].float().cpu())
        seen.positions.append(kwargs["position_ids"][-3:, 0].float().cpu())

    def after(module: Any, args: Any, output: Any) -> None:
        seen.logits.append(output[0, -1].float().cpu())

    hooks = [
        model.talker.model.register_forward_pre_hook(before, with_kwargs=True),
        model.talker.codec_head.register_forward_hook(after),
    ]
    model.thinker.generate = keep(seen.thinker, model.thinker.generate)
    model.talker.generate = keep(seen.talker, model.talker.generate)
    try:
        yield seen
    finally:
        del model.thinker.generate, model.talker.generate
        for hook in hooks:
            hook.remove()


def generate(
    model: Any,
    prompt: Prompt,
    *,
    max_text: int = 24,
    max_frames: int = 24,
    voice: str = "ethan",
    seed: int | None = None,
    **options: Any,
) -> OracleRun:
    """Run one request: greedy without a seed; with one, both language models sample with the
    library's RNG.

    `max_frames` counts sampled codebook-0 tokens, as the reference does: a run that stops there has
    one frame less. `options` go to the reference's `generate` (thinker_temperature, talker_top_k,
    ...)."""
    sampled = seed is not None
    if sampled:
        torch.manual_seed(seed)
    device = model.thinker.device
    settings: dict[str, Any] = {
        "thinker_do_sample": sampled,
        "talker_do_sample": sampled,
        "thinker_eos_token_id": model.config.im_end_token_id,
        "thinker_pad_token_id": model.config.im_end_token_id,
        **media_inputs(prompt, device),
        **options,
    }
    ids = torch.tensor([prompt.ids], device=device)
    with _recording(model) as seen, torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Passing `repetition_penalty`"
        )  # as intended: new codes only
        sequences, waveform = model.generate(
            input_ids=ids,
            speaker=voice,
            thinker_max_new_tokens=max_text,
            talker_max_new_tokens=max_frames,
            **settings,
        )
    accept = model.config.talker_config.accept_hidden_layer
    codes = [step[-1][0] for step in seen.talker[0].hidden_states if step[-1] is not None]
    width = seen.inputs[0].shape[-1]
    return OracleRun(
        text=sequences[0, ids.shape[1] :].tolist(),
        accept_rows=torch.cat([h[accept][0] for h in seen.thinker[0].hidden_states]).float().cpu(),
        talker_prompt=seen.inputs[0],
        talker_positions=seen.positions[0],
        talker_inputs=torch.cat(seen.inputs[1:]) if len(seen.inputs) > 1 else torch.empty(0, width),
        codec_logits=torch.stack(seen.logits),
        first_codes=seen.talker[0].sequences[0].tolist(),
        codes=torch.stack(codes).cpu(),
        waveform=waveform.reshape(-1).float().cpu(),
    )


# Prompts. Text is given as ids; media as random features of the right shapes.


def random_mel(frames: int, seed: int = 1, bins: int = 128) -> AudioClip:
    values = np.random.default_rng(seed).standard_normal((bins, frames), dtype=np.float32)
    return AudioClip.of(0.5 * values)


def random_patches(
    grid: tuple[int, int, int], seed: int = 2, seconds_per_grid: float = 1.0
) -> Patches:
    t, h, w = grid
    values = np.random.default_rng(seed).standard_normal(
        (t * h * w, 3 * 2 * 16 * 16), dtype=np.float32
    )
    return Patches.of(values, grid, seconds_per_grid)


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Builds prompts in the model's format from a checkpoint's own tokenizer."""

    tokenizer: Any
    merge: int = 2

    @classmethod
    def open(cls, directory: str | Path) -> PromptMaker:
        from tokenizers import Tokenizer

        return cls(Tokenizer.from_file(str(Path(directory) / "tokenizer.json")))

    def ids(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def build(
        self, turns: Sequence[tuple[str, Sequence[str | AudioClip | Patches]]], reply: bool = True
    ) -> Prompt:
        """Turns of (role, parts). Patches with one temporal row are an image, else a video."""
        from stretto.models.qwen3_omni.config import audio_tokens

        out = ""
        audios: list[AudioClip] = []
        images: list[Patches] = []
        videos: list[Patches] = []
        for role, parts in turns:
            out += f"<|im_start|>{role}\n"
            for part in parts:
                if isinstance(part, str):
                    out += part
                elif isinstance(part, AudioClip):
                    audios.append(part)
                    out += f"<|audio_start|>{'<|audio_pad|>' * audio_tokens(part.mel.shape[1])}<|audio_end|>"  # noqa: E501
                else:
                    t, h, w = part.grid
                    (images if t == 1 else videos).append(part)
                    pad = "<|image_pad|>" if t == 1 else "<|video_pad|>"
                    out += f"<|vision_start|>{pad * (t * h * w // self.merge**2)}<|vision_end|>"
            out += "<|im_end|>\n"
        if reply:
            out += "<|im_start|>assistant\n"
        return Prompt(tuple(self.ids(out)), tuple(audios), tuple(images), tuple(videos))


def example_prompts(maker: PromptMaker) -> dict[str, Prompt]:
    """One prompt of each kind the parity tests go through."""
    short, clip = (
        random_mel(237),
        random_mel(912, seed=3),
    )  # the second crosses the 8 s attention window
    image = random_patches((1, 6, 10))
    video = random_patches((3, 4, 6), seed=4, seconds_per_grid=0.5)
    return {
        "text": maker.build([("user", ["Hello, what is the weather?"])]),
        "system": maker.build(
            [("system", ["You are a voice."]), ("user", ["Tell me a story about the river."])]
        ),
        "turns": maker.build(
            [
                ("user", ["Hello"]),
                ("assistant", ["Hello, how are you?"]),
                ("user", ["Find a song, please."]),
            ]
        ),
        "audio": maker.build([("user", [short])]),
        "long_audio": maker.build([("system", ["Answer."]), ("user", [clip, "What did he say?"])]),
        "image": maker.build([("user", [image, "What is in the picture?"])]),
        "video": maker.build([("user", [video, "What do you see?"])]),
        "audio_image": maker.build([("user", [short, image, "Who is it?"])]),
        "media_turns": maker.build(
            [("user", [image]), ("assistant", ["A tree."]), ("user", [short])]
        ),
    }
