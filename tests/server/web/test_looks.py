"""How the page looks and is reached, at every width, in light and dark."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stretto.engine.events import TimelineSpan
from stretto.errors import Invalid
from tests.server.scripted_server import Script, ScriptedServer
from tests.server.web.line import LISTEN, PAUSE_S, Line, steady
from tests.server.web.tab import DONE, READY, SOUND, Browser, Tab, shows


@pytest.fixture
def tab(browser: Browser, server: ScriptedServer) -> Iterator[Tab]:
    tab = browser.open(server.url, before=SOUND)
    tab.until(READY)
    yield tab
    tab.close()


@pytest.mark.parametrize(
    ("width", "height", "dark"), [(1280, 800, False), (390, 844, True), (320, 568, False)]
)
def test_fits_and_targets_are_large_enough(
    browser: Browser, server: ScriptedServer, width: int, height: int, dark: bool
) -> None:
    tab = browser.open(server.url, width, height, dark)
    tab.until(READY)
    assert tab.eval("document.documentElement.scrollWidth") <= width
    small = tab.eval(
        "[...document.querySelectorAll('button, select, label.attach, summary')].filter((e) => "
        "e.checkVisibility())"
        ".filter((e) => e.getBoundingClientRect().height < 44).map((e) => e.id || "
        "e.textContent.trim())"
    )
    if width < 600:
        assert small == []
    tab.click("theme")
    paper = tab.eval("getComputedStyle(document.body).backgroundColor")
    tab.click("theme")
    assert tab.eval("getComputedStyle(document.body).backgroundColor") != paper
    assert tab.complained() == []
    tab.close()


@pytest.mark.parametrize("dark", [False, True])
def test_words_stand_out_from_their_ground(
    browser: Browser, server: ScriptedServer, dark: bool
) -> None:
    """WCAG AA: 4.5 to 1 for each colour that words are written in, on each ground they are written
    on."""
    tab = browser.open(server.url, dark=dark)

    def luminance(name: str) -> float:
        tab.eval(f"document.body.style.backgroundColor = 'var(--{name})'")
        channels = tab.eval(
            "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
        )
        red, green, blue = (c / 255 for c in channels[:3])
        linear = [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    inks = [
        "ink",
        "muted",
        "alarm",
        *(f"stage-{i}" for i in range(6)),
        "packets",
        "playback",
        "link",
    ]
    grounds = {
        "surface": inks,
        "paper": ["ink", "muted", "wait-ink"],
        "accent": ["on-accent"],
        "alarm-soft": ["ink", "muted"],
    }
    for ground, words in grounds.items():
        for ink in words:
            light, shade = sorted((luminance(ink), luminance(ground)), reverse=True)
            assert (light + 0.05) / (shade + 0.05) >= 4.5, (ink, ground)
    tab.close()


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844), (320, 568)])
def test_settings_can_be_closed_without_scrolling(
    browser: Browser, server: ScriptedServer, width: int, height: int
) -> None:
    tab = browser.open(server.url, width, height)
    tab.until(READY)
    tab.click("open-settings")
    within = tab.eval(
        "(([dialog, done]) => done.bottom <= dialog.bottom && done.top >= dialog.top)"
        "(['#settings', '#settings .settings-actions .button']"
        ".map((name) => document.querySelector(name).getBoundingClientRect()))"
    )
    assert within
    tab.click("close-settings")
    tab.close()


def test_everything_can_be_reached_by_keyboard(tab: Tab) -> None:
    tab.eval("document.querySelector('#score').open = true")
    tab.eval("document.body.focus()")
    reached = []
    for _ in range(24):
        tab.press("Tab")
        got = tab.eval(
            "[document.activeElement.id || document.activeElement.className, "
            "document.activeElement.matches(':focus-visible')]"
        )
        assert got[1] or got[0] == "", got
        reached.append(got[0])
    for control in (
        "new",
        "open-settings",
        "theme",
        "question",
        "file",
        "voice",
        "mic",
        "send",
        "zoom-making",
    ):
        assert control in reached, control
    names = tab.eval(
        "[...document.querySelectorAll('button, select, textarea, input')]"
        ".filter((e) => !(e.textContent.trim() || e.ariaLabel || e.labels?.length || "
        "e.title)).map((e) => e.outerHTML)"
    )
    assert names == []


def test_less_motion_when_asked(tab: Tab) -> None:
    tab.calm()
    assert tab.eval("getComputedStyle(document.querySelector('.dot')).animationName") == "none"
    tab.ask("Calmly.")
    tab.until(DONE)


# --- nothing sticks out

LONG = "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft" * 2
WIDTHS = ((320, 568), (390, 844), (768, 1024), (1280, 800))

# Wide letters by family, where it is installed, and by spacing (what WCAG 1.4.12 asks a page to
# bear) anywhere.
FONTS = {
    "own": "",
    "dejavu": "* { font-family: 'DejaVu Sans', Verdana, sans-serif !important; }",
    "monospace": "* { font-family: 'DejaVu Sans Mono', monospace !important; }",
    "spaced": "* { letter-spacing: 0.12em !important; word-spacing: 0.16em !important; }",
}

# What is to be seen and reaches over the window's edge, or whose words reach out of their own box
# (cut off with an ellipsis, they do not).
OUTSIDE = """((width) => [...document.querySelectorAll("body *")]
  .filter((e) => e.checkVisibility() && !e.closest(".hidden, .skip") && !e.ownerSVGElement)
  .filter((e) => {
    const box = e.getBoundingClientRect();
    const out = box.width && (box.right > width + 0.5 || box.left < -0.5);
    const words = [...e.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
    const { display, textOverflow } = getComputedStyle(e);
    const spilt = words && display !== "inline" && textOverflow !== "ellipsis" && e.scrollWidth > e.clientWidth + 1;
    return out || spilt;
  })
  .map((e) => `${e.localName}#${e.id}.${e.className}: ${e.textContent.trim().slice(0, 30)}`))"""

# What a slow machine would show in the large figures.
WIDEST = """document.querySelectorAll(".big dd:not(.blank)").forEach((e) => { e.textContent = "888 ms"; })"""

# Words and controls of one line that cover one another.
COVERED = """[".top", ".saying", ".row", ".small", ".big", ".staff-foot", ".score > summary"].flatMap((line) => {
  const parts = [...document.querySelectorAll(`${line} *`)].filter((e) => e.checkVisibility() && !e.closest(".hidden"));
  const boxes = parts.flatMap((e) => {
    if (e.matches("button, select, label.attach")) return [[e, e.getBoundingClientRect()]];
    const words = [...e.childNodes].filter((n) => n.nodeType === Node.TEXT_NODE && n.data.trim());
    return words.map((node) => {
      const range = document.createRange();
      range.selectNodeContents(node);
      return [e, range.getBoundingClientRect()];
    });
  });
  const meet = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1;
  return boxes.flatMap(([e, a], i) => boxes.slice(i + 1)
    .filter(([other, b]) => !e.contains(other) && meet(a, b))
    .map(([other]) => `${line}: ${e.id || e.textContent} and ${other.id || other.textContent}`));
})"""


def answered(tab: Tab, server: ScriptedServer) -> None:
    server.script = Script(text=f"A word: {LONG}. " + server.script.text)
    tab.ask(f"What is a {LONG}?")
    tab.until(DONE)
    tab.play(8)
    tab.until("strettoStats().lanes.length === 7")


def failed(tab: Tab, server: ScriptedServer) -> None:
    server.script = Script(refuse=(500, {}, f"the stage {LONG} died"))
    tab.ask("Will it hold?")
    tab.until(shows("died"))


def busy(tab: Tab, server: ScriptedServer) -> None:
    server.script = Script(refuse=(429, {"retry-after": "3600"}, f"{LONG} streams are running"))
    tab.ask("Please?")
    tab.until(shows("Trying again in 3600 s."))


def loading(tab: Tab, server: ScriptedServer) -> None:
    server.script.health = {
        "status": "loading",
        "stages": {"code_predictor": "loading 43 %", LONG: LONG},
    }
    tab.eval("dispatchEvent(new Event('online'))")  # it looks at once
    tab.until(shows("The model is loading."))


def locked(tab: Tab, server: ScriptedServer) -> None:
    tab.eval("document.querySelector('#open-settings').click()")
    server.lock("sk-secret")
    tab.write("key", "sk-wrong")
    tab.press("Escape")
    tab.until(shows("This server asks for a key."))


def refused(tab: Tab, server: ScriptedServer) -> None:
    """After an answer: its timing stays, and the refused question has none."""
    tab.ask("First?")
    tab.until(DONE)
    before = tab.text("first-sound")
    server.script = Script(refuse=(400, {}, f"{LONG} is not allowed"))
    tab.ask("And this?")
    tab.until(shows("The server refused the question."))
    assert tab.text("first-sound") == before
    assert (
        len(
            tab.eval("[...document.querySelectorAll('.answer')].filter((e) => e.checkVisibility())")
        )
        == 1
    )


def answering(tab: Tab, server: ScriptedServer) -> None:
    server.script = Script(hold=("packet 2",))
    tab.ask("What is a stretto?")
    tab.until("strettoStats().turns[0]?.packets === 2")
    tab.play(8)
    assert tab.visible("stop")


def recording(tab: Tab, server: ScriptedServer) -> None:
    """With the microphone that was chosen; it can be dropped by a button, and begun again."""
    tab.click("open-settings")
    tab.until("document.querySelectorAll('#microphone option').length > 1")
    chosen = tab.eval("document.querySelector('#microphone').options[1].value")
    tab.do(tab.at("microphone").select_option(chosen))
    tab.click("close-settings")
    tab.eval(
        "(() => { const real = navigator.mediaDevices.getUserMedia;"
        " navigator.mediaDevices.getUserMedia = (asked) => ((window.asked = asked),"
        " real.call(navigator.mediaDevices, asked)); })()"
    )
    for again in (True, False):
        tab.click("mic")
        tab.until(
            "strettoStats().recording && document.querySelector('#recording-text').textContent !== "
            "'Listening'"
        )
        assert tab.visible("cancel")
        if again:
            assert tab.eval("asked.audio.deviceId.exact") == chosen
            tab.click("cancel")
            tab.until("!strettoStats().recording")
            assert not tab.visible("recording")
    assert server.requests == []


def conversing(tab: Tab, server: ScriptedServer) -> None:
    """The parts of the wait are told in plain words, and make up the whole."""
    line = Line(tab, server)
    server.engine.timeline = SPANS
    line.begin()
    converse(tab, line, 0)
    tab.click("live")
    tab.until("strettoStats().talk === 'ended'")
    (turn,) = tab.stats()["turns"]
    taken = {
        part.get("stage") if part["name"] == "stage" else part["name"]: part["seconds"]
        for part in turn["parts"]
    }
    assert sum(taken.values()) == pytest.approx(turn["heardAfter"], abs=1e-6)
    assert taken["pause"] == PAUSE_S
    names = tab.eval("[...document.querySelectorAll('.part-name')].map((name) => name.textContent)")
    assert names == [
        "Pause",
        "Server",
        "Encode",
        "Prefill",
        "Talker",
        "Vocoder",
        "Network",
        "Buffer",
    ]
    line.begin("live")
    converse(tab, line, 1)


def converse(tab: Tab, line: Line, number: int) -> None:
    """A turn and its answer, of which the beginning is heard."""
    line.ask(number)
    line.sound(steady((1.0, 0.2)), number)
    tab.play(8)
    line.done(number)
    tab.until(f"strettoStats().turns[{number}]?.parts")


SPANS = (
    TimelineSpan("thinker", "encode", 0.0, 0.03), TimelineSpan("thinker", "prompt", 0.03, 0.05),
    TimelineSpan("talker", "prompt", 0.04, 0.07),
    TimelineSpan("code2wav", "first frame", 0.07, 0.08),
)  # fmt: skip


def remembered(tab: Tab, server: ScriptedServer) -> None:
    """What was said is still there after a reload, can be copied, and goes along with the next
    question. A new conversation forgets it."""
    answered(tab, server)
    tab.play_out()
    tab.do(tab.page.reload())
    tab.until(READY)
    assert server.script.text in tab.text("answer")
    tab.do(tab.page.context.grant_permissions(["clipboard-read", "clipboard-write"]))
    tab.click("copy")
    tab.until(f"navigator.clipboard.readText().then((words) => words === {server.script.text!r})")
    tab.ask("And then?")
    tab.until(DONE)
    assert [m["role"] for m in server.requests[1]["messages"]] == ["user", "assistant", "user"]
    kept = tab.eval("localStorage['stretto-history']")
    assert len(json.loads(kept)) == 2
    tab.click("new")
    assert tab.eval("localStorage['stretto-history'] ?? null") is None
    tab.eval(f"localStorage['stretto-history'] = {kept!r}")
    tab.do(tab.page.reload())
    tab.until(f"{READY} && strettoStats().turns.length === 2")


def noise(tab: Tab, server: ScriptedServer) -> None:
    server.script.card = {"name": LONG, "random_weights": True}
    tab.do(tab.page.reload())
    tab.until(READY)
    tab.until("document.querySelector('#model').textContent.includes('noise')")
    assert LONG in tab.text("model")


FILES = """(async () => {
  const canvas = Object.assign(document.createElement("canvas"), {width: 20, height: 10});
  const picture = await new Promise((resolve) => canvas.toBlob(resolve));
  const dataTransfer = new DataTransfer();
  const files = [[picture, "a.png", "image/png"], [new Uint8Array(900), "LONG.mp3", "audio/mpeg"],
    [new Uint8Array(900), "b.mkv", ""], [new Uint8Array(1 << 20), "large.mp4", "video/mp4"],
    ["x", "LONG.txt", "text/plain"]];
  for (const [data, name, type] of files) dataTransfer.items.add(new File([data], name, {type}));
  dispatchEvent(new DragEvent("drop", {dataTransfer}));
})()""".replace("LONG", LONG)


def attached(tab: Tab, server: ScriptedServer) -> None:
    """Sound and video go along; a file that is too large or of no use is named."""
    tab.eval(FILES)
    tab.until(shows(f"{LONG}.txt cannot be sent: the model takes pictures, sound and video."))
    assert tab.eval("document.querySelectorAll('#tray > div').length") == 3
    tab.ask("What is that?")
    tab.until(DONE)
    parts = server.requests[0]["messages"][0]["content"]
    assert [p["type"] for p in parts] == ["image_url", "input_audio", "video_url", "text"]
    assert parts[1]["input_audio"]["format"] == "mp3"
    tab.eval(FILES)
    tab.until("document.querySelectorAll('#tray > div').length === 3")
    tab.until(shows("cannot be sent"))


def composing(tab: Tab, _: ScriptedServer) -> None:
    tab.write("question", LONG)
    tab.eval("""(async () => {
      const canvas = Object.assign(document.createElement("canvas"), {width: 20, height: 10});
      const blob = await new Promise((resolve) => canvas.toBlob(resolve));
      const dataTransfer = new DataTransfer();
      for (let i = 0; i < 5; i++) dataTransfer.items.add(new File([blob], `${i}.png`, {type: "image/png"}));
      dispatchEvent(new DragEvent("drop", {dataTransfer}));
    })()""")
    tab.until("document.querySelectorAll('#tray img').length === 5")


def settings(tab: Tab, _: ScriptedServer) -> None:
    tab.click("open-settings")
    tab.until("document.querySelectorAll('#microphone option').length > 1")


READER: dict[str, Any] = {
    "output_modalities": ("audio",), "input_modalities": ("text", "audio"), "instructions": True,
    "cloning": True, "default_voice": "", "voices": (),
    "languages": ("auto", "english", "a language with a rather long name"),
}  # fmt: skip


def reading(tab: Tab, server: ScriptedServer) -> None:
    """A text is read with a voice that is made of a clip, in a language, and in a manner."""
    server.script.card = READER
    tab.do(tab.page.reload())
    tab.until("document.body.dataset.mode === 'reading'")
    assert not any(tab.visible(control) for control in ("mic", "live"))
    tab.click("add-voice")
    clip = {"name": f"{LONG}.wav", "mimeType": "audio/wav", "buffer": b"RIFF" + bytes(900)}
    tab.do(tab.at("clip").set_input_files([clip]))  # type: ignore[list-item]
    tab.write("voice-name", LONG[:60].replace("ä", "a"))
    server.engine.clip_error = Invalid(f"{LONG} is too short", "audio")
    tab.click("save-voice")
    tab.until("document.querySelector('#voice-wrong').textContent.includes('too short')")
    server.engine.clip_error = None
    tab.click("save-voice")
    tab.until("!document.querySelector('#voices').open")
    tab.write("manner", "warmly")
    tab.eval("document.querySelector('#language').value = 'english'")
    tab.ask(f"Read this. {LONG}")
    tab.until(DONE)
    asked = server.requests[-1]
    assert asked["text"].startswith("Read this.")
    style = asked["style"]
    assert (style.instructions, style.language) == ("warmly", "english")
    assert style.voice == b"a voice"
    assert tab.stats()["turns"][0]["packets"] == len(server.script.packets)


def voices(tab: Tab, server: ScriptedServer) -> None:
    server.script.card = READER
    server.service.voices.add("anyone", LONG, b"a voice", False)
    tab.do(tab.page.reload())
    tab.until("document.body.dataset.mode === 'reading'")
    tab.click("add-voice")
    tab.until("document.querySelectorAll('#own-voices li').length === 1")


STATES: dict[str, Callable[[Tab, ScriptedServer], None]] = {
    "empty": lambda tab, server: None, "answered": answered, "failed": failed, "busy": busy,
    "loading": loading,
    "locked": locked, "composing": composing, "settings": settings, "refused": refused,
    "answering": answering,
    "recording": recording, "conversing": conversing, "remembered": remembered, "noise": noise,
    "attached": attached,
    "reading": reading, "voices": voices,
}  # fmt: skip
REAL = ("recording", "settings")  # with the browser's own sound


@pytest.mark.parametrize("state", STATES)
def test_nothing_sticks_out(
    browser: Browser, server: ScriptedServer, state: str, tmp_path: Path
) -> None:
    """In no state of the page, at no width, with no font, with the timing open or folded; nor are
    words covered, and the page itself never scrolls: its parts do. At first the timing is
    folded."""
    folder = Path(os.environ.get("STRETTO_PICTURES", tmp_path))
    tab = browser.open(server.url, *WIDTHS[0], before="" if state in REAL else SOUND + LISTEN)
    tab.until(READY)
    assert not tab.eval("document.querySelector('#score').open")
    STATES[state](tab, server)
    tab.eval(WIDEST)
    found = {}
    for font, rules in FONTS.items():
        tab.style(rules)
        for width, height in WIDTHS:
            tab.resize(width, height)
            for folded in (False, True):
                where = f"{state}-{width}-{font}{'-folded' if folded else ''}"
                size, wrong = tab.eval(
                    f"(() => {{ document.querySelector('#score').open = "
                    f"{'false' if folded else 'true'};"
                    " const { scrollWidth, scrollHeight } = document.documentElement;"
                    f" return [[scrollWidth, scrollHeight], [...{OUTSIDE}({width}), "
                    f"...{COVERED}]]; }})()"
                )
                if "STRETTO_PICTURES" in os.environ and font == "own" and (folded or width == 390):
                    tab.picture(folder / f"{where}.png")
                if wrong or size[0] > width or size[1] > height:
                    found[where] = [size, *wrong]
                    tab.picture(folder / f"{where}.png")
    assert not found, json.dumps(found, indent=1, ensure_ascii=False)
    tab.close()


def test_the_picture_is_as_high_as_its_lanes(browser: Browser, server: ScriptedServer) -> None:
    """After the window has grown too."""
    tab = browser.open(server.url, 320, 568, before=SOUND)
    tab.until(READY)
    answered(tab, server)
    for width, height in WIDTHS:
        tab.resize(width, height)
        tab.eval("document.querySelector('#score').open = true")
        lanes = tab.eval(
            "[...document.querySelectorAll('#lanes li')].map((lane) => lane.offsetHeight)"
        )
        assert tab.eval("document.querySelector('#timeline').offsetHeight") == sum(lanes) + 24, (
            width
        )
    tab.close()
