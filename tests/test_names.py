"""A class name means one class, wherever in the package it is read."""

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent / "stretto"

# fmt: off
SHARED = {
    "Attention", "AudioDelta", "AudioDone", "AudioEncoder",
    "Block", "Book", "Choice", "Codebook", "CodecIds", "Conv", "Conversation", "Function",
    "Item", "Layer", "Mlp", "Norm", "Part", "Progress", "Quantizer",
    "Scale", "Source", "Talker", "TalkerAdapter",
    "TalkerConfig", "TalkerInput", "TalkerParams", "TalkerStage", "TextDelta", "TokenIds",
    "TranscriptDelta", "TranscriptDone", "Transcription", "VoiceId",
}
# fmt: on
"""Names of more than one class. The list only gets shorter."""


def class_names() -> Counter[str]:
    return Counter(
        node.name
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )


def test_no_class_has_the_name_of_another_but_those_listed() -> None:
    shared = {name for name, count in class_names().items() if count > 1}
    assert not shared - SHARED, "a name that another class has"
    assert not SHARED - shared, "names that are one class's now: take them off the list"
