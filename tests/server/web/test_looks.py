"""How the page looks and is reached, at every width, in light and dark."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.web.fake_server import FakeServer
from tests.server.web.tab import SOUND, Browser, Tab
from tests.server.web.test_page import DONE, READY


@pytest.fixture
def tab(browser: Browser, server: FakeServer) -> Iterator[Tab]:
    tab = browser.open(server.url, before=SOUND)
    tab.until(READY)
    yield tab
    tab.close()



@pytest.mark.parametrize(("width", "height", "dark"), [(1280, 800, False), (390, 844, True), (320, 568, False)])
def test_fits_and_targets_are_large_enough(
    browser: Browser, server: FakeServer, width: int, height: int, dark: bool
) -> None:
    tab = browser.open(server.url, width, height, dark)
    tab.until(READY)
    assert tab.eval("document.documentElement.scrollWidth") <= width
    small = tab.eval(
        "[...document.querySelectorAll('button, select, label.attach, summary')].filter((e) => e.checkVisibility())"
        ".filter((e) => e.getBoundingClientRect().height < 44).map((e) => e.id || e.textContent.trim())"
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
def test_words_stand_out_from_their_ground(browser: Browser, server: FakeServer, dark: bool) -> None:
    """WCAG AA: 4.5 to 1 for each colour that words are written in, on each ground they are written on."""
    tab = browser.open(server.url, dark=dark)

    def luminance(name: str) -> float:
        tab.eval(f"document.body.style.backgroundColor = 'var(--{name})'")
        channels = tab.eval("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        red, green, blue = (c / 255 for c in channels[:3])
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    inks = ["ink", "muted", "alarm", "thinker", "talker", "code2wav", "packets", "playback", "link"]
    grounds = {"surface": inks, "paper": ["ink", "muted"], "accent": ["on-accent"], "alarm-soft": ["ink", "muted"]}
    for ground, words in grounds.items():
        for ink in words:
            light, shade = sorted((luminance(ink), luminance(ground)), reverse=True)
            assert (light + 0.05) / (shade + 0.05) >= 4.5, (ink, ground)
    tab.close()


def test_everything_can_be_reached_by_keyboard(tab: Tab) -> None:
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
    for control in ("new", "open-settings", "theme", "question", "file", "voice", "mic", "send", "zoom-making"):
        assert control in reached, control
    names = tab.eval(
        "[...document.querySelectorAll('button, select, textarea, input')]"
        ".filter((e) => !(e.textContent.trim() || e.ariaLabel || e.labels?.length || e.title)).map((e) => e.outerHTML)"
    )
    assert names == []


def test_less_motion_when_asked(tab: Tab) -> None:
    tab.calm()
    assert tab.eval("getComputedStyle(document.querySelector('.dot')).animationName") == "none"
    tab.ask("Calmly.")
    tab.until(DONE)
