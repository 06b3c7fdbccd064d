"""A body of multipart/form-data, cut into its fields. For routes that take files; a plain function of bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from stretto.errors import Invalid

MAX_PARTS = 32
MAX_HEAD = 4096  # bytes of a part's headers
_BOUNDARY = re.compile(r"boundary=(?:\"([^\"\r\n]{1,70})\"|([^;\s\"]{1,70}))", re.I)
_NAME = re.compile(rb"[;\s]name=\"([^\"\r\n]{1,64})\"")
_FILE = re.compile(rb"[;\s]filename(?:=|\*=)")


@dataclass(frozen=True, slots=True)
class Form:
    fields: dict[str, str]
    files: dict[str, memoryview]  # by the field's name; what a client calls a file is of no interest


def boundary(content_type: str) -> bytes:
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise Invalid("multipart/form-data needs a boundary in its Content-Type")
    return (found[1] or found[2]).encode("ascii", "replace")


def parse_form(data: bytes, mark: bytes) -> Form:
    """Fields and files. What does not fit the format is `Invalid`."""
    form, line = Form({}, {}), b"--" + mark
    at = data.find(line)
    if at < 0 or (at and data[at - 2 : at] != b"\r\n"):
        raise Invalid("the body does not begin as multipart/form-data")
    for _ in range(MAX_PARTS):
        at += len(line)
        if data[at : at + 2] == b"--":
            return form
        head_end = data.find(b"\r\n\r\n", at, at + MAX_HEAD)
        end = data.find(b"\r\n" + line, head_end + 2) if head_end >= 0 else -1
        if data[at : at + 2] != b"\r\n" or end < 0:
            raise Invalid("the body is not whole multipart/form-data")
        _take(form, data[at:head_end], memoryview(data)[head_end + 4 : max(end, head_end + 4)])
        at = end + 2
    raise Invalid(f"a form has at most {MAX_PARTS} fields")


def _take(form: Form, head: bytes, value: memoryview) -> None:
    found = _NAME.search(head)
    if found is None:
        raise Invalid("a field of the form has no name")
    name = found[1].decode("utf-8", "replace")
    if name in form.fields or name in form.files:
        raise Invalid(f"{name} is there twice", name)
    if _FILE.search(head):
        form.files[name] = value
        return
    try:
        form.fields[name] = str(value, "utf-8")
    except UnicodeDecodeError:
        raise Invalid(f"{name} is not UTF-8", name) from None
