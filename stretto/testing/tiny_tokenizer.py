"""The tiny checkpoint's tokenizer and chat template, made by rule: nothing is trained, nothing is
downloaded.

A byte-level BPE of 256 byte tokens, so that any text has ids and any ids have text, and the merges
that make some common words one token each. Special tokens and their order are the released model's.
Called by writers of tiny checkpoints, and by recipes that train a tokenizer of the same kind."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.testing.checkpoints import write_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
    "<tts_text_bos_single>",
    "<|audio_pad|>",
)
# Added tokens a decoder shows as text, as in Qwen3: they are part of an answer.
NOT_SPECIAL = frozenset(
    t
    for t in SPECIAL
    if t.startswith(("<tool_", "</tool_", "<think", "</think", "<|fim_", "<|repo", "<|file"))
)

# What a processor calls the tokens it looks for.
ATTRIBUTES = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}

# Qwen's rule for cutting text into pieces that merges do not cross.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Role words stand alone, right after <|im_start|>; the rest is one token with and without a space
# before it.
ROLES = ("system", "user", "assistant", "tool")
_COMMON = """
the of and to in is you that it he was for on are as with his they I at be this have from or one had by word but not
what all were we when your can said there use an each which she do how their if will up other about out many then
them these so some her would make like him into time has look two more write go see number no way could people my
than first water been call who oil its now find long down day did get come made may part over new sound take only
little work know place year live me back give most very after thing our just name good sentence man think say great
where help through much before line right too mean old any same tell boy follow came want show also around form
three small set put end does another well large must big even such because turn here why ask went men read need land
different home us move try kind hand picture again change off play spell air away animal house point page letter
mother answer found study still learn should world high every near add food between own below country plant last
school father keep tree never start city earth eye light thought head under story saw left few while along might
close something seem next hard open example begin life always those both paper together got group often run
hello thanks please yes okay weather music voice song rain sun river garden morning evening quiet bright slow
"""  # noqa: E501
WORDS = tuple(_COMMON.split())
ENDINGS = ["ing", "ed", "er", "ly", "tion", "'s", "'t", "'re", "'ll", "'m"]
MARKS = [
    ".",
    ",",
    "?",
    "!",
    "...",
    "\n\n",
    "  ",
    "    ",
    " -",
    " (",
    ' "',
    '{"',
    '":',
    '"}',
    '",',
    "://",
    "ñ",
    "é",
    "ü",
]


@cache
def byte_letters() -> dict[int, str]:
    """Byte -> the printable character that stands for it in a byte-level vocabulary."""
    plain = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    letters = {b: chr(b) for b in plain}
    others = (b for b in range(256) if b not in letters)
    return letters | {b: chr(256 + n) for n, b in enumerate(others)}


def _spell(text: str) -> list[str]:
    letters = byte_letters()
    return [letters[b] for b in text.encode()]


def _encode(pieces: list[str], ranks: dict[tuple[str, str], int]) -> list[str]:
    """Apply the merges to a word, lowest rank first."""
    while len(pieces) > 1:
        best = min(pairwise(pieces), key=lambda pair: ranks.get(pair, len(ranks)))
        if best not in ranks:
            break
        merged: list[str] = []
        for piece in pieces:
            if merged and (merged[-1], piece) == best:
                merged[-1] += piece
            else:
                merged.append(piece)
        pieces = merged
    return pieces


@cache
def vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Byte-level vocabulary and merges in which each listed word is one token.

    A word's merges come after those of all words before it, so they never disturb an earlier
    word."""
    words = list(ROLES)
    words += [form for w in WORDS for form in (f" {w}", w)]
    words += [w.capitalize() for w in WORDS]
    words += ENDINGS + MARKS
    ranks: dict[tuple[str, str], int] = {}
    for word in words:
        while len(pieces := _encode(_spell(word), ranks)) > 1:
            ranks[pieces[0], pieces[1]] = len(ranks)
    # Qwen's order: bytes by their letter, then one token per merge.
    tokens = [*sorted(byte_letters().values()), *("".join(pair) for pair in ranks)]
    vocab = {t: i for i, t in enumerate(dict.fromkeys(tokens))}
    return vocab, list(ranks)


def write_vocabulary(folder: Path) -> None:
    """vocab.json and merges.txt."""
    vocab, merges = vocabulary()
    write_json(folder / "vocab.json", vocab)
    (folder / "merges.txt").write_text("".join(f"{a} {b}\n" for a, b in merges), encoding="utf-8")


@cache
def token_ids() -> dict[str, int]:
    """Token text -> id, special tokens included."""
    vocab, _ = vocabulary()
    return vocab | {t: len(vocab) + i for i, t in enumerate(SPECIAL)}


def tokenizer_json() -> str:
    """The content of tokenizer.json."""
    from tokenizers import Tokenizer, models

    vocab, merges = vocabulary()
    tok = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    cut_into_bytes(tok)
    add_special(tok)
    text: str = tok.to_str(pretty=False)
    return text


def cut_into_bytes(tok: Tokenizer) -> None:
    """Have a tokenizer cut text by Qwen's rule, and go by bytes."""
    from tokenizers import Regex, decoders, pre_tokenizers, processors

    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.post_processor = processors.ByteLevel(trim_offsets=False)
    tok.decoder = decoders.ByteLevel()


def add_special(tok: Tokenizer) -> None:
    """Behind all others, in the released model's order."""
    from tokenizers import AddedToken

    for t in SPECIAL:  # one call each keeps the order, and with it the ids
        tok.add_tokens([AddedToken(t, special=t not in NOT_SPECIAL, normalized=False)])


def tokenizer_config(ids: Mapping[str, int] | None = None, longest: int = 65536) -> dict[str, Any]:
    """The content of tokenizer_config.json: by the `ids` of the special tokens."""
    ids = token_ids() if ids is None else ids
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {
        "tokenizer_class": "TokenizersBackend",
        "added_tokens_decoder": {
            str(ids[t]): {"content": t, **plain, "special": t not in NOT_SPECIAL} for t in SPECIAL
        },
        "extra_special_tokens": ATTRIBUTES,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "errors": "replace",
        "model_max_length": longest,
        "chat_template": CHAT_TEMPLATE,
        **ATTRIBUTES,
    }


CHAT_TEMPLATE = """\
{%- macro render(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- elif content -%}
        {%- for part in content -%}
            {%- if part is string -%}
                {{- part -}}
            {%- elif part.type in ('audio', 'input_audio', 'audio_url') -%}
                {{- '<|audio_start|><|audio_pad|><|audio_end|>' -}}
            {%- elif part.type in ('image', 'image_url') -%}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
            {%- elif part.type in ('video', 'video_url') -%}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
            {%- elif part.text -%}
                {{- part.text -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}

{%- set turns = messages -%}
{%- if tools -%}
    {{- '<|im_start|>system\\n' -}}
    {%- if turns and turns[0].role == 'system' -%}
        {{- render(turns[0].content) + '\\n\\n' -}}
        {%- set turns = turns[1:] -%}
    {%- endif -%}
    {{- '# Tools\\n\\nThese functions may be called to help the user; ' -}}
    {{- 'their signatures are in the <tools></tools> tags:\\n<tools>' -}}
    {%- for tool in tools -%}
        {{- '\\n' + (tool | tojson) -}}
    {%- endfor -%}
    {{- '\\n</tools>\\n\\nTo call one, answer with its name and arguments as a JSON object ' -}}
    {{- 'in <tool_call></tool_call> tags:\\n' -}}
    {{- '<tool_call>\\n{"name": <function name>, "arguments": <arguments object>}\\n</tool_call><|im_end|>\\n' -}}
{%- endif -%}

{%- for turn in turns -%}
    {%- if turn.role == 'tool' -%}
        {%- if loop.first or loop.previtem.role != 'tool' -%}
            {{- '<|im_start|>user' -}}
        {%- endif -%}
        {{- '\\n<tool_response>\\n' + render(turn.content) + '\\n</tool_response>' -}}
        {%- if loop.last or loop.nextitem.role != 'tool' -%}
            {{- '<|im_end|>\\n' -}}
        {%- endif -%}
    {%- else -%}
        {%- set said = render(turn.content) -%}
        {{- '<|im_start|>' + turn.role + '\\n' + said -}}
        {%- for call in turn.tool_calls or [] -%}
            {%- set function = call.function or call -%}
            {{- '\\n' if said or not loop.first else '' -}}
            {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' -}}
            {{- function.arguments if function.arguments is string else function.arguments | tojson -}}
            {{- '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""  # noqa: E501
