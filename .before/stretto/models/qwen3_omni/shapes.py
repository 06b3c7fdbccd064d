"""The names and shapes of every tensor in a checkpoint of a given configuration, as they lie on disk.

Experts are separate tensors here, q/k/v and gate/up are not fused. The tiny checkpoint is written from this list,
and tests hold the stage modules against it. Also says how large random weights should be. Imports no torch."""

from __future__ import annotations

import math

from stretto.layers.config import DecoderConfig
from stretto.models.qwen3_omni.config import (
    AudioConfig,
    Code2WavConfig,
    OmniConfig,
    TalkerConfig,
    VisionConfig,
)

Shape = tuple[int, ...]
Shapes = dict[str, Shape]


def checkpoint_shapes(config: OmniConfig) -> Shapes:
    """Every tensor name of the checkpoint -> its shape."""
    text = config.thinker.text
    return {
        **_audio("thinker.audio_tower.", config.thinker.audio),
        **_vision("thinker.visual.", config.thinker.vision),
        "thinker.model.embed_tokens.weight": (text.vocab_size, text.hidden_size),
        **_decoder("thinker.model.", text),
        "thinker.lm_head.weight": (text.vocab_size, text.hidden_size),
        **_talker("talker.", config.talker),
        **_code2wav("code2wav.", config.code2wav),
    }


def _linear(name: str, out: int, inner: int, bias: bool = True) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (out, inner)}
    if bias:
        shapes[f"{name}.bias"] = (out,)
    return shapes


def _norm(name: str, size: int) -> Shapes:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def _swiglu(prefix: str, hidden: int, inner: int) -> Shapes:
    return {
        f"{prefix}gate_proj.weight": (inner, hidden),
        f"{prefix}up_proj.weight": (inner, hidden),
        f"{prefix}down_proj.weight": (hidden, inner),
    }


def _attention(prefix: str, hidden: int, heads: int, kv_heads: int, head_dim: int) -> Shapes:
    return {
        f"{prefix}q_proj.weight": (heads * head_dim, hidden),
        f"{prefix}k_proj.weight": (kv_heads * head_dim, hidden),
        f"{prefix}v_proj.weight": (kv_heads * head_dim, hidden),
        f"{prefix}o_proj.weight": (hidden, heads * head_dim),
    }


def _mlp(prefix: str, c: DecoderConfig) -> Shapes:
    if c.moe is None:
        assert c.dense_size is not None
        return _swiglu(prefix, c.hidden_size, c.dense_size)
    shapes: Shapes = {f"{prefix}gate.weight": (c.moe.num_experts, c.hidden_size)}
    for e in range(c.moe.num_experts):
        shapes |= _swiglu(f"{prefix}experts.{e}.", c.hidden_size, c.moe.expert_size)
    if c.moe.shared_size is not None:
        shapes |= _swiglu(f"{prefix}shared_expert.", c.hidden_size, c.moe.shared_size)
        shapes[f"{prefix}shared_expert_gate.weight"] = (1, c.hidden_size)
    return shapes


def _decoder(prefix: str, c: DecoderConfig) -> Shapes:
    shapes: Shapes = {}
    for i in range(c.num_layers):
        p = f"{prefix}layers.{i}."
        shapes |= _attention(f"{p}self_attn.", c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim)
        shapes[f"{p}self_attn.q_norm.weight"] = (c.head_dim,)
        shapes[f"{p}self_attn.k_norm.weight"] = (c.head_dim,)
        shapes |= _mlp(f"{p}mlp.", c)
        shapes[f"{p}input_layernorm.weight"] = (c.hidden_size,)
        shapes[f"{p}post_attention_layernorm.weight"] = (c.hidden_size,)
    shapes[f"{prefix}norm.weight"] = (c.hidden_size,)
    return shapes


def _audio(prefix: str, c: AudioConfig) -> Shapes:
    d, ch = c.hidden_size, c.conv_channels
    shapes: Shapes = {}
    for i, inner in enumerate((1, ch, ch), start=1):
        shapes[f"{prefix}conv2d{i}.weight"] = (ch, inner, 3, 3)
        shapes[f"{prefix}conv2d{i}.bias"] = (ch,)
    shapes |= _linear(f"{prefix}conv_out", d, ch * c.conv_bins, bias=False)
    for i in range(c.num_layers):
        p = f"{prefix}layers.{i}."
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= _linear(f"{p}self_attn.{name}", d, d)
        shapes |= _norm(f"{p}self_attn_layer_norm", d)
        shapes |= _linear(f"{p}fc1", c.ffn_size, d)
        shapes |= _linear(f"{p}fc2", d, c.ffn_size)
        shapes |= _norm(f"{p}final_layer_norm", d)
    shapes |= _norm(f"{prefix}ln_post", d)
    shapes |= _linear(f"{prefix}proj1", d, d)
    shapes |= _linear(f"{prefix}proj2", c.output_size, d)
    return shapes


def _vision(prefix: str, c: VisionConfig) -> Shapes:
    d, wide = c.hidden_size, c.hidden_size * c.merge**2
    shapes: Shapes = {
        f"{prefix}patch_embed.proj.weight": (d, c.channels, c.temporal_patch, c.patch_size, c.patch_size),
        f"{prefix}patch_embed.proj.bias": (d,),
        f"{prefix}pos_embed.weight": (c.num_positions, d),
    }
    for i in range(c.num_layers):
        p = f"{prefix}blocks.{i}."
        shapes |= _norm(f"{p}norm1", d)
        shapes |= _linear(f"{p}attn.qkv", 3 * d, d)
        shapes |= _linear(f"{p}attn.proj", d, d)
        shapes |= _norm(f"{p}norm2", d)
        shapes |= _linear(f"{p}mlp.linear_fc1", c.ffn_size, d)
        shapes |= _linear(f"{p}mlp.linear_fc2", d, c.ffn_size)
    heads = {f"{prefix}merger.": d} | {f"{prefix}merger_list.{i}.": wide for i in range(len(c.deepstack_layers))}
    for p, normed in heads.items():
        shapes |= _norm(f"{p}ln_q", normed)
        shapes |= _linear(f"{p}mlp.0", wide, wide)
        shapes |= _linear(f"{p}mlp.2", c.output_size, wide)
    return shapes


def _talker(prefix: str, c: TalkerConfig) -> Shapes:
    hidden = c.text.hidden_size
    shapes: Shapes = {f"{prefix}model.codec_embedding.weight": (c.text.vocab_size, hidden)}
    shapes |= _decoder(f"{prefix}model.", c.text)
    for name in ("text_projection", "hidden_projection"):
        shapes |= _linear(f"{prefix}{name}.linear_fc1", c.projection_size, c.thinker_hidden_size)
        shapes |= _linear(f"{prefix}{name}.linear_fc2", hidden, c.projection_size)
    shapes[f"{prefix}codec_head.weight"] = (c.text.vocab_size, hidden)
    p = f"{prefix}code_predictor."
    for g in range(c.num_code_groups - 1):
        shapes[f"{p}model.codec_embedding.{g}.weight"] = (c.predictor.vocab_size, hidden)
        shapes[f"{p}lm_head.{g}.weight"] = (c.predictor.vocab_size, c.predictor.hidden_size)
    shapes |= _decoder(f"{p}model.", c.predictor)
    return shapes


def _snake(prefix: str, channels: int) -> Shapes:
    return {f"{prefix}alpha": (channels,), f"{prefix}beta": (channels,)}


def _conv(prefix: str, shape: Shape, out: int) -> Shapes:
    return {f"{prefix}conv.weight": shape, f"{prefix}conv.bias": (out,)}


def _code2wav(prefix: str, c: Code2WavConfig) -> Shapes:
    d = c.hidden_size
    shapes: Shapes = {f"{prefix}code_embedding.weight": (c.codebook_size * c.num_quantizers, d)}
    for i in range(c.num_layers):
        p = f"{prefix}pre_transformer.layers.{i}."
        shapes |= _attention(f"{p}self_attn.", d, c.num_heads, c.num_heads, c.head_dim)
        shapes |= _swiglu(f"{p}mlp.", d, c.ffn_size)
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            shapes[p + name] = (d,)
        for name in ("self_attn_layer_scale.scale", "mlp_layer_scale.scale"):
            shapes[p + name] = (d,)
    shapes[f"{prefix}pre_transformer.norm.weight"] = (d,)
    for i, ratio in enumerate(c.upsampling_ratios):
        p = f"{prefix}upsample.{i}."
        shapes |= _conv(f"{p}0.", (d, d, ratio), d)  # transposed: [in, out, kernel]
        shapes |= _conv(f"{p}1.dwconv.", (d, 1, 7), d)
        shapes |= _norm(f"{p}1.norm", d)
        shapes |= _linear(f"{p}1.pwconv1", 4 * d, d)
        shapes |= _linear(f"{p}1.pwconv2", d, 4 * d)
        shapes[f"{p}1.gamma"] = (d,)
    return shapes | _wave_decoder(f"{prefix}decoder.", c)


def _wave_decoder(prefix: str, c: Code2WavConfig) -> Shapes:
    shapes = _conv(f"{prefix}0.", (c.decoder_dim, c.hidden_size, 7), c.decoder_dim)
    channels = c.decoder_dim
    for i, rate in enumerate(c.upsample_rates, start=1):
        p, out = f"{prefix}{i}.block.", channels // 2
        shapes |= _snake(f"{p}0.", channels)
        shapes |= _conv(f"{p}1.", (channels, out, 2 * rate), out)
        for unit in (2, 3, 4):
            shapes |= _snake(f"{p}{unit}.act1.", out)
            shapes |= _conv(f"{p}{unit}.conv1.", (out, out, 7), out)
            shapes |= _snake(f"{p}{unit}.act2.", out)
            shapes |= _conv(f"{p}{unit}.conv2.", (out, out, 1), out)
        channels = out
    last = len(c.upsample_rates) + 1
    shapes |= _snake(f"{prefix}{last}.", channels)
    shapes |= _conv(f"{prefix}{last + 1}.", (1, channels, 7), 1)
    return shapes


def spread(name: str, shape: Shape) -> tuple[float, float]:
    """Mean and deviation of a random tensor's entries, by its checkpoint name (with or without the stage's prefix).

    Matrices keep the variance of what passes through them; nothing is so small that a mistake would not show."""
    mean, std = 0.0, 0.1  # biases
    if name.endswith(("scale", "gamma")):
        mean, std = 0.5, 0.1
    elif name.endswith(("alpha", "beta")):
        std = 0.3
    elif len(shape) == 1 and name.endswith("weight"):  # norms
        mean, std = (2.0 if name.endswith("q_norm.weight") else 1.0), 0.2  # queries: attention that picks
    elif "embed_tokens" in name:
        std = 0.5  # an answer depends more on all that was said than on the last word
    elif "codec_embedding" in name:
        std = 0.25  # sixteen of them are summed in a talker row
    elif "embed" in name and "patch_embed" not in name:
        std = 1.0
    elif len(shape) > 1:
        std = 1.0 / math.sqrt(_fan_in(name, shape))
    if "text_projection" in name and len(shape) > 1:
        std *= 2.0  # its input is small and SiLU halves it; a text row should weigh as much as a frame's codes
    if name.endswith("conv2.conv.weight"):
        std *= 0.3  # twelve residual units in a row: keep their sum from growing
    if "decoder.6.conv." in name:
        std *= 0.04  # the waveform stays well inside (-1, 1), where the final clamp hides nothing
    return mean, std


def _fan_in(name: str, shape: Shape) -> int:
    """How many products one output sums. Transposed convolutions are [in, out, kernel], with two or one taps."""
    if ".block.1.conv." in name:
        return 2 * shape[0]
    if "upsample." in name and ".0.conv." in name:
        return shape[0]
    return math.prod(shape[1:])
