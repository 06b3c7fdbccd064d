"""What a model family tells the engine: which stages there are, which links join them, and what a
request is to each.

A family is a folder under `models/` (or a package of its own) with a function that opens a
checkpoint: `Model`. The registry finds it by the checkpoint's `model_type`. Everything here is
plain data; what needs torch is named as `"module:attribute"` and imported in the processes that run
it. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from stretto.errors import Bug
from stretto.params import Capability, Params, RequestOptions
from stretto.preprocess.text_chunks import Passages

OutputKind = Literal["text", "audio"]


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One stage of a pipeline, as everybody but its own host knows it."""

    name: str
    does: str = ""  # in a few words, for people who look at a timeline
    encodes_media: bool = False  # it is given the features of a prompt's media
    decides: OutputKind | None = None  # its end is the end of the request's text, or of its audio
    first: str = "prompt"  # what its first output is called in a timeline, and the others
    each: str = "token"


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """Payloads go from one stage to another. The stages say which."""

    sender: str
    receiver: str

    @property
    def name(self) -> str:
        return f"{self.sender}>{self.receiver}"


@dataclass(frozen=True, slots=True)
class PipelineSpec:
    """The stages of a family in data-flow order, and the links between them."""

    # "module:attribute" of (names of stages, StageContext) -> stages by name, called in a host: a
    # `FamilyBuild`
    build: str
    stages: tuple[StageSpec, ...]
    links: tuple[LinkSpec, ...]
    paths: Mapping[Capability, tuple[str, ...]]  # which stages a request needs
    # "module:function" of (directory) -> GrammarCompiler, if answers may have to follow a grammar
    grammars: str = ""

    def __post_init__(self) -> None:
        order = {name: i for i, name in enumerate(self.names)}
        if len(order) != len(self.stages) or not order:
            raise Bug(f"stages must have names of their own, got {self.names}")
        for link in self.links:
            if order.get(link.sender, len(order)) >= order.get(link.receiver, -1):
                raise Bug(f"link {link.name} does not go from a stage to a later one")
        for capability, path in self.paths.items():
            if not path or not set(path) <= set(order):
                raise Bug(f"{capability} needs stages {path}, but there are {self.names}")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(s.name for s in self.stages)

    def links_of(self, stages: Sequence[str]) -> list[LinkSpec]:
        """Those that join two of these stages."""
        return [link for link in self.links if link.sender in stages and link.receiver in stages]

    def deciding(self, output: OutputKind) -> str | None:
        return next((s.name for s in self.stages if s.decides == output), None)


@dataclass(frozen=True, slots=True)
class AudioInputSpec:
    """How a model hears: log-mel frames of 10 ms, in windows that its encoder takes one by one."""

    num_bins: int
    window: int  # frames


@dataclass(frozen=True, slots=True)
class Transcription:
    """How a model is asked to write down what it hears."""

    transcribe: str
    transcribe_language: str  # with {language}
    translate: str  # into English
    languages: Mapping[str, str]  # that it hears: their names by code

    def prompt(self, language: str | None, context: str | None, translate: bool = False) -> str:
        """What follows the sound. A language that it does not list is left to the model."""
        if translate:
            words = self.translate
        elif language is not None and language in self.languages:
            words = self.transcribe_language.format(language=self.languages[language])
        else:
            words = self.transcribe
        return f"{words} {context}" if context else words


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model, as its users see it."""

    name: str
    voices: tuple[str, ...]
    default_voice: str
    sample_rate: int
    max_positions: int
    input_modalities: tuple[str, ...] = ("text",)
    output_modalities: tuple[OutputKind, ...] = ("text", "audio")
    audio_input: AudioInputSpec | None = None  # None: sound is taken whole, when it is over
    # other names of its voices
    voice_aliases: Mapping[str, str] = field(default_factory=dict)
    description: str = ""  # what it is and what it can be asked, as the checkpoint says
    example_prompts: tuple[str, ...] = ()  # questions it can answer, as the checkpoint says
    transcription: Transcription | None = None  # None: it does not write down speech
    defaults: Params = field(
        default_factory=Params
    )  # what the checkpoint says of answers where a request says nothing
    languages: tuple[str, ...] = ()  # that a text to be read can be said to be in
    instructions: bool = False  # how a text is to be read can be said in words
    cloning: bool = False  # voices can be made of clips
    live_text: bool = False  # a passage can be read while it is written
    passages: Passages | None = None  # how long texts are cut; None: not at all
    stages: Mapping[str, str] = field(
        default_factory=dict
    )  # and what each does, in words; told by the engine
    weights: str = ""  # how they are stored where they come quantised
    random_weights: bool = False  # nobody trained it: what it says is noise; told by the engine

    @property
    def reads_while_written(self) -> bool:
        """Whether a text is read aloud before all of it is there: as it comes, or passage by
        passage."""
        return self.live_text or self.passages is not None


@dataclass(frozen=True, slots=True)
class MediaTokens:
    """The ids that stand for media in a prompt."""

    audio: frozenset[int] = frozenset()
    image: frozenset[int] = frozenset()


class Model(Protocol):
    """One checkpoint, opened by its family. No weights yet: those are for the hosts."""

    pipeline: PipelineSpec
    info: ModelInfo
    vocab_size: int
    media_tokens: MediaTokens
    builder: str  # "module:function" of (directory) -> a prompt builder, see `preprocess/build.py`

    def check_voice(self, voice: str) -> None:
        """Raises `Invalid` for a voice that it does not have."""
        ...

    def stage_params(self, options: RequestOptions) -> dict[str, msgspec.Struct]:
        """The parameters of each stage on the request's path, in types that the stages know."""
        ...


class Family(Protocol):
    """What the registry finds: opens a checkpoint directory."""

    def __call__(self, directory: Path) -> Model: ...
