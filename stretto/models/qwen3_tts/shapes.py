"""The names and shapes of every tensor in a checkpoint of a given configuration, as they lie on
disk, in its two files. The tiny checkpoint is written from this list, and tests hold the modules
against it. Imports no torch."""

from __future__ import annotations

from stretto.models.qwen3_tts.config import EncoderConfig, SpeakerConfig, TalkerConfig, TtsConfig
from stretto.models.shapes import Shapes, conv, decoder, linear, norm, vocoder
from stretto.models.speech.config import VocoderConfig


def model_shapes(config: TtsConfig) -> Shapes:
    """Of model.safetensors."""
    shapes = _talker("talker.", config.talker)
    return shapes | (
        _speaker("speaker_encoder.", config.speaker) if config.speaker is not None else {}
    )


def codec_shapes(config: TtsConfig) -> Shapes:
    """Of speech_tokenizer/model.safetensors."""
    return _decoder("decoder.", config.vocoder) | _encoder("encoder.", config.encoder)


def _talker(prefix: str, c: TalkerConfig) -> Shapes:
    hidden, text, inner = c.decoder.hidden_size, c.text_hidden, c.predictor.hidden_size
    shapes: Shapes = {
        f"{prefix}model.codec_embedding.weight": (c.decoder.vocab_size, hidden),
        f"{prefix}model.text_embedding.weight": (c.text_vocab, text),
        f"{prefix}codec_head.weight": (c.decoder.vocab_size, hidden),
    }
    shapes |= decoder(f"{prefix}model.", c.decoder)
    shapes |= linear(f"{prefix}text_projection.linear_fc1", text, text)
    shapes |= linear(f"{prefix}text_projection.linear_fc2", hidden, text)
    p = f"{prefix}code_predictor."
    shapes |= decoder(f"{p}model.", c.predictor)
    for g in range(c.num_code_groups - 1):
        shapes[f"{p}model.codec_embedding.{g}.weight"] = (c.predictor.vocab_size, hidden)
        shapes[f"{p}lm_head.{g}.weight"] = (c.predictor.vocab_size, inner)
    if inner != hidden:
        shapes |= linear(f"{p}small_to_mtp_projection", inner, hidden)
    return shapes


def _sound(name: str, out: int, inner: int, taps: int, bias: bool = True) -> Shapes:
    """A convolution that is called by its own name."""
    return {f"{name}.weight": (out, inner, taps), **({f"{name}.bias": (out,)} if bias else {})}


def _speaker(p: str, c: SpeakerConfig) -> Shapes:
    ch, last = c.channels, c.channels[-1]
    shapes = _sound(f"{p}blocks.0.conv", ch[0], c.mel_bins, c.kernels[0])
    for i in range(1, len(ch) - 1):
        b, part = f"{p}blocks.{i}.", ch[i] // c.scale
        shapes |= _sound(f"{b}tdnn1.conv", ch[i], ch[i - 1], 1) | _sound(
            f"{b}tdnn2.conv", ch[i], ch[i], 1
        )
        for j in range(c.scale - 1):
            shapes |= _sound(f"{b}res2net_block.blocks.{j}.conv", part, part, c.kernels[i])
        shapes |= _sound(f"{b}se_block.conv1", c.squeeze_channels, ch[i], 1)
        shapes |= _sound(f"{b}se_block.conv2", ch[i], c.squeeze_channels, 1)
    shapes |= _sound(f"{p}mfa.conv", last, last, c.kernels[-1])
    shapes |= _sound(f"{p}asp.tdnn.conv", c.attention_channels, 3 * last, 1)
    shapes |= _sound(f"{p}asp.conv", last, c.attention_channels, 1)
    return shapes | _sound(f"{p}fc", c.size, 2 * last, 1)


def _decoder(p: str, c: VocoderConfig) -> Shapes:
    table, half = c.table_size, c.table_size // 2
    shapes: Shapes = {}
    for part, n in (("rvq_first", 1), ("rvq_rest", c.num_quantizers - 1)):
        q = f"{p}quantizer.{part}."
        shapes |= _sound(f"{q}input_proj", half, table, 1, bias=False)
        shapes |= _sound(f"{q}output_proj", table, half, 1, bias=False)
        for i in range(n):
            shapes[f"{q}vq.layers.{i}._codebook.cluster_usage"] = (c.codebook_size,)
            shapes[f"{q}vq.layers.{i}._codebook.embedding_sum"] = (c.codebook_size, half)
    shapes |= conv(f"{p}pre_conv.", (c.latent, table, 3), c.latent)
    shapes |= linear(f"{p}pre_transformer.input_proj", c.hidden_size, c.latent)
    shapes |= linear(f"{p}pre_transformer.output_proj", c.latent, c.hidden_size)
    return shapes | vocoder(p, c)


def _encoder(p: str, c: EncoderConfig) -> Shapes:
    width, at, d = c.filters, 1, c.hidden_size
    shapes = conv(f"{p}encoder.layers.0.", (width, 1, c.kernel), width)
    for ratio in reversed(c.ratios):
        block, inner = f"{p}encoder.layers.{at}.block.", width // c.compress
        shapes |= conv(f"{block}1.", (inner, width, c.residual_kernel), inner)
        shapes |= conv(f"{block}3.", (width, inner, 1), width)
        shapes |= conv(f"{p}encoder.layers.{at + 2}.", (2 * width, width, 2 * ratio), 2 * width)
        width, at = 2 * width, at + 3
    shapes |= conv(f"{p}encoder.layers.{at + 1}.", (d, width, c.last_kernel), d)
    for i in range(c.num_layers):
        q = f"{p}encoder_transformer.layers.{i}."
        for name in "qkvo":
            shapes |= linear(f"{q}self_attn.{name}_proj", d, d, bias=False)
        shapes |= linear(f"{q}mlp.fc1", c.ffn_size, d, bias=False) | linear(
            f"{q}mlp.fc2", d, c.ffn_size, bias=False
        )
        shapes |= norm(f"{q}input_layernorm", d) | norm(f"{q}post_attention_layernorm", d)
        shapes |= {f"{q}self_attn_layer_scale.scale": (d,), f"{q}mlp_layer_scale.scale": (d,)}
    shapes[f"{p}downsample.conv.weight"] = (d, d, 4)
    for part, n in (("semantic", 1), ("acoustic", c.num_quantizers - 1)):
        q = f"{p}quantizer.{part}_residual_vector_quantizer."
        shapes |= _sound(f"{q}input_proj", c.inner_size, d, 1, bias=False)
        shapes |= _sound(f"{q}output_proj", d, c.inner_size, 1, bias=False)
        for i in range(n):
            b = f"{q}layers.{i}.codebook."
            shapes |= {f"{b}cluster_usage": (c.codebook_size,), f"{b}initialized": (1,)}
            shapes[f"{b}embed_sum"] = (c.codebook_size, c.codebook_dim)
    return shapes
