"""Headless Chromium, driven over the DevTools protocol: one browser process, tabs that share nothing.

Only what the tests need: evaluate, wait for a condition, press keys, click, take pictures, and hear every complaint
the page makes (console errors, exceptions, policy violations, failed requests)."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

PATIENCE_S = 20.0  # how long a condition may take; never reached in a run that passes

KEYS = {
    "Enter": {"code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"},
    "Escape": {"code": "Escape", "windowsVirtualKeyCode": 27},
    "Tab": {"code": "Tab", "windowsVirtualKeyCode": 9},
    " ": {"code": "Space", "windowsVirtualKeyCode": 32, "text": " "},
}


def find_chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class PageError(AssertionError):
    """Script in the page threw, or a condition did not come true."""


@dataclass
class Browser(AbstractContextManager["Browser"]):
    """`with Browser(folder, microphone=wav) as browser: tab = browser.open(url)`."""

    folder: Path
    microphone: Path
    process: subprocess.Popen[bytes] | None = None
    socket: ClientConnection | None = None
    stack: ExitStack = field(default_factory=ExitStack)
    last_id: int = 0
    tabs: dict[str, Tab] = field(default_factory=dict)

    def __enter__(self) -> Browser:
        program = find_chromium()
        assert program is not None
        flags = [
            "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
            "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
            "--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream",
            f"--use-file-for-fake-audio-capture={self.microphone}", "--remote-debugging-port=0",
            "--hide-scrollbars", f"--user-data-dir={self.folder / 'profile'}",
        ]  # fmt: skip
        self.process = subprocess.Popen([program, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        assert self.process.stderr is not None
        for line in self.process.stderr:  # it says where it listens, then goes on
            if line.startswith(b"DevTools listening on "):
                address = line.decode().split()[-1]
                break
        else:
            raise RuntimeError(f"{program} did not start")
        self.socket = self.stack.enter_context(connect(address, max_size=None, proxy=None))
        return self

    def __exit__(self, *error: object) -> None:
        assert self.process is not None
        assert self.process.stderr is not None
        if self.socket is not None:
            self.send("Browser.close")
        self.stack.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stderr.close()

    def send(self, method: str, session: str | None = None, **params: Any) -> int:
        assert self.socket is not None
        self.last_id += 1
        message = {"id": self.last_id, "method": method, "params": params}
        self.socket.send(json.dumps(message | ({"sessionId": session} if session else {})))
        return self.last_id

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Do something and wait for its result; events that come meanwhile go to their tabs."""
        assert self.socket is not None
        mine = self.send(method, session, **params)
        while True:
            message = json.loads(self.socket.recv(timeout=PATIENCE_S + 10))
            if message.get("id") == mine:
                if "error" in message:
                    raise PageError(f"{method}: {message['error']}")
                result: dict[str, Any] = message["result"]
                return result
            tab = self.tabs.get(message.get("sessionId", ""))
            if tab is not None and "method" in message:
                tab.hear(message["method"], message["params"])

    def open(self, url: str, width: int = 1280, height: int = 800, dark: bool = False, before: str = "") -> Tab:
        """A tab of its own (own storage, own permissions). `before` is script that runs before the page's."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session, context)
        self.tabs[session] = tab
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        tab.resize(width, height)
        tab.call("Emulation.setFocusEmulationEnabled", enabled=True)
        tab.media(dark=dark)
        tab.call("Page.addScriptToEvaluateOnNewDocument", source=WATCH + before)
        tab.call("Page.navigate", url=url)
        tab.until("document.readyState === 'complete' && typeof window.strettoStats === 'function'")
        return tab


# Policy violations are also counted in the page itself: not all of them reach the console.
WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (e) => {
  window.violations.push(e.violatedDirective + " " + e.blockedURI);
});
"""


@dataclass
class Tab:
    browser: Browser
    session: str
    context: str
    complaints: list[str] = field(default_factory=list)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **params)

    def hear(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(f"exception: {params['exceptionDetails']}")
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(f"console.{params['type']}: {params['args']}")
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"log: {params['entry']['text']} {params['entry'].get('url', '')}")

    def complained(self) -> list[str]:
        """Everything the page complained about so far, violations of its policy included."""
        return [*self.eval("window.violations"), *self.complaints]

    def eval(self, script: str) -> Any:
        """The value of an expression; promises are awaited."""
        got = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=False)
        if "exceptionDetails" in got:
            raise PageError(f"{script}: {got['exceptionDetails']}")
        return got["result"].get("value")

    def until(self, condition: str) -> Any:
        """Wait until an expression is true, and give its value."""
        value = self.eval(
            f"""new Promise((resolve) => {{
              const end = performance.now() + {1000 * PATIENCE_S};
              const look = () => {{
                let value;
                try {{ value = ({condition}); }} catch (error) {{ value = undefined; }}
                if (value || performance.now() > end) resolve(value ?? null);
                else setTimeout(look, 10);
              }};
              look();
            }})"""
        )
        if not value:
            stats = self.eval("window.strettoStats ? JSON.stringify(window.strettoStats()) : document.title")
            raise PageError(f"never true: {condition}\n{stats}\n{self.complaints}")
        return value

    def stats(self) -> dict[str, Any]:
        got: dict[str, Any] = self.eval("window.strettoStats()")
        return got

    def text(self, testid: str) -> str:
        got: str = self.eval(f"document.querySelector('[data-testid={testid}]').textContent.trim()")
        return got

    def visible(self, testid: str) -> bool:
        return bool(self.eval(f"document.querySelector('[data-testid={testid}]').checkVisibility()"))

    # --- what a person does

    def center(self, testid: str) -> tuple[float, float]:
        box = self.eval(
            f"(() => {{ const b = document.querySelector('[data-testid={testid}]').getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        return box[0], box[1]

    def mouse(self, kind: str, testid: str) -> None:
        x, y = self.center(testid)
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def click(self, testid: str) -> None:
        self.mouse("mousePressed", testid)
        self.mouse("mouseReleased", testid)

    def key(self, kind: str, key: str) -> None:
        words = KEYS[key] if kind == "keyDown" else {k: v for k, v in KEYS[key].items() if k != "text"}
        self.call("Input.dispatchKeyEvent", type=kind, key=key, **words)

    def press(self, key: str) -> None:
        self.key("keyDown", key)
        self.key("keyUp", key)

    def write(self, testid: str, text: str) -> None:
        self.eval(f"document.querySelector('[data-testid={testid}]').focus()")
        self.call("Input.insertText", text=text)

    def ask(self, question: str) -> None:
        self.write("question", question)
        self.press("Enter")

    # --- how it looks

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, mobile=width < 600,
            deviceScaleFactor=2 if width < 600 else 1,
        )  # fmt: skip

    def media(self, *, dark: bool = False, calm: bool = False) -> None:
        self.call(
            "Emulation.setEmulatedMedia",
            features=[
                {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
                {"name": "prefers-reduced-motion", "value": "reduce" if calm else "no-preference"},
            ],
        )

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        self.browser.call("Target.disposeBrowserContext", browserContextId=self.context)
        del self.browser.tabs[self.session]
