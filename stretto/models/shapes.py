"""Names and shapes of tensors as they lie in checkpoints, of the parts that families share; and how
large random weights should be. q/k/v and gate/up are not fused here. Imports no torch."""

from __future__ import annotations

import math

from stretto.layers.config import DecoderConfig
from stretto.models.speech.config import VocoderConfig

Shape = tuple[int, ...]
Shapes = dict[str, Shape]


def linear(name: str, out: int, inner: int, bias: bool = True) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (out, inner)}
    if bias:
        shapes[f"{name}.bias"] = (out,)
    return shapes


def norm(name: str, size: int) -> Shapes:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def swiglu(prefix: str, hidden: int, inner: int) -> Shapes:
    return {
        f"{prefix}gate_proj.weight": (inner, hidden),
        f"{prefix}up_proj.weight": (inner, hidden),
        f"{prefix}down_proj.weight": (hidden, inner),
    }


def attention(prefix: str, hidden: int, heads: int, kv_heads: int, head_dim: int) -> Shapes:
    return {
        f"{prefix}q_proj.weight": (heads * head_dim, hidden),
        f"{prefix}k_proj.weight": (kv_heads * head_dim, hidden),
        f"{prefix}v_proj.weight": (kv_heads * head_dim, hidden),
        f"{prefix}o_proj.weight": (hidden, heads * head_dim),
    }


def mlp(prefix: str, c: DecoderConfig) -> Shapes:
    if c.moe is None:
        assert c.dense_size is not None
        return swiglu(prefix, c.hidden_size, c.dense_size)
    shapes: Shapes = {f"{prefix}gate.weight": (c.moe.num_experts, c.hidden_size)}
    for e in range(c.moe.num_experts):
        shapes |= swiglu(f"{prefix}experts.{e}.", c.hidden_size, c.moe.expert_size)
    if c.moe.shared_size is not None:
        shapes |= swiglu(f"{prefix}shared_expert.", c.hidden_size, c.moe.shared_size)
        shapes[f"{prefix}shared_expert_gate.weight"] = (1, c.hidden_size)
    return shapes


def decoder(prefix: str, c: DecoderConfig) -> Shapes:
    shapes: Shapes = {}
    for i in range(c.num_layers):
        p = f"{prefix}layers.{i}."
        shapes |= attention(
            f"{p}self_attn.", c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim
        )
        shapes[f"{p}self_attn.q_norm.weight"] = (c.head_dim,)
        shapes[f"{p}self_attn.k_norm.weight"] = (c.head_dim,)
        shapes |= mlp(f"{p}mlp.", c)
        shapes[f"{p}input_layernorm.weight"] = (c.hidden_size,)
        shapes[f"{p}post_attention_layernorm.weight"] = (c.hidden_size,)
    shapes[f"{prefix}norm.weight"] = (c.hidden_size,)
    return shapes


def snake(prefix: str, channels: int) -> Shapes:
    return {f"{prefix}alpha": (channels,), f"{prefix}beta": (channels,)}


def conv(prefix: str, shape: Shape, out: int) -> Shapes:
    return {f"{prefix}conv.weight": shape, f"{prefix}conv.bias": (out,)}


def wave_decoder(prefix: str, c: VocoderConfig) -> Shapes:
    shapes = conv(f"{prefix}0.", (c.decoder_dim, c.latent, 7), c.decoder_dim)
    channels = c.decoder_dim
    for i, rate in enumerate(c.upsample_rates, start=1):
        p, out = f"{prefix}{i}.block.", channels // 2
        shapes |= snake(f"{p}0.", channels)
        shapes |= conv(f"{p}1.", (channels, out, 2 * rate), out)
        for unit in (2, 3, 4):
            shapes |= snake(f"{p}{unit}.act1.", out)
            shapes |= conv(f"{p}{unit}.conv1.", (out, out, 7), out)
            shapes |= snake(f"{p}{unit}.act2.", out)
            shapes |= conv(f"{p}{unit}.conv2.", (out, out, 1), out)
        channels = out
    last = len(c.upsample_rates) + 1
    shapes |= snake(f"{prefix}{last}.", channels)
    shapes |= conv(f"{prefix}{last + 1}.", (1, channels, 7), 1)
    return shapes


def vocoder(prefix: str, c: VocoderConfig) -> Shapes:
    """All but what makes rows of codes."""
    d = c.hidden_size
    shapes: Shapes = {}
    for i in range(c.num_layers):
        p = f"{prefix}pre_transformer.layers.{i}."
        shapes |= attention(f"{p}self_attn.", d, c.num_heads, c.num_heads, c.head_dim)
        shapes |= swiglu(f"{p}mlp.", d, c.ffn_size)
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            shapes[p + name] = (d,)
        for name in ("self_attn_layer_scale.scale", "mlp_layer_scale.scale"):
            shapes[p + name] = (d,)
    shapes[f"{prefix}pre_transformer.norm.weight"] = (d,)
    d = c.latent
    for i, ratio in enumerate(c.upsampling_ratios):
        p = f"{prefix}upsample.{i}."
        shapes |= conv(f"{p}0.", (d, d, ratio), d)  # transposed: [in, out, kernel]
        shapes |= conv(f"{p}1.dwconv.", (d, 1, 7), d)
        shapes |= norm(f"{p}1.norm", d)
        shapes |= linear(f"{p}1.pwconv1", 4 * d, d)
        shapes |= linear(f"{p}1.pwconv2", d, 4 * d)
        shapes[f"{p}1.gamma"] = (d,)
    return shapes | wave_decoder(f"{prefix}decoder.", c)


def spread(name: str, shape: Shape) -> tuple[float, float]:
    """Mean and deviation of a random tensor's entries, by its checkpoint name (with or without the
    stage's prefix).

    Matrices keep the variance of what passes through them; nothing is so small that a mistake would
    not show."""
    mean, std = 0.0, 0.1  # biases
    if name.endswith(("scale", "gamma")):
        mean, std = 0.5, 0.1
    elif name.endswith("cluster_usage"):
        mean, std = 1.0, 0.1  # codebooks are stored as sums, and divided by this
    elif name.endswith(("alpha", "beta")):
        std = 0.3
    elif len(shape) == 1 and name.endswith("weight"):  # norms
        mean, std = (
            (2.0 if name.endswith("q_norm.weight") else 1.0),
            0.2,
        )  # queries: attention that picks
    elif "embed_tokens" in name:
        std = 0.5  # an answer depends more on all that was said than on the last word
    elif "codec_embedding" in name:
        std = 0.25  # sixteen of them are summed in a talker row
    elif "embed" in name and "patch_embed" not in name:
        std = 1.0
    elif len(shape) > 1:
        std = 1.0 / math.sqrt(_fan_in(name, shape))
    if "text_projection" in name and len(shape) > 1:
        # its input is small and SiLU halves it; a text row should weigh as much as a frame's codes
        std *= 2.0
    if name.endswith("conv2.conv.weight"):
        std *= 0.3  # twelve residual units in a row: keep their sum from growing
    if "decoder.6.conv." in name:
        std *= 0.04  # the waveform stays well inside (-1, 1), where the final clamp hides nothing
    return mean, std


def _fan_in(name: str, shape: Shape) -> int:
    """How many products one output sums. Transposed convolutions are [in, out, kernel], with two or
    one taps."""
    if ".block.1.conv." in name and "encoder.layers." not in name:
        return 2 * shape[0]
    if "upsample." in name and ".0.conv." in name:
        return shape[0]
    return math.prod(shape[1:])
