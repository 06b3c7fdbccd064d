"""API keys from flags and from a file that changes while the server runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.datastructures import Headers

from stretto.errors import Invalid
from stretto.server.keys import NOBODY, Keys
from stretto.server.openai.error_body import Refused
from tests.server.conftest import serve
from tests.server.scripted_engine import ScriptedEngine


def bearer(key: str) -> Headers:
    return Headers({"authorization": f"Bearer {key}"})


def test_keys_are_exchanged_while_the_server_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, now = tmp_path / "keys", [0.0]
    file.write_text("# ours\nold-key\nsteady\n")
    keys = Keys.of(("fixed",), str(file), lambda: now[0])
    steady = keys.owner(bearer("steady"))
    assert keys.owner(bearer("fixed")) == "key1"
    assert keys.owner(bearer("old-key")) != steady

    file.write_text("steady\nnew-key, though\n".replace(", though", ""))
    assert keys.owner(bearer("old-key"))  # it is looked at once a second
    now[0] += 2
    with pytest.raises(Refused, match="not valid"):
        keys.owner(bearer("old-key"))
    assert keys.owner(bearer("new-key"))
    assert keys.owner(bearer("steady")) == steady  # the same, in another line

    file.write_text(
        ""
    )  # half written, or a mistake: nobody gets in by it, and nobody is locked out
    now[0] += 2
    assert keys.owner(bearer("new-key"))
    with pytest.raises(Refused):
        keys.owner(Headers({}))
    assert "API keys stay as they were" in caplog.text
    with pytest.raises(Invalid, match="has no keys"):
        Keys.of((), str(file))
    with pytest.raises(Invalid, match="cannot be read"):
        Keys.of((), str(tmp_path / "none"))


def test_a_server_with_a_file_of_keys_is_closed(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret\n")
    with serve(ScriptedEngine(), api_key_file=str(tmp_path / "keys")) as running:
        assert running.ask("/v1/models").status == 401
        assert running.ask("/v1/models", headers={"Authorization": "Bearer secret"}).status == 200


def test_keys() -> None:
    assert Keys.of(()).owner(Headers({})) == NOBODY
    keys = Keys.of(("a", "b"))
    assert keys.owner(Headers({"Authorization": "bearer b"})) == "key2"
    with pytest.raises(Refused):
        keys.owner(Headers({"Authorization": "Bearer ab"}))
