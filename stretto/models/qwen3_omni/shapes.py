"""The names and shapes of every tensor in a checkpoint of a given configuration, as they lie on
disk.

Experts are separate tensors here, q/k/v and gate/up are not fused. The tiny checkpoint is written
from this list, and tests hold the stage modules against it. Imports no torch."""

from __future__ import annotations

from stretto.models.qwen3_omni.config import AudioConfig, OmniConfig, TalkerConfig, VisionConfig
from stretto.models.shapes import Shapes, decoder, linear, norm, vocoder
from stretto.models.speech.config import VocoderConfig


def checkpoint_shapes(config: OmniConfig) -> Shapes:
    """Every tensor name of the checkpoint -> its shape."""
    text = config.thinker.text
    return {
        **_audio("thinker.audio_tower.", config.thinker.audio),
        **_vision("thinker.visual.", config.thinker.vision),
        "thinker.model.embed_tokens.weight": (text.vocab_size, text.hidden_size),
        **decoder("thinker.model.", text),
        "thinker.lm_head.weight": (text.vocab_size, text.hidden_size),
        **_talker("talker.", config.talker),
        **_code2wav("code2wav.", config.code2wav),
    }


def _audio(prefix: str, c: AudioConfig) -> Shapes:
    d, ch = c.hidden_size, c.conv_channels
    shapes: Shapes = {}
    for i, inner in enumerate((1, ch, ch), start=1):
        shapes[f"{prefix}conv2d{i}.weight"] = (ch, inner, 3, 3)
        shapes[f"{prefix}conv2d{i}.bias"] = (ch,)
    shapes |= linear(f"{prefix}conv_out", d, ch * c.conv_bins, bias=False)
    for i in range(c.num_layers):
        p = f"{prefix}layers.{i}."
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= linear(f"{p}self_attn.{name}", d, d)
        shapes |= norm(f"{p}self_attn_layer_norm", d)
        shapes |= linear(f"{p}fc1", c.ffn_size, d)
        shapes |= linear(f"{p}fc2", d, c.ffn_size)
        shapes |= norm(f"{p}final_layer_norm", d)
    shapes |= norm(f"{prefix}ln_post", d)
    shapes |= linear(f"{prefix}proj1", d, d)
    shapes |= linear(f"{prefix}proj2", c.output_size, d)
    return shapes


def _vision(prefix: str, c: VisionConfig) -> Shapes:
    d, wide = c.hidden_size, c.hidden_size * c.merge**2
    shapes: Shapes = {
        f"{prefix}patch_embed.proj.weight": (
            d,
            c.channels,
            c.temporal_patch,
            c.patch_size,
            c.patch_size,
        ),
        f"{prefix}patch_embed.proj.bias": (d,),
        f"{prefix}pos_embed.weight": (c.num_positions, d),
    }
    for i in range(c.num_layers):
        p = f"{prefix}blocks.{i}."
        shapes |= norm(f"{p}norm1", d)
        shapes |= linear(f"{p}attn.qkv", 3 * d, d)
        shapes |= linear(f"{p}attn.proj", d, d)
        shapes |= norm(f"{p}norm2", d)
        shapes |= linear(f"{p}mlp.linear_fc1", c.ffn_size, d)
        shapes |= linear(f"{p}mlp.linear_fc2", d, c.ffn_size)
    heads = {f"{prefix}merger.": d} | {
        f"{prefix}merger_list.{i}.": wide for i in range(len(c.deepstack_layers))
    }
    for p, normed in heads.items():
        shapes |= norm(f"{p}ln_q", normed)
        shapes |= linear(f"{p}mlp.0", wide, wide)
        shapes |= linear(f"{p}mlp.2", c.output_size, wide)
    return shapes


def _talker(prefix: str, c: TalkerConfig) -> Shapes:
    hidden = c.text.hidden_size
    shapes: Shapes = {f"{prefix}model.codec_embedding.weight": (c.text.vocab_size, hidden)}
    shapes |= decoder(f"{prefix}model.", c.text)
    for name in ("text_projection", "hidden_projection"):
        shapes |= linear(f"{prefix}{name}.linear_fc1", c.projection_size, c.thinker_hidden_size)
        shapes |= linear(f"{prefix}{name}.linear_fc2", hidden, c.projection_size)
    shapes[f"{prefix}codec_head.weight"] = (c.text.vocab_size, hidden)
    p = f"{prefix}code_predictor."
    for g in range(c.num_code_groups - 1):
        shapes[f"{p}model.codec_embedding.{g}.weight"] = (c.predictor.vocab_size, hidden)
        shapes[f"{p}lm_head.{g}.weight"] = (c.predictor.vocab_size, c.predictor.hidden_size)
    shapes |= decoder(f"{p}model.", c.predictor)
    return shapes


def _code2wav(prefix: str, c: VocoderConfig) -> Shapes:
    table: Shapes = {
        f"{prefix}code_embedding.weight": (c.codebook_size * c.num_quantizers, c.hidden_size)
    }
    return table | vocoder(prefix, c)
