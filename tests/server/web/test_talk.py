"""The spoken conversation on the page, with the server and the scripted engine: what each phase shows, what the
form and the clock follow, and how it ends.

Sound and time pass only where the test lets them: `tab.play` and `tab.speak` are the loudspeaker
and the microphone, `tab.pass_time` the clock."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stretto.errors import Busy
from tests.server.scripted_server import ScriptedServer
from tests.server.web.line import LISTEN, PAUSE_S, Line, steady
from tests.server.web.tab import READY, SOUND, Browser, Tab, shows

BLOCK_MS = 128 / 24
MICROPHONE = """
window.tracks = [];
const ask = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
window.asked = new Promise((go) => (window.allow = go));
navigator.mediaDevices.getUserMedia = async (...a) => {
  if (window.held) await asked;
  const media = await ask(...a);
  tracks.push(...media.getTracks());
  return media;
};
"""
IDEAS = [
    "What is a stretto?", "Say: the old farmer carried a heavy basket across the bridge.",
    "Who are you?", "What is seven plus eight?", "Count from one to ten", "Tell me a joke",
]  # fmt: skip
DESCRIPTION = "A toy with a small synthetic voice. It repeats sentences, adds numbers, and counts."
FREE = "tracks.every((track) => track.readyState === 'ended') && microphones() === 0"


@pytest.fixture
def tab(browser: Browser, server: ScriptedServer) -> Iterator[Tab]:
    tab = browser.open(server.url, before=SOUND + LISTEN + MICROPHONE, clock=True)
    tab.until(READY)
    yield tab
    # the browser's own complaints of connections that a test refuses or cuts
    own = ("WebSocket connection", "ERR_CONTENT_LENGTH_MISMATCH", "ERR_CONNECTION", "ERR_EMPTY")
    assert [w for w in tab.complained() if not any(words in w for words in own)] == []
    tab.close()


@pytest.fixture
def line(tab: Tab, server: ScriptedServer) -> Line:
    return Line(tab, server)


def ends(tab: Tab) -> list[dict[str, float]]:
    """Of each bar: how far the person's voice reaches to the left, and the answer's to the right."""
    found: list[dict[str, float]] = tab.eval("""(() => {
      const at = (line, end) => Number(line.getAttribute(end));
      const you = [...document.querySelectorAll("#form .you")];
      return [...document.querySelectorAll("#form .bar")].map((bar, i) => ({
        you: at(you[i], "x2") - at(you[i], "x1"), answer: at(bar, "x2") - at(bar, "x1"),
      }));
    })()""")
    return found


def box(tab: Tab, id: str) -> dict[str, float]:
    found: dict[str, float] = tab.eval(f"document.querySelector('#{id}').getBoundingClientRect()")
    return found


# --- where things stand


@pytest.mark.parametrize(("width", "height"), [(390, 844), (768, 1024), (1280, 800)])
def test_nothing_jumps_when_a_conversation_begins(
    browser: Browser, server: ScriptedServer, width: int, height: int
) -> None:
    """Neither the composer nor the form, from the welcome to the first words and to the end."""
    tab = browser.open(server.url, width, height, before=SOUND + LISTEN + MICROPHONE)
    line = Line(tab, server)
    tab.until(READY)
    before = box(tab, "composer"), box(tab, "form")
    tab.eval("window.held = true")
    tab.click("talk")
    line.phase("asking")
    assert (box(tab, "composer"), box(tab, "form")) == before
    tab.eval("allow()")
    line.phase("listening")
    assert not tab.visible("welcome")
    assert (box(tab, "composer"), box(tab, "form")) == before
    line.ask()
    line.sound(steady((1.0, 0.2)))
    tab.play(4)
    line.phase("speaking")
    assert tab.visible("clock")
    assert (box(tab, "composer"), box(tab, "form")) == before
    tab.press("Escape")
    line.phase("ended")
    assert (box(tab, "composer"), box(tab, "form")) == before
    tab.close()


def test_suggestions_fill_a_phone(browser: Browser, server: ScriptedServer) -> None:
    """From the button down to the composer; nothing of them is cut off, nor on a small desktop."""
    server.script.card = {"example_prompts": tuple(IDEAS), "description": DESCRIPTION}
    for width, height, gap in ((390, 844, 32), (430, 932, 32), (1280, 800, 800)):
        tab = browser.open(server.url, width, height)
        tab.until(f"{READY} && document.querySelector('#description').textContent")
        first = tab.eval("document.querySelector('.idea').getBoundingClientRect()")
        assert width > 600 or 0 <= first["top"] - box(tab, "talk")["bottom"] < 16
        assert 0 <= box(tab, "composer")["top"] - box(tab, "description")["bottom"] < gap
        assert tab.text("description") == f"Tiny. {DESCRIPTION}"
        tab.close()


def test_a_model_that_says_nothing_of_itself(tab: Tab) -> None:
    assert not tab.visible("description")
    assert tab.visible("talk")


def test_the_timing_is_open_where_there_is_room(browser: Browser, server: ScriptedServer) -> None:
    """And stays as the reader left it."""
    for width, wanted in ((1280, True), (768, False)):
        tab = browser.open(server.url, width)
        is_open = "document.querySelector('#score').open"
        assert tab.eval(is_open) == wanted
        tab.do(tab.page.locator("#score-summary").click())
        tab.until(f"{is_open} === {str(not wanted).lower()}")
        tab.do(tab.page.reload())
        tab.until(READY)
        assert tab.eval(is_open) != wanted
        tab.close()


# --- the form


def test_the_bars_follow_what_is_played(tab: Tab, line: Line) -> None:
    """To the right, the lower ones later; louder goes farther; in silence they rest."""
    line.begin()
    rest = ends(tab)
    line.ask()
    line.sound(steady((0.4, 0.05), (0.4, 0.2), (0.4, 0.0)))
    tab.stop_time()
    tab.pass_time(1000)
    assert ends(tab) == rest, "it has arrived, and nothing was played yet"
    far = []
    for _ in range(2):  # quiet, then loud
        for _ in range(9):
            tab.play(8)
            tab.pass_time(43)
        far.append([bar["answer"] for bar in ends(tab)])
    assert [bar["you"] for bar in ends(tab)] == [0, 0, 0]
    for i in range(3):
        assert far[1][i] > far[0][i] + 30 > rest[i]["answer"] + 60
    tab.play(8)
    tab.pass_time(43)
    for _ in range(12):
        tab.play(8)
        tab.pass_time(43)
    tab.pass_time(1500)
    assert ends(tab) == rest


def test_the_bars_are_a_canon(tab: Tab, line: Line) -> None:
    line.begin()
    rest = ends(tab)
    tab.stop_time()
    tab.speak(8, 0.2)  # a piece of 40 ms
    tab.pass_time(80)
    first = [bar["you"] for bar in ends(tab)]
    assert first[0] > 0 == first[2]
    tab.speak(8, 0.2)
    tab.pass_time(120)
    second = [bar["you"] for bar in ends(tab)]
    assert second[2] > 0
    assert second[2] > first[2]
    tab.pass_time(2000)
    assert ends(tab) == rest


def test_the_persons_voice_comes_from_the_left(tab: Tab, line: Line) -> None:
    line.begin()
    rest = ends(tab)
    tab.stop_time()
    for _ in range(10):
        tab.speak(8, 0.15)
        tab.pass_time(43)
    assert all(bar["you"] > 60 for bar in ends(tab))
    assert [bar["answer"] for bar in ends(tab)] == [bar["answer"] for bar in rest]
    ink = "getComputedStyle(document.querySelector('#form .you')).stroke"
    colour = "getComputedStyle(document.querySelector('#form .bar')).stroke"
    assert tab.eval(ink) != tab.eval(colour)
    tab.speak(8, 0.0)
    tab.pass_time(1500)
    assert ends(tab) == rest


def test_less_motion(tab: Tab, line: Line) -> None:
    """One length for whoever speaks, and nothing moves."""
    tab.calm()
    line.begin()
    rest = ends(tab)
    tab.stop_time()
    tab.speak(8, 0.2)  # too short for speech
    tab.pass_time(200)
    assert ends(tab) == rest
    line.start_speaking()
    mine = ends(tab)
    assert all(bar["you"] > 0 for bar in mine)
    line.stop_speaking()
    assert ends(tab) == rest
    assert tab.text("clock-figure") == "…"
    line.sound(steady((1.0, 0.2)))
    tab.play(4)
    line.phase("speaking")
    spoken = ends(tab)
    assert all(bar["answer"] > at_rest["answer"] for bar, at_rest in zip(spoken, rest))
    tab.play(64)
    tab.pass_time(300)
    assert ends(tab) == spoken
    animation = "getComputedStyle(document.querySelector('#form .bar')).animationName"
    assert tab.eval(animation) == "none"


# --- the clock


def test_the_clock_shows_the_time_to_audible_sound(tab: Tab, line: Line) -> None:
    """From the end of speech, not of the pause behind it, to the first sample that is no silence."""
    line.begin()
    assert not tab.visible("clock")
    tab.stop_time()
    line.start_speaking()
    line.stop_speaking()
    tab.pass_time(96)
    assert 592 <= int(tab.text("clock-figure").split()[0]) <= 608, "it runs"
    line.answer("I am.")
    line.sound(steady((0.1, 0.001), (1.0, 0.2)))
    tab.play(16)  # 85 ms: the voice's own silence
    tab.pass_time(80)
    assert tab.eval("document.querySelector('#clock').dataset.clock") == "runs"
    tab.pass_time(24)
    tab.play(8)
    assert tab.text("clock-figure") == "712 ms"
    tab.play(32)
    tab.pass_time(3000)
    assert tab.text("clock-figure") == "712 ms"
    line.done()
    tab.until("strettoStats().turns[0].parts")
    (turn,) = tab.stats()["turns"]
    parts = {part["name"]: part["seconds"] for part in turn["parts"]}
    # not of `parts`: two stages may have one of the same name
    total = sum(part["seconds"] for part in turn["parts"])
    assert total == pytest.approx(turn["heardAfter"])
    assert turn["heardAfter"] == pytest.approx(PAUSE_S + 0.2)
    assert parts["pause"] == PAUSE_S
    assert parts["silence"] == pytest.approx(0.104)
    shown = "document.body.innerText.split('712 ms').length - 1"
    assert tab.eval(shown) == 1, "there is one clock"

    line.start_speaking("interrupted")
    assert tab.text("clock-figure") == "712 ms"
    line.stop_speaking()
    tab.pass_time(50)
    line.sound(steady((1.0, 0.2)), 1)
    tab.play(4)
    tab.until("document.querySelector('#clock-figure').textContent === '562 ms'")


def test_a_turn_without_sound_has_no_time(tab: Tab, line: Line) -> None:
    line.begin()
    line.ask()
    assert tab.visible("clock")
    line.done()
    line.phase("listening")
    assert not tab.visible("clock")


# --- phases

TITLES = {
    "asking": "Opening the microphone",
    "listening": "Listening",
    "hearing": "Hearing you",
    "thinking": "Thinking",
    "speaking": "Speaking",
    "interrupted": "Go on",
    "reconnecting": "Reconnecting",
    "ended": "Ended",
}


def test_every_phase_is_announced(tab: Tab, line: Line, server: ScriptedServer) -> None:
    """In words for everybody; to screen readers only what the microphone would not take for an
    answer, and no word of the answer itself."""
    tab.eval(
        "window.told = []; new MutationObserver(() => told.push("
        "document.querySelector('#phase-told').textContent))"
        ".observe(document.querySelector('#phase-told'), {childList: true})"
    )

    def see(wanted: str) -> None:
        line.phase(wanted)
        assert tab.text("phase") == TITLES[wanted]
        assert tab.text("phase-note").endswith(".")
        assert tab.eval("document.querySelector('#presence').dataset.phase") == wanted

    tab.eval("window.held = true")
    tab.click("talk")
    see("asking")
    tab.eval("allow()")
    see("listening")
    line.start_speaking()
    see("hearing")
    line.stop_speaking()
    see("thinking")
    line.answer("I am.")
    line.sound(steady((2.0, 0.2)))
    line.done()
    see("thinking")
    tab.play(8)
    see("speaking")
    line.start_speaking("interrupted")
    see("interrupted")
    cut = line.wait_for("conversation.item.truncate")
    assert cut["audio_end_ms"] == int(8 * BLOCK_MS)
    line.stop_speaking()
    line.answer("Well.", 1)
    line.sound(steady((0.1, 0.2)), 1)
    see("thinking")
    line.done(1)
    tab.play_out()
    see("listening")
    assert not tab.visible("notice"), "the server knows the item that was cut short"
    server.cut_connections()
    see("reconnecting")
    see("listening")
    tab.click("live")
    see("ended")
    opened = [words for words in tab.eval("told") if words]
    assert [words.split(".")[0] for words in opened] == [
        TITLES[p] for p in ("asking", "listening", "reconnecting", "listening", "ended")
    ]
    assert tab.text("announcer") == ""
    assert (
        tab.eval("document.querySelector('#phase').closest('[aria-live], [role=status]')") is None
    )


def test_words_that_nobody_wrote_down(tab: Tab, line: Line) -> None:
    """A spoken question stands there at once, quietly, until its words come, if they do."""
    line.begin()
    bubble = "document.querySelectorAll('.asked')[{}]"
    line.ask()
    tab.until(f"{bubble.format(0)}?.querySelector('.spoken')")
    line.sound(steady((0.1, 0.2)))
    line.write_down("What is a stretto?")
    tab.until(f"{bubble.format(0)}.textContent === 'What is a stretto?'")
    line.done()
    tab.play_out()
    line.ask(1)
    line.sound(steady((0.1, 0.2)), 1)
    line.write_down("(spoken)")
    tab.until(f"{bubble.format(1)}.querySelector('.spoken[data-testid=heard]')")
    assert tab.eval(f"{bubble.format(1)}.textContent.trim()") == "spoken"
    line.done(1)
    tab.do(tab.page.reload())
    tab.until(f"{READY} && {bubble.format(1)}?.querySelector('.spoken')")
    assert not tab.eval(f"{bubble.format(1)}.textContent.includes('(')")


# --- how it ends


@pytest.mark.parametrize("by", ["button", "escape", "question", "new"])
def test_ending_frees_the_microphone_and_the_connection(
    tab: Tab, line: Line, server: ScriptedServer, by: str
) -> None:
    line.begin()
    assert tab.eval("tracks.filter((track) => track.readyState === 'live').length") == 1
    buttons = "[...document.querySelectorAll('button')].filter((b) => b.checkVisibility())"
    assert (
        tab.eval(f"{buttons}.filter((b) => /\\b(end|stop|cancel)\\b/i.test(b.innerText)).length")
        == 1
    )
    line.ask()
    line.sound(steady((5.0, 0.2)))
    tab.play(8)
    line.phase("speaking")
    if by == "button":
        tab.click("live")
    elif by == "escape":
        tab.press("Escape")
    elif by == "question":
        tab.ask("In writing?")
    else:
        tab.click("new")
    line.phase("ended" if by in ("button", "escape") else "idle")
    tab.until(FREE)
    line.wait_until_closed()
    if by == "question":
        tab.until("strettoStats().turns[1]?.outcome === 'done'")
        assert not tab.visible("presence")
    else:
        assert not tab.stats()["playing"]
    if by == "new":
        assert tab.visible("welcome")
    else:
        assert tab.stats()["turns"][0]["outcome"] == "stopped"
        line.begin("live")
        assert line.num_connections == 2


def test_the_focus_stays_with_the_conversation(tab: Tab, line: Line) -> None:
    """Begun and ended by keyboard alone."""
    focused = "document.activeElement.id"
    tab.eval("document.querySelector('#talk').focus()")
    tab.press("Enter")
    line.phase("listening")
    assert tab.eval(focused) == "live"
    assert tab.eval("document.querySelector('#live').innerText.trim()") == "End"
    tab.press("Enter")
    line.phase("idle")
    assert tab.eval(focused) == "talk"
    assert tab.visible("welcome")


def test_a_lost_connection_is_made_again(tab: Tab, line: Line, server: ScriptedServer) -> None:
    """With the words so far; what had arrived of the answer is kept, and the microphone stays."""
    line.begin()
    tab.stop_time()
    line.ask()
    line.write_down("Who are you?")
    line.sound(steady((1.0, 0.2)))
    tab.until("document.querySelector('.asked').textContent === 'Who are you?'")
    tab.play(8)
    line.phase("speaking")
    before = line.num_sent
    server.cut_connections()
    line.phase("reconnecting")
    assert tab.stats()["turns"][0]["outcome"] == "failed"
    tab.speak(16, 0.2)  # nobody to send it to
    tab.pass_time(499)
    assert line.num_connections == 1
    tab.pass_time(1)
    assert line.num_connections == 2
    line.phase("speaking")  # what was in hand is played
    tab.play_out()
    line.phase("listening")
    line.wait_for("session.update", since=before)
    items = [
        line.wait_for("conversation.item.create", n, before)["item"]["content"][0]["text"]
        for n in (1, 2)
    ]
    assert items == ["Who are you?", "I am."]
    kinds = tab.eval(f"sent.slice({before}).map((event) => event.type)")
    assert "input_audio_buffer.append" not in kinds
    tab.speak(16, 0.2)
    line.wait_for("input_audio_buffer.append", since=before)
    assert tab.eval("tracks.length") == 1


def test_a_connection_that_stays_away_is_given_up(
    tab: Tab, line: Line, server: ScriptedServer
) -> None:
    line.begin()
    line.ask()
    tab.stop_time()
    line.refuse()
    server.cut_connections()
    line.phase("reconnecting")
    for attempt, wait in enumerate((500, 1000, 2000, 4000, 8000, 8000, 8000), 2):
        tab.pass_time(wait)
        assert line.num_connections == attempt
        tab.until(f"lost === {attempt}")
    tab.until(shows("The connection to the server was lost."))
    line.phase("ended")
    tab.until(FREE)
    line.accept()
    tab.click("retry")
    line.phase("listening")


def test_ending_while_it_reconnects(tab: Tab, line: Line, server: ScriptedServer) -> None:
    line.begin()
    tab.stop_time()
    server.cut_connections()
    line.phase("reconnecting")
    tab.click("live")
    line.phase("idle")
    tab.pass_time(60_000)
    tab.until(FREE)
    assert line.num_connections == 1


def test_a_server_that_takes_no_conversation(tab: Tab, line: Line) -> None:
    line.refuse()
    tab.click("talk")
    tab.until(shows("The server did not take the conversation."))
    assert "Try again in a moment" in tab.text("notice")
    line.phase("idle")
    assert tab.visible("welcome")
    tab.until(FREE)
    line.accept()
    tab.click("retry")
    line.phase("listening")
    assert not tab.visible("notice")


def test_a_server_that_closes_the_conversation(browser: Browser) -> None:
    with ScriptedServer(realtime_idle=0.001) as server:
        tab = browser.open(server.url, before=SOUND + LISTEN + MICROPHONE)
        tab.until(READY)
        tab.click("talk")
        tab.until(shows("nothing was said for too long"))
        Line(tab, server).phase("idle")
        tab.until(FREE)
        tab.close()


def test_a_microphone_that_is_not_allowed(browser: Browser, server: ScriptedServer) -> None:
    deny = (
        "navigator.mediaDevices.getUserMedia = () => "
        "Promise.reject(new DOMException('no', 'NotAllowedError'));"
    )
    tab = browser.open(server.url, before=SOUND + LISTEN + deny)
    tab.until(READY)
    before = box(tab, "composer")
    tab.click("talk")
    tab.until(shows("The microphone is not allowed."))
    assert "Allow it for this page" in tab.text("notice")
    assert tab.visible("retry")
    Line(tab, server).phase("idle")
    assert tab.visible("welcome")
    assert box(tab, "composer") == before
    assert Line(tab, server).num_connections == 0
    tab.close()


def test_an_error_does_not_end_it(tab: Tab, line: Line) -> None:
    line.begin()
    line.start_speaking()
    line.stop_speaking()
    tab.eval("sockets[0].send(JSON.stringify({ type: 'nonsense' }))")
    tab.until(shows("nonsense"))
    line.phase("listening")


def test_an_answer_that_fails_does_not_end_it(tab: Tab, line: Line, server: ScriptedServer) -> None:
    line.begin()
    line.start_speaking()
    line.stop_speaking()
    server.tell(0, Busy("the queue is full"))
    tab.until(shows("the queue is full"))
    line.phase("listening")
