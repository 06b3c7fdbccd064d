"""Pictures of the page for people to look at, in the test's temporary folder or where
STRETTO_PICTURES says."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.server.scripted_server import Script, ScriptedServer
from tests.server.web.tab import READY, SOUND, Browser


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(
    ("name", "width", "height"), [("desktop", 1280, 800), ("phone", 390, 844), ("small", 320, 568)]
)
def test_picture(
    browser: Browser,
    server: ScriptedServer,
    tmp_path: Path,
    name: str,
    width: int,
    height: int,
    dark: bool,
) -> None:
    server.script = Script(packets=(1, 2, 4, 8), hold=("packet 2",))
    folder = Path(os.environ.get("STRETTO_PICTURES", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name}-{'dark' if dark else 'light'}"
    tab = browser.open(server.url, width, height, dark, before=SOUND)
    tab.until(READY)
    tab.picture(folder / f"{stem}-empty.png")
    tab.ask("What is a stretto?")
    tab.until("strettoStats().turns[0]?.packets === 2")
    tab.play(16)
    tab.picture(folder / f"{stem}-answering.png")
    server.go_on()
    tab.until("strettoStats().turns[0].outcome === 'done'")
    tab.press("Escape")
    tab.picture(folder / f"{stem}-answered.png")
    tab.close()

    light = {}
    for moment in ("empty", "answering", "answered"):
        with Image.open(folder / f"{stem}-{moment}.png") as picture:
            light[moment] = np.asarray(picture.convert("L")).astype(float)
    assert all((picture.mean() < 90) == dark for picture in light.values())
    assert np.abs(light["answered"] - light["empty"]).mean() > 1, "the answer is to be seen"
