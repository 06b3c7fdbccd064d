"""One command per step: `python -m recipes.nano STEP --work DIR`. README.md says in which order."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from recipes.nano.report import say


def _corpus(a: argparse.Namespace) -> None:
    from recipes.nano import corpus, festival

    if a.festival is not None:
        festival.unpack(a.festival)
    if a.packed is not None:
        corpus.unpack(a.packed, a.audio)
    corpus.speak_all(a.audio, a.workers, a.seconds, a.chunks, a.first)


def _pack(a: argparse.Namespace) -> None:
    from recipes.nano import corpus, festival

    festival.pack(a.out / "festival.tar.xz")
    corpus.pack(a.audio, a.out / "opus", a.hours)


def _tokenizer(a: argparse.Namespace) -> None:
    from recipes.nano import tokens

    tokens.train(a.work)


def _codec(a: argparse.Namespace) -> None:
    from recipes.nano import codec

    settings = codec.Settings(
        a.seconds,
        a.audio,
        a.first_hours,
        batch=a.batch,
        compile=not a.no_compile,
        device=a.device,
        steps=a.steps,
        eager=a.eager,
    )
    codec.train(a.work, settings)


def _trim(a: argparse.Namespace) -> None:
    from recipes.nano import codes, thinker

    codes.trim(a.work, a.out, a.chunks)
    thinker.save_embedding(a.work, a.out)


def _thinker(a: argparse.Namespace) -> None:
    from recipes.nano import thinker

    thinker.train(
        a.work, thinker.Settings(a.seconds, a.batch, a.rows, a.quiz, a.device, a.steps, a.eager)
    )


def _talker(a: argparse.Namespace) -> None:
    from recipes.nano import talker

    settings = talker.Settings(
        a.seconds,
        a.batch,
        a.sampled,
        a.epochs,
        a.hours,
        a.device,
        a.steps,
        rate=a.rate,
        go_on=a.go_on,
        audio=a.audio,
        eager=a.eager,
        domain=a.domain,
    )
    talker.train(a.work, settings)


def _voices(a: argparse.Namespace) -> None:
    from recipes.nano import voices

    if a.pack is not None:
        voices.pack(a.pack)
        return
    if a.packed is not None:
        voices.unpack(a.packed)
    voices.speak_all(a.out, a.workers, a.seconds, a.chunks, a.remarks)


def _listen(a: argparse.Namespace) -> None:
    import torch.distributed as dist

    from recipes.nano import listen

    if "WORLD_SIZE" in os.environ:  # `torchrun`
        dist.init_process_group("gloo")
    settings = listen.Settings(a.seconds, a.voices, a.clips, a.batch, rate=a.rate, first=a.first,
        rows=a.rows,
                               text_batch=a.text_batch, go_on=a.go_on, transcribe=a.transcribe,
                               warm_up=a.warm_up, every=a.every, quiz=a.quiz, device=a.device,
                               bfloat16=a.bfloat16 or None, steps=a.steps, eager=a.eager)  # fmt: skip
    listen.train(a.work, settings)


def _encode(a: argparse.Namespace) -> None:
    from recipes.nano import transcribe

    transcribe.encode_all(a.work, a.voices, a.takes)


def _transcribe(a: argparse.Namespace) -> None:
    import torch.distributed as dist

    from recipes.nano import transcribe

    if "WORLD_SIZE" in os.environ:  # `torchrun`
        dist.init_process_group("gloo")
    settings = transcribe.Settings(
        a.seconds,
        a.voices,
        batch=a.batch,
        text_rows=a.text_rows,
        rate=a.rate,
        hold=a.hold,
        noise=a.noise,
        mix=a.mix,
        first=a.first,
        every=a.every,
        quiz=a.quiz,
        rows=a.rows,
        steps=a.steps,
    )
    transcribe.train(a.work, settings)


def _export(a: argparse.Namespace) -> None:
    from recipes.nano import export

    if a.renew:
        export.renew(a.work, a.out)
    else:
        export.write(a.work, a.out, a.last)


def _apart(a: argparse.Namespace) -> None:
    from recipes.nano import export

    export.take_apart(a.checkpoint, a.work)


def _rows(a: argparse.Namespace) -> None:
    from recipes.nano import thinker, tokens

    thinker.prepared(a.work, tokens.Text.open(a.work), a.rows)


def _score(a: argparse.Namespace) -> None:
    from recipes.nano import score, sphinx

    score.run(
        a.work, a.checkpoint, a.recogniser, a.wav, sphinx.Sphinx() if a.second_opinion else None
    )


def _quantised(a: argparse.Namespace) -> None:
    from recipes.nano import quantised

    quantised.run(a.checkpoint, a.recogniser, a.out)


def _aloud(a: argparse.Namespace) -> None:
    from recipes.nano import aloud

    aloud.run(a.work, a.checkpoint, a.recogniser, a.wav)


def _heard(a: argparse.Namespace) -> None:
    from recipes.nano import heard

    heard.run(a.work, a.checkpoint, a.voices, a.count)


def _card(a: argparse.Namespace) -> None:
    from recipes.nano import card

    card.write(a.work, a.wav, a.out)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m recipes.nano", description=__doc__)
    parser.add_argument(
        "--work", type=Path, default=Path("work/nano"), help="where the steps keep their results"
    )
    steps = parser.add_subparsers(required=True, metavar="STEP")

    def step(name: str, run: object, help_: str) -> argparse.ArgumentParser:
        p = steps.add_parser(name, help=help_)
        p.set_defaults(run=run, name=name)
        return p

    p = step("corpus", _corpus, "speech of the teacher")
    p.add_argument("--audio", type=Path, required=True)
    p.add_argument("--workers", type=int, default=1)
    p.add_argument("--seconds", type=float, default=1e9)
    p.add_argument("--chunks", type=int)
    p.add_argument("--first", type=int, default=0, help="the chunk to begin with")
    p.add_argument("--festival", type=Path, help="a packed festival, where none is installed")
    p.add_argument("--packed", type=Path, help="a folder of speech made earlier by `pack`")
    p = step("pack", _pack, "festival and some speech, for a machine without network")
    p.add_argument("--audio", type=Path, required=True)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--hours", type=float, default=2.0)
    step("tokenizer", _tokenizer, "byte-level BPE on the recipe's text")
    for name, run, seconds, batch, help_ in (
        ("codec", _codec, 400, 8, "encoder, quantizer, code2wav; then all codes"),
        ("thinker", _thinker, 120, 48, "text model of the grammar"),
        ("talker", _talker, 420, 32, "talker and code predictor"),
    ):
        p = step(name, run, help_)
        p.add_argument("--seconds", type=float, default=seconds)
        p.add_argument("--batch", type=int, default=batch)
        p.add_argument("--device")
        p.add_argument("--steps", type=int, help="stop after so many steps instead")
        p.add_argument("--eager", action="store_true", help="no CUDA graph")
        if name == "codec":
            p.add_argument("--audio", type=Path, required=True)
            p.add_argument(
                "--first-hours",
                type=float,
                default=1.0,
                help="of speech that must be there to begin",
            )
            p.add_argument("--no-compile", action="store_true")
        elif name == "thinker":
            p.add_argument("--rows", type=int, default=24000)
            p.add_argument(
                "--quiz", type=int, default=320, help="held-out questions to check it with"
            )
        else:
            p.add_argument("--sampled", type=int, default=2048)
            p.add_argument("--epochs", type=int, default=4)
            p.add_argument("--hours", type=float)
            p.add_argument("--rate", type=float, default=1e-3)
            p.add_argument("--audio", type=Path, help="where the teacher speaks on meanwhile")
            p.add_argument(
                "--domain", type=int, default=2, help="how often the domain's answers come"
            )
            p.add_argument(
                "--go-on", action="store_true", help="from the weights of an earlier run"
            )
    p = step("voices", _voices, "spoken questions in many voices, two of them held out")
    p.add_argument("--out", type=Path, default=Path("voices"), help="folder of the speech")
    p.add_argument("--workers", type=int, default=1)
    p.add_argument("--seconds", type=float, default=1e9)
    p.add_argument("--chunks", type=int, default=120, help="of 200 questions")
    p.add_argument("--remarks", type=int, default=40, help="chunks of what is only written down")
    p.add_argument("--pack", type=Path, help="write the synthesizers as this archive instead")
    p.add_argument("--packed", type=Path, help="such an archive, where they are not installed")
    p = step("encode", _encode, "spoken questions as rows of an encoder that stays as it is")
    p.add_argument("--voices", type=Path, required=True, help="folder of speech that `voices` made")
    p.add_argument("--takes", type=int, default=1, help="versions of each clip")
    p = step("listen", _listen, "audio encoder; the thinker learns along")
    p.add_argument(
        "--voices", type=Path, required=True, help="folder of speech that `voices` makes"
    )
    p.add_argument("--seconds", type=float, default=300)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--rate", type=float, default=1e-3)
    p.add_argument("--text-batch", type=int, default=16, help="rows of typed questions a step")
    p.add_argument("--transcribe", type=float, default=0.35, help="share of transcriptions")
    p.add_argument("--warm-up", type=int, default=300, help="steps")
    p.add_argument("--every", type=float, default=25, help="seconds between reports")
    p.add_argument("--quiz", type=int, default=200, help="questions in each held-out voice")
    p.add_argument("--bfloat16", action="store_true", help="on a CPU that multiplies bfloat16")
    p.add_argument("--clips", type=int, default=24000)
    p.add_argument("--first", type=int, default=2000, help="questions that must be there to begin")
    p.add_argument("--go-on", action="store_true", help="from the weights of an earlier run")
    p.add_argument("--rows", type=int, default=24000)
    p.add_argument("--device")
    p.add_argument("--steps", type=int, help="stop after so many steps instead")
    p.add_argument("--eager", action="store_true", help="no CUDA graph")
    p = step("transcribe", _transcribe, "transcription, taught to a finished checkpoint on a CPU")
    p.add_argument("--voices", type=Path, required=True, help="folder of speech that `voices` made")
    p.add_argument("--seconds", type=float, default=3600)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--text-rows", type=int, default=1, help="rows of typed questions a step")
    p.add_argument("--rate", type=float, default=6e-4)
    p.add_argument("--hold", type=float, default=20.0, help="weight of the earlier answers")
    p.add_argument("--noise", type=float, default=0.4, help="in the encoder's rows, at most")
    p.add_argument("--mix", type=float, default=0.8, help="of other clips in them, at most")
    p.add_argument("--first", type=int, default=2000, help="clips that must be there to begin")
    p.add_argument("--every", type=float, default=420, help="seconds between reports")
    p.add_argument("--quiz", type=int, default=60, help="questions in each held-out voice")
    p.add_argument("--rows", type=int, default=24000)
    p.add_argument("--steps", type=int, help="stop after so many steps instead")
    p = step(
        "trim",
        _trim,
        "what the talker's training needs, the codes of the first chunks only, to be carried",
    )
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--chunks", type=int, required=True)
    p = step("export", _export, "the checkpoint in the released layout")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument(
        "--last", action="store_true", help="the talker at the end of its training, not at its best"
    )
    p.add_argument("--renew", action="store_true", help="only what changed, into earlier files")
    p = step("apart", _apart, "a checkpoint back into the parts that training goes on from")
    p.add_argument("--checkpoint", type=Path, required=True)
    p = step("rows", _rows, "the thinker's training text, ahead of its training")
    p.add_argument("--rows", type=int, default=24000)
    p = step(
        "score", _score, "what the finished checkpoint says, heard by an independent recogniser"
    )
    p.add_argument("--checkpoint", type=Path, required=True)
    p.add_argument("--wav", type=Path, help="where to write the speech as WAV files")
    p.add_argument("--recogniser", type=Path, required=True, help="folder of Moonshine tiny")
    p.add_argument("--second-opinion", action="store_true", help="by pocketsphinx too")
    p = step("quantised", _quantised, "what `stretto quantize` does to the checkpoint's answers")
    p.add_argument("--checkpoint", type=Path, required=True)
    p.add_argument("--recogniser", type=Path, required=True, help="folder of Moonshine tiny")
    p.add_argument("--out", type=Path, required=True, help="a JSON file; it goes on with one")
    p = step("aloud", _aloud, "texts of one to forty sentences, read aloud and heard")
    p.add_argument("--checkpoint", type=Path, required=True)
    p.add_argument("--wav", type=Path, help="where to write the speech as WAV files")
    p.add_argument("--recogniser", type=Path, required=True, help="folder of Moonshine tiny")
    p = step(
        "heard",
        _heard,
        "questions to the finished checkpoint, typed and in voices that it never heard",
    )
    p.add_argument("--checkpoint", type=Path, required=True)
    p.add_argument("--voices", type=Path, required=True, help="folder of speech that `voices` made")
    p.add_argument("--count", type=int, default=200, help="questions of each kind")
    p = step("card", _card, "the model card, with pictures and sounds")
    p.add_argument(
        "--wav", type=Path, required=True, help="folder of speech that `score --wav` wrote"
    )
    p.add_argument("--out", type=Path, required=True, help="the checkpoint's folder")
    a = parser.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    say(a.name, "begins")
    a.run(a)
    say(a.name, "done")


if __name__ == "__main__":
    main()
