"""The system's Chromium behind Playwright: one browser process, tabs that share nothing, said in
the page's test ids.

Playwright's calls run on an event loop in a thread of their own, so that tests stay plain functions
and may run event loops themselves. A tab hears every complaint the page makes (console errors,
exceptions, violations of its policy).

Two things of a tab can be taken from the machine's clock, so that a busy machine changes nothing:
its sound (`SOUND`, played by `tab.play`) and its time (`clock=True`, then `tab.stop_time` and
`tab.pass_time`)."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Coroutine
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from playwright.async_api import Browser as Chromium
from playwright.async_api import ConsoleMessage, Locator, Page, Playwright, async_playwright

T = TypeVar("T")
LOOK_S = 0.01  # between two looks at a condition

AHEAD_MS = 60_000  # where the page's time stops: it may not be past already
MICROPHONE_HZ = 480.0  # the tone that Chromium hears

# Conditions, for `tab.until`.
READY = "strettoStats().server === 'ready'"
DONE = "strettoStats().turns.at(-1)?.outcome === 'done'"

FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--use-fake-ui-for-media-stream",
    "--use-fake-device-for-media-stream",
)  # fmt: skip

# Policy violations are also counted in the page itself: not all of them reach the console.
WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (e) => {
  window.violations.push(e.violatedDirective + " " + e.blockedURI);
});
"""

# In place of the browser's audio thread: the page's own worklets, which play a block, or take one
# from the microphone, when the test says so.
SOUND = """
(() => {
  const kinds = {};
  const nodes = [];
  let port = null; // of the processor that is being made
  globalThis.sampleRate = 24000;
  globalThis.registerProcessor = (name, kind) => (kinds[name] = kind);
  globalThis.AudioWorkletProcessor = class { port = port; };
  globalThis.AudioContext = class {
    state = "running";
    outputLatency = 0;
    audioWorklet = { addModule: (url) => import(url) };
    constructor({ sampleRate }) { this.sampleRate = sampleRate; }
    async resume() {}
    async close() { this.state = "closed"; }
    createMediaStreamSource() { return { connect() {} }; }
  };
  globalThis.AudioWorkletNode = class {
    constructor(context, name) {
      port = { postMessage: (data) => this.port.onmessage({ data }) };
      Object.assign(this, { context, name, processor: new kinds[name]() });
      this.port = { postMessage: (data) => this.processor.port.onmessage({ data }) };
      nodes.push(this);
    }
    connect() {}
  };
  const open = (name) => nodes.filter((node) => node.name === name && node.context.state === "running");
  globalThis.playBlocks = (blocks) => {
    for (let i = 0; i < blocks; i++) {
      open("stretto-player").forEach(({ processor }) => processor.process([], [[new Float32Array(128)]]));
    }
  };
  globalThis.speakBlocks = (blocks, level) => {
    const block = new Float32Array(128).fill(level);
    for (let i = 0; i < blocks; i++) {
      open("stretto-microphone").forEach(({ processor }) => processor.process([[block]], []));
    }
  };
  globalThis.microphones = () => open("stretto-microphone").length;
})();
"""


def shows(words: str) -> str:
    """A condition: the notice is seen and has these words."""
    return (
        f"!document.querySelector('#notice').hidden && "
        f"document.querySelector('#notice').innerText.includes({words!r})"
    )


def find_chromium() -> str | None:
    return (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )


@dataclass
class Browser(AbstractContextManager["Browser"]):
    """`with Browser(microphone=wav) as browser: tab = browser.open(url)`."""

    microphone: Path
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    thread: threading.Thread | None = None
    playwright: Playwright | None = None
    chromium: Chromium | None = None

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def __enter__(self) -> Browser:
        program = find_chromium()
        assert program is not None
        self.thread = threading.Thread(target=self.loop.run_forever, name="playwright", daemon=True)
        self.thread.start()
        self.playwright = self.do(async_playwright().start())
        microphone = f"--use-file-for-fake-audio-capture={self.microphone}"
        self.chromium = self.do(
            self.playwright.chromium.launch(
                executable_path=program, args=[*FLAGS, microphone], timeout=0
            )
        )
        return self

    def __exit__(self, *error: object) -> None:
        assert self.thread is not None
        if self.chromium is not None:
            self.do(self.chromium.close())
        if self.playwright is not None:
            self.do(self.playwright.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def open(
        self,
        url: str,
        width: int = 1280,
        height: int = 800,
        dark: bool = False,
        before: str = "",
        clock: bool = False,
    ) -> Tab:
        """A tab of its own (own storage, own permissions). `before` is script that runs before the
        page's."""
        return self.do(self._open(url, width, height, dark, before, clock))

    async def _open(
        self, url: str, width: int, height: int, dark: bool, before: str, clock: bool
    ) -> Tab:
        assert self.chromium is not None
        context = await self.chromium.new_context(
            viewport={"width": width, "height": height},
            is_mobile=width < 600,
            device_scale_factor=2 if width < 600 else 1,
            color_scheme="dark" if dark else "light",
        )
        context.set_default_timeout(0)  # what hangs is ended by pytest
        page = await context.new_page()
        tab = Tab(self, page)
        page.on("console", tab.hear)
        page.on("pageerror", lambda error: tab.complaints.append(f"exception: {error}"))
        if clock:
            await page.clock.install()
        await page.add_init_script(WATCH + before)
        await page.goto(url)
        return tab


@dataclass
class Tab:
    browser: Browser
    page: Page
    complaints: list[str] = field(default_factory=list)

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.browser.do(work)

    def hear(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning", "assert"):
            self.complaints.append(f"{message.type}: {message.text} {message.location}")

    def complained(self) -> list[str]:
        """Everything the page complained about so far, violations of its policy included."""
        return [*self.eval("window.violations"), *self.complaints]

    def eval(self, script: str) -> Any:
        """The value of an expression; promises are awaited."""
        return self.do(self.page.evaluate(script))

    def until(self, condition: str) -> Any:
        """Wait until an expression is true, and give its value. Asked from here: Playwright's own
        way would need the page's policy to allow `eval`, and a page whose time stands still could
        not ask itself."""
        look = f"(() => {{ try {{ return ({condition}); }} catch {{ return null; }} }})()"
        try:
            while not (value := self.eval(look)):
                time.sleep(LOOK_S)
        except BaseException as e:  # pytest ends what never becomes true
            e.add_note(f"waiting until {condition}; the page complained: {self.complaints}")
            raise
        return value

    def stats(self) -> dict[str, Any]:
        got: dict[str, Any] = self.eval("window.strettoStats()")
        return got

    def at(self, testid: str) -> Locator:
        """The first of them, as a reader would find it."""
        return self.page.get_by_test_id(testid).first

    def text(self, testid: str) -> str:
        return (self.do(self.at(testid).text_content()) or "").strip()

    def visible(self, testid: str) -> bool:
        return self.do(self.at(testid).is_visible())

    # --- what a person does

    def click(self, testid: str) -> None:
        self.do(self.at(testid).click())

    def mouse_down(self, testid: str) -> None:
        self.do(self.at(testid).hover())
        self.do(self.page.mouse.down())

    def mouse_up(self) -> None:
        self.do(self.page.mouse.up())

    def key_down(self, key: str) -> None:
        self.do(self.page.keyboard.down(key))

    def key_up(self, key: str) -> None:
        self.do(self.page.keyboard.up(key))

    def press(self, key: str) -> None:
        self.do(self.page.keyboard.press(key))

    def write(self, testid: str, text: str) -> None:
        self.do(self.at(testid).focus())
        self.do(self.page.keyboard.insert_text(text))

    def ask(self, question: str) -> None:
        self.write("question", question)
        self.press("Enter")

    # --- sound and time, where the test has them in hand

    def play(self, blocks: int) -> None:
        """Let so many blocks of 128 samples be played (a tab opened with `SOUND`)."""
        self.eval(f"playBlocks({blocks})")

    def speak(self, blocks: int, level: float) -> None:
        """Let the microphone take so many blocks of 128 samples of this value (with `SOUND`)."""
        self.eval(f"speakBlocks({blocks}, {level})")

    def play_out(self) -> None:
        """Play until nothing is left (a tab opened with `SOUND`)."""
        for _ in range(1000):
            if not self.stats()["playing"]:
                return
            self.play(64)
        raise AssertionError("it never ends")

    def stop_time(self) -> None:
        """From now on the page's time goes only where it is told to (a tab opened with `clock`)."""
        self.do(self.page.clock.pause_at(self.eval("Date.now()") + AHEAD_MS))

    def pass_time(self, milliseconds: int) -> None:
        """Let the page's time go on by so much, with all that falls due in it."""
        self.do(self.page.clock.run_for(milliseconds))

    # --- how it looks

    def style(self, rules: str) -> None:
        """Add rules to the page's. (By script: its policy allows no style that is not the
        server's.)"""
        self.do(
            self.page.evaluate(
                "(rules) => { const sheet = new CSSStyleSheet(); sheet.replaceSync(rules);"
                " document.adoptedStyleSheets = [sheet]; }",
                rules,
            )
        )

    def resize(self, width: int, height: int) -> None:
        self.do(self.page.set_viewport_size({"width": width, "height": height}))

    def calm(self) -> None:
        """As a reader who asked for less motion."""
        self.do(self.page.emulate_media(reduced_motion="reduce"))

    def picture(self, path: Path) -> None:
        self.do(self.page.screenshot(path=path))

    def close(self) -> None:
        self.do(self.page.context.close())
