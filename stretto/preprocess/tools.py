"""The functions a client declares, as msgspec structs, and their check.

The prompt builder reads tools with this; the server publishes the same structs in its
description."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from stretto._validation import wrong_field
from stretto.errors import Invalid


class Function(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Function


Tools = Annotated[list[Tool], Meta(max_length=256)]


def check_tools(tools: object | None) -> list[dict[str, Any]]:
    """The tools as plain data for the template, without fields that say nothing."""
    try:
        return [msgspec.to_builtins(t) for t in msgspec.convert(tools, Tools | None) or ()]
    except msgspec.ValidationError as e:
        raise wrong_field(e, "tools") from None
    except TypeError as e:  # from a local caller, who can pass what JSON has no words for
        raise Invalid(f"tools: {e}", "tools") from None
