"""The prompt worker: a process beside the server that decodes what clients send and builds prompts
from it.

Started and spoken to by `pool.py` alone. It loads the checkpoint's tokenizer once. Short texts it
does at once, in about a millisecond; everything else in a child that it forks, one for each job
(`job_process.py`). Imports no torch."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import signal
import socket
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from stretto._imports import load
from stretto._process import die_with_parent
from stretto.errors import Bug, Invalid, StageDead
from stretto.observe import logs
from stretto.preprocess import build as work
from stretto.preprocess.build import Builder
from stretto.preprocess.grammars import GrammarCompiler, check_apart
from stretto.preprocess.packed_prompt import lay_out
from stretto.preprocess.pool.job_process import Children, WorkerLimits
from stretto.preprocess.pool.jobs import (
    MAX_DATAGRAM,
    MAX_FDS,
    Build,
    Built,
    Check,
    Checked,
    Continue,
    Cut,
    Divide,
    Job,
    JobResult,
    NeedsProcess,
    Outline,
    Read,
    RemoteFiles,
    Stop,
    Work,
    WorkerReady,
    decode_prompt,
    decode_to_worker,
    encode,
    failed,
    send_answer,
)
from stretto.preprocess.pool.memfile import MemFile
from stretto.preprocess.pool.split import do_cut, do_divide, do_outline
from stretto.preprocess.prepared import with_features
from stretto.preprocess.prompt import Prompt
from stretto.preprocess.remote_media import NONE

Packed = tuple[Built, MemFile]
"""A prompt, and the memory file that holds it, which the caller closes."""


@dataclass(slots=True, eq=False)
class Worker:
    control: socket.socket
    builder: Builder
    children: Children

    def serve(self) -> None:
        """Take jobs until the server goes."""
        self.control.send(encode(WorkerReady()))
        self.children.prepare()
        while True:
            for ended in self.children.wait():
                if ended is not None:
                    self.children.reap(ended)
                elif not self._take():
                    return

    def _take(self) -> bool:
        data, fds, flags, _ = socket.recv_fds(self.control, MAX_DATAGRAM, MAX_FDS)
        if not data:
            return False
        if flags & socket.MSG_CTRUNC:
            sys.exit("the prompt worker has as many open files as it may have")
        message = decode_to_worker(data)
        if isinstance(message, Stop):
            self.children.stop(message.number)
            return True
        # a child has descriptors of its own of what it was sent
        with contextlib.ExitStack() as owned:
            answer = owned.enter_context(socket.socket(fileno=fds[0]))
            files = [owned.enter_context(MemFile.trusted(f)) for f in fds[1:]]
            self._run(message, answer, files)
        return True

    def _run(self, job: Job, answer: socket.socket, files: list[MemFile]) -> None:
        """Start a child for it; or do it now, which only short texts are."""
        try:
            if job.apart:
                self.children.start(job, answer, files)
                return
            result = do(self.builder, job.work, files, only_text=True)
        except Exception as e:  # noqa: BLE001  one request must not end the worker, and with it the prompts of others
            result = failed(e), None
        send_answer(answer, *result)


def do_apart(
    builder: Builder, compiler: GrammarCompiler | None, job: Job, files: list[MemFile]
) -> JobResult:
    """The caller closes the file."""
    if isinstance(job.work, Check):
        return check(compiler, job.work, files[0])
    return do(builder, job.work, files, only_text=False)


def check(compiler: GrammarCompiler | None, job: Check, grammar: MemFile) -> JobResult:
    if compiler is None:
        raise Bug("this model follows no grammar")
    check_apart(compiler, _text(grammar.view()), job.cpu_s, job.memory_mb)
    return Checked(), None


def do(builder: Builder, job: Work, files: list[MemFile], *, only_text: bool) -> JobResult:
    """The caller closes the file."""
    data = files[0].view()
    match job:
        case Build():
            recalled: dict[str, str] = {}
            if job.recalls:
                recalled = msgspec.json.decode(files[1].view(), type=dict[str, str])
            remote = NONE
            if job.remote is not None:
                remote = RemoteFiles(files[-1], job.remote, job.not_fetched).media()
            instructions = data[slice(*job.instructions)] if job.instructions is not None else None
            tools = data[slice(*job.tools)] if job.tools is not None else None
            messages = work.read_messages(
                data[slice(*job.messages)], job.form, instructions, recalled
            )
            if not (only_text and work.has_media(messages)):
                more = recalled, job.audio_in_video, job.variables, remote
                return pack(work.build_conversation(builder, messages, tools, *more))
        case Continue():
            return _continue(builder, job, data)
        case Read():
            style = _text(data[slice(*job.instructions)]) if job.instructions is not None else ""
            return pack(*work.read_aloud(builder, _text(data[slice(*job.text)]), style))
        case Divide():
            return do_divide(_text(data), job.max_chars, job.normalise)
        case Outline():
            return do_outline(data, job.long, job.max_short_bytes)
        case Cut() if not only_text:
            return do_cut(data, job.seconds)
    return NeedsProcess(), None


def _continue(builder: Builder, job: Continue, data: memoryview) -> Packed:
    media = decode_prompt(data[slice(*job.media)]).media()
    messages = with_features(work.decode(data[slice(*job.messages)], "messages"), media)
    tools = work.decode(data[slice(*job.tools)], "tools") if job.tools is not None else None
    return pack(builder.build(messages, tools))


def warm(builder: Builder, compiler: GrammarCompiler | None) -> None:
    """Do all kinds of work once, so that neither this process nor its children import and compute
    anything for the first time in a request."""
    work.warm(builder)
    if compiler is not None:
        compiler.check('start: %json {"type": "object"}')


def pack(prompt: Prompt, tts_ids: tuple[int, ...] | None = None) -> Packed:
    """The caller closes the file."""
    packed, arrays = lay_out(prompt, tts_ids)
    header = encode(packed)
    gap = b"\0" * (-len(header) % 4)  # floats must be aligned
    file = MemFile.sealed(header, gap, *(np.ravel(a).view(np.uint8).data for a in arrays))
    return Built(len(header), len(header) + len(gap)), file


def try_out(builder: Builder) -> None:
    """Whoever can build this prompt can build others."""
    try:
        _, file = pack(*work.read_aloud(builder, "Hello"))
        file.close()
    except OSError as e:
        raise StageDead(f"prompts cannot be put into memory files ({e.strerror})") from None


def _text(data: memoryview) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as e:
        raise Invalid(f"the text is not UTF-8 ({e.reason})", "input") from None


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("model", type=Path)
    p.add_argument(
        "--builder", required=True, help="module:function that opens the model's prompt builder"
    )
    p.add_argument(
        "--grammars", default="", help="module:function that opens what compiles its grammars"
    )
    p.add_argument("--fd", type=int, required=True)
    p.add_argument("--cpu-s", type=int, required=True)
    p.add_argument("--memory-mb", type=int, required=True)
    args = p.parse_args()
    die_with_parent()
    # a Ctrl-C in the terminal is the server's to handle
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logs.set_up(os.environ.get(logs.FORMAT, "text"), os.environ.get("STRETTO_LOG", "WARNING"))
    control = socket.socket(fileno=args.fd)
    try:
        builder: Builder = load(args.builder)(args.model)
        compiler: GrammarCompiler | None = None
        if args.grammars:
            compiler = load(args.grammars)(args.model)
        try_out(builder)
    except Exception as e:  # noqa: BLE001  else nobody would hear why, and another would be started in vain
        control.send(encode(failed(e)))
        sys.exit(1)
    with contextlib.suppress(ImportError):
        import av  # noqa: F401  # once, here, rather than in every child that meets a video
    warm(builder, compiler)
    gc.collect()
    # what is shared with children stays shared: a collection would write to all of it
    gc.freeze()
    limits = WorkerLimits(args.cpu_s, args.memory_mb)
    children = Children(
        control, limits, partial(do_apart, builder, compiler), partial(warm, builder, compiler)
    )
    try:
        Worker(control, builder, children).serve()
    finally:
        children.close()


if __name__ == "__main__":
    main()
