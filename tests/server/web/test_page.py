"""The page in a real browser, with the server and the scripted engine: what a person sees, hears and does.

Nothing here is a matter of time. Where sound is played, the test plays it (`tab.play`), and where
it is the page's time that matters, the test lets it pass (`tab.pass_time`): a busy machine only
takes longer. `real_sound` is the browser's own audio thread, for what is true at any speed."""

from __future__ import annotations

import base64
import io
import wave
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image

from stretto.engine.events import TimelineSpan
from tests.server.scripted_server import ANSWER, RATE, Script, ScriptedServer
from tests.server.scripted_server import READY as HEALTHY
from tests.server.web.tab import DONE, MICROPHONE_HZ, READY, SOUND, Browser, Tab, shows


@pytest.fixture
def tab(browser: Browser, server: ScriptedServer) -> Iterator[Tab]:
    """Sound and time are the test's to pass; time goes by itself until `stop_time`."""
    tab = browser.open(server.url, before=SOUND, clock=True)
    tab.until(READY)
    yield tab
    tab.close()


@pytest.fixture
def real_sound(browser: Browser, server: ScriptedServer) -> Iterator[Tab]:
    """The browser's own sound, in and out; time is the test's."""
    tab = browser.open(server.url, clock=True)
    tab.until(READY)
    yield tab
    tab.close()


def test_typed_question_is_answered_and_heard(real_sound: Tab, server: ScriptedServer) -> None:
    tab = real_sound
    tab.ask("What is a stretto?")
    tab.until(DONE)
    tab.until("!strettoStats().playing")

    (asked,) = server.requests
    assert asked["messages"] == [{"role": "user", "content": "What is a stretto?"}]
    assert asked["voice"] == "ethan"
    assert asked["modalities"] == ("text", "audio")
    assert tab.text("answer") == ANSWER

    (turn,) = tab.stats()["turns"]
    assert turn["packets"] == len(server.script.packets)
    assert turn["audioSeconds"] == pytest.approx((sum(server.script.packets) * 1920 - 555) / RATE)
    assert 0 < turn["firstText"] <= turn["firstAudio"] <= turn["firstSound"]
    assert tab.complained() == []


def test_what_comes_in_time_is_played_without_a_gap(tab: Tab, server: ScriptedServer) -> None:
    """Sent all at once: faster than it is heard, so not one gap."""
    tab.ask("What is a stretto?")
    tab.until(DONE)
    tab.play_out()
    (turn,) = tab.stats()["turns"]
    assert turn["firstSound"] is not None
    assert turn["underruns"] == 0
    assert turn["starved"] == 0
    assert tab.text("underruns") == "0"
    assert tab.complained() == []


def test_a_gap_is_counted_and_told(tab: Tab, server: ScriptedServer) -> None:
    server.script = Script(hold=("packet 2",))
    tab.ask("What is a stretto?")
    tab.until("strettoStats().turns[0]?.packets === 2")
    tab.play(64)
    (turn,) = tab.stats()["turns"]
    assert turn["underruns"] == 1
    assert turn["starved"] == pytest.approx((64 * 128 - (3 * 1920 - 555)) / RATE)
    server.go_on()
    tab.until(DONE)
    tab.play_out()
    assert tab.stats()["turns"][0]["underruns"] == 1
    assert tab.text("underruns") == "1"
    assert tab.eval("document.querySelector('.meta').textContent").endswith("1 gap")


def test_figures_and_timeline_are_shown(tab: Tab, server: ScriptedServer) -> None:
    tab.eval("document.querySelector('#score').open = true")
    tab.stop_time()
    before = tab.eval("document.querySelector('#timeline').toDataURL()")
    server.script = Script(hold=("words 0", "packet 0", "packet 3", "end"))
    tab.ask("Show me.")
    server.wait_for_requests(1)
    for wait, then in (
        (120, "strettoStats().turns[0].firstText !== null"),
        (
            30,
            f"strettoStats().turns[0].packets === 3 && "
            f"document.body.textContent.includes({ANSWER[-30:]!r})",
        ),
        (50, "strettoStats().turns[0].packets === 4"),
        (40, DONE),
    ):
        tab.pass_time(wait)
        server.go_on()
        tab.until(then)
        tab.play(8)  # 43 ms of more than a second: it never runs dry
    tab.pass_time(500)
    tab.play_out()
    tab.pass_time(100)  # for the picture
    shown = {f: tab.text(f) for f in ("first-text", "first-audio", "first-sound", "total")}
    assert shown == {
        "first-text": "120 ms",
        "first-audio": "150 ms",
        "first-sound": "150 ms",
        "total": "240 ms",
    }
    assert tab.text("underruns") == "0"
    assert tab.text("rtf") == f"{tab.stats()['turns'][0]['audioSeconds'] / 0.2:.1f}×"
    assert tab.text("rate") == f"{(len(ANSWER.split()) - 1) / 0.03:.0f}"
    # The server sent its timeline: the links between the stages have lanes too.
    assert tab.stats()["lanes"] == [
        "thinker", "thinker>talker", "talker", "talker>code2wav", "code2wav", "packets", "playback",
    ]  # fmt: skip
    making = tab.eval("document.querySelector('#timeline').toDataURL()")
    assert making != before
    tab.click("zoom-hearing")
    tab.pass_time(100)
    assert tab.eval("document.querySelector('#timeline').toDataURL()") != making
    label = tab.eval("document.querySelector('#timeline').getAttribute('aria-label')")
    assert "4 pieces of speech" in label


def test_timeline_without_the_servers_help(tab: Tab, server: ScriptedServer) -> None:
    server.script = Script(timeline=False)
    tab.ask("Show me.")
    tab.until(DONE)
    (turn,) = tab.stats()["turns"]
    assert not turn["measured"]
    tab.until("strettoStats().lanes.join() === 'thinker,talker,code2wav,packets,playback'")


def lanes(tab: Tab) -> list[tuple[str, str | None, str]]:
    """What is written on each lane, the number of its colour if it is a stage's, and the colour."""
    return [
        tuple(row)
        for row in tab.eval(
            "[...document.querySelectorAll('#lanes li')]"
            ".map((lane) => [lane.textContent, lane.dataset.tone ?? null, "
            "getComputedStyle(lane).color])"
        )
    ]


@pytest.mark.parametrize("replicas", [1, 2])
def test_lanes_are_the_servers_stages(
    browser: Browser, server: ScriptedServer, replicas: int
) -> None:
    """Whatever they are called and however many there are, with a colour for each of the first
    six."""
    stages = [f"stage_{i}" for i in range(7)]
    copies = [f"p{r}.{s}" for r in range(replicas) for s in stages] if replicas > 1 else stages
    server.script = Script(
        timeline=False, health={"status": "ready", "stages": dict.fromkeys(copies, "ready")}
    )
    tab = browser.open(server.url, before=SOUND)
    tab.until(f"strettoStats().lanes.length === {len(stages) + 2}")
    named = lanes(tab)
    assert [name for name, _, _ in named] == [f"Stage {i}" for i in range(7)] + [
        "Arriving",
        "Playing",
    ]
    assert [tone for _, tone, _ in named] == ["0", "1", "2", "3", "4", "5", "0", None, None]
    colours = [colour for _, _, colour in named]
    assert len(set(colours)) == 8
    assert colours[6] == colours[0]
    tab.close()


def test_lanes_follow_the_timeline(tab: Tab, server: ScriptedServer) -> None:
    """Stages and links that only the answer names have lanes too; a link stands before the stage
    that it leads to."""
    server.script.health = {"status": "ready", "stages": {"reader": "ready", "singer": "ready"}}
    server.script.spans = [
        TimelineSpan(lane, "step", i / 100, (i + 1) / 100)
        for i, lane in enumerate(["reader", "reader>singer", "singer", "singer>echo", "echo"])
    ]
    tab.eval("dispatchEvent(new Event('online'))")  # it looks at once
    tab.until("strettoStats().lanes.join() === 'reader,singer,packets,playback'")
    tab.ask("Show me.")
    tab.until(DONE)
    tab.until(
        "strettoStats().lanes.join() === "
        "'reader,reader>singer,singer,singer>echo,echo,packets,playback'"
    )


@pytest.mark.parametrize("way", ["click", "hold", "space"])
def test_spoken_question_is_sent_as_sound(
    real_sound: Tab, server: ScriptedServer, way: str
) -> None:
    tab = real_sound
    tab.stop_time()  # what is shorter than a third of a second is a click, not a hold
    heard = "parseFloat(document.querySelector('#recording-text').textContent.split(' ')[1]) >= 0.6"
    if way == "click":
        tab.click("mic")
    elif way == "hold":
        tab.mouse_down("mic")
    else:
        tab.eval("document.querySelector('#mic').focus()")
        tab.key_down("Space")
    tab.until(f"strettoStats().recording && {heard}")
    assert tab.text("state") == "Listening"
    if way == "click":
        tab.click("mic")
    elif way == "hold":
        tab.pass_time(1000)
        tab.mouse_up()
    else:
        tab.pass_time(1000)
        tab.key_up("Space")
    tab.until(DONE)

    (part,) = server.requests[0]["messages"][0]["content"]
    assert part["type"] == "input_audio"
    assert part["input_audio"]["format"] == "wav"
    with wave.open(io.BytesIO(base64.b64decode(part["input_audio"]["data"]))) as file:
        rate, sound = file.getframerate(), np.frombuffer(file.readframes(file.getnframes()), "<i2")
    assert rate == 24000
    assert len(sound) >= 0.5 * rate
    # It is the microphone's tone: its strongest frequency is where it should be.
    middle = sound[len(sound) // 2 - 4096 : len(sound) // 2 + 4096] * np.hanning(8192)
    strongest = np.abs(np.fft.rfft(middle)).argmax() * rate / 8192
    assert strongest == pytest.approx(MICROPHONE_HZ, abs=2 * rate / 8192)
    assert tab.complained() == []


def test_escape_drops_a_recording(real_sound: Tab, server: ScriptedServer) -> None:
    tab = real_sound
    tab.stop_time()
    tab.click("mic")
    tab.until("strettoStats().recording")
    tab.press("Escape")
    tab.until("!strettoStats().recording")
    assert server.requests == []
    assert tab.stats()["turns"] == []


def test_microphone_denied(browser: Browser, server: ScriptedServer) -> None:
    deny = (
        "navigator.mediaDevices.getUserMedia = () => Promise.reject(new DOMException('no', "
        "'NotAllowedError'));"
    )
    tab = browser.open(server.url, before=deny)
    tab.until(READY)
    tab.click("mic")
    tab.until(shows("The microphone is not allowed."))
    assert not tab.stats()["recording"]
    tab.ask("Then I type.")
    tab.until(DONE)
    tab.close()


@pytest.mark.parametrize("by", ["button", "escape"])
def test_stop_ends_the_answer_here_and_there(tab: Tab, server: ScriptedServer, by: str) -> None:
    server.script = Script(endless=True)
    tab.ask("Never stop.")
    tab.until("strettoStats().turns[0]?.packets >= 4")
    tab.play(8)
    tab.until("strettoStats().turns[0].firstSound")
    if by == "button":
        tab.click("stop")
    else:
        tab.press("Escape")
    tab.until(
        "strettoStats().turns[0].outcome === 'stopped' && !strettoStats().playing && "
        "!strettoStats().answering"
    )
    server.wait_until_left()
    assert tab.text("buffered") == "0 ms"
    assert tab.visible("send")
    assert not tab.visible("stop")
    assert not tab.visible("notice")

    server.script = Script()
    tab.ask("And now?")
    tab.until("strettoStats().turns[1]?.outcome === 'done'")
    # What was said so far is part of the conversation.
    assert [m["role"] for m in server.requests[1]["messages"]] == ["user", "assistant", "user"]


def test_history_replay_and_new_conversation(tab: Tab, server: ScriptedServer) -> None:
    tab.eval("document.querySelector('#instructions').value = 'Be brief.'")
    for n, question in enumerate(("One?", "Two?")):
        tab.ask(question)
        tab.until(f"strettoStats().turns[{n}]?.outcome === 'done'")
        tab.play_out()
    assert server.requests[1]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": "Two?"},
    ]
    figures = tab.stats()["turns"]
    tab.click("replay")
    tab.until("strettoStats().playing")
    tab.play(8)
    tab.press("Escape")
    tab.until("!strettoStats().playing")
    assert tab.stats()["turns"] == figures, "hearing it again changes no figure"
    assert len(server.requests) == 2
    tab.click("new")
    assert tab.stats()["turns"] == []
    assert tab.text("first-sound") == "–"


def test_image_is_attached_and_sent(tab: Tab, server: ScriptedServer) -> None:
    drop = """(async () => {
      const canvas = Object.assign(document.createElement("canvas"), {width: 2000, height: 500});
      canvas.getContext("2d").fillRect(0, 0, 900, 400);
      const blob = await new Promise((resolve) => canvas.toBlob(resolve));
      const files = new DataTransfer();
      files.items.add(new File([blob], "wide.png", {type: "image/png"}));
      files.items.add(new File(["text"], "notes.txt", {type: "text/plain"}));
      dispatchEvent(new DragEvent("drop", {dataTransfer: files}));
    })()"""
    tab.eval(drop)
    tab.until("document.querySelectorAll('#tray img').length === 1")
    tab.ask("What is this?")
    tab.until(DONE)
    image, text = server.requests[0]["messages"][0]["content"]
    assert text == {"type": "text", "text": "What is this?"}
    assert image["image_url"]["url"].startswith("data:image/jpeg;base64,")
    # Scaled to the longest side the page sends.
    data = image["image_url"]["url"].split(",")[1]
    with Image.open(io.BytesIO(base64.b64decode(data))) as picture:
        assert picture.size == (1536, 384)
    assert not tab.visible("tray")
    assert tab.complained() == []


def test_pasted_image_can_be_taken_back(tab: Tab, server: ScriptedServer) -> None:
    tab.eval("""(async () => {
      const canvas = Object.assign(document.createElement("canvas"), {width: 20, height: 10});
      const blob = await new Promise((resolve) => canvas.toBlob(resolve));
      const clipboardData = new DataTransfer();
      for (const name of ["a.png", "b.png"]) clipboardData.items.add(new File([blob], name, {type: "image/png"}));
      document.querySelector("#question").dispatchEvent(new ClipboardEvent("paste", {clipboardData, cancelable: true}));
    })()""")
    tab.until("document.querySelectorAll('#tray img').length === 2")
    tab.eval("document.querySelector('[aria-label=\"Remove a.png\"]').click()")
    assert tab.eval("[...document.querySelectorAll('#tray img')].map((image) => image.alt)") == [
        "b.png"
    ]
    tab.ask("This one?")
    tab.until(DONE)
    image, _ = server.requests[0]["messages"][0]["content"]
    assert image["image_url"]["url"].startswith("data:image/png;base64,"), (
        "small images go as they are"
    )


def test_the_parts_of_a_live_answer(tab: Tab) -> None:
    """Whether the engine was asked after the end of the turn or, as a guess, before it."""
    made = """import('/turn.js').then(({Turn}) => {
      const span = (lane, name, start, stop) => ({lane, name, start, stop});
      const turn = new Turn(24000, 0, {live: true});
      turn.packets = [{t: 0.12, start: 0, samples: 1}];
      turn.firstSound = 0.2;
      turn.firstAudible = 0.25;
      turn.measure({vad_wait_s: 0.5, speech_to_audio_s: 0.5 + MAKING, timeline: [
        span("a", "encode", 0, 0.03), span("a", "prompt", 0.03, 0.04), span("a", "prompt", 0.04, 0.05),
        span("b", "prompt", 0.04, 0.07), span("a", "token", 0.05, 0.06), span("c", "first frame", 0.07, 0.08),
        span("a>b", "chunk", 0, 1), span("packets", "packet", 0.08, 0.08)]});
      return turn.parts.map((part) => [part.stage ?? part.name, Math.round(part.seconds * 1000)]);
    })"""
    late = [
        ["pause", 500],
        ["server", 20],
        ["a", 30],
        ["a", 20],
        ["b", 20],
        ["c", 10],
        ["network", 20],
        ["buffer", 80],
        ["silence", 50],
    ]
    assert tab.eval(made.replace("MAKING", "0.1")) == late
    early = [
        ["pause", 500],
        ["server", 0],
        ["a", 0],
        ["a", 10],
        ["b", 20],
        ["c", 10],
        ["network", 80],
        ["buffer", 80],
        ["silence", 50],
    ]
    assert tab.eval(made.replace("MAKING", "0.04")) == early


def test_what_is_kept_has_an_end(tab: Tab) -> None:
    """The oldest go first; what makes no sense is nothing."""
    kept = """import('/kept.js').then(({keep, recall}) => {
      keep(Array.from({length: 60}, (_, i) => ({asked: `${i}`, files: "", answer: "x".repeat(i < 50 ? 10 : 9000)})));
      const found = recall().map((one) => one.asked);
      localStorage["stretto-history"] = '[{"asked": 3}, "x"';
      return [found, recall().length];
    })"""
    assert tab.eval(kept) == [[str(i) for i in range(20, 60)], 0]
    longer = kept.replace("9000", "30000")
    assert tab.eval(longer) == [["57", "58", "59"], 0]


def test_text_only(tab: Tab, server: ScriptedServer) -> None:
    tab.eval("document.querySelector('#speak').checked = false")
    tab.ask("In writing, please.")
    tab.until(DONE)
    assert server.requests[0]["modalities"] == ("text",)
    assert tab.text("answer") == ANSWER
    assert tab.text("first-sound") == "–"


def test_whole_sentences_are_announced(tab: Tab) -> None:
    tab.eval(
        "window.told = []; new MutationObserver((changes) => changes.forEach((change) =>"
        " change.addedNodes.forEach((words) => told.push(words.data))))"
        ".observe(document.querySelector('#announcer'), {childList: true})"
    )
    tab.ask("Tell me.")
    tab.until(DONE)
    tab.until("told.length >= 3 || told.join('').length >= strettoStats().turns[0].text.length")
    assert "".join(tab.eval("told")) == ANSWER


# --- trouble


def test_loading_shows_progress_until_ready(browser: Browser, server: ScriptedServer) -> None:
    server.script.health = {
        "status": "loading",
        "stages": {"thinker": "loading 43 %", "talker": "ready"},
    }
    tab = browser.open(server.url)
    tab.until(shows("The model is loading."))
    assert tab.eval(
        "[...document.querySelectorAll('#notice progress')].map((bar) => bar.value)"
    ) == [43, 100]
    assert tab.text("state") == "Loading"
    server.script.health = dict(HEALTHY)
    tab.until(READY)
    assert not tab.visible("notice")
    assert tab.eval("document.querySelector('#voice').value") == "ethan"
    tab.close()


def test_question_waits_for_the_model(browser: Browser, server: ScriptedServer) -> None:
    server.script.health = {"status": "loading", "stages": {"thinker": "loading 43 %"}}
    tab = browser.open(server.url)
    tab.until(shows("You can ask already."))
    tab.ask("Early?")
    tab.until(shows("Your question is asked as soon as it is ready."))
    server.script.health = dict(HEALTHY)
    tab.until(DONE)
    assert len(server.requests) == 1
    assert tab.text("answer") == ANSWER
    tab.close()


def test_the_page_requests_a_key_and_stores_it_in_the_tab_only(
    browser: Browser, server: ScriptedServer
) -> None:
    server.lock("sk-secret")
    tab = browser.open(server.url)
    tab.until(shows("This server asks for a key."))
    tab.write("key-now", "sk-wrong")
    tab.press("Enter")
    tab.until(shows("this API key is not valid"))
    tab.write("key-now", "sk-secret")
    tab.press("Enter")
    tab.until(READY)
    assert not tab.visible("notice")
    tab.ask("May I?")
    tab.until(DONE)
    assert "sk-secret" in tab.eval("JSON.stringify(sessionStorage)")
    assert "sk-secret" not in tab.eval("JSON.stringify(localStorage) + document.cookie")
    tab.close()


def test_busy_server_is_asked_again_after_the_time_it_named(
    tab: Tab, server: ScriptedServer
) -> None:
    server.script = Script(refuse=(429, {"retry-after": "3"}, "32 streams are running"), refusals=1)
    tab.stop_time()
    tab.ask("Please?")
    tab.until(shows("The server is busy."))
    assert "32 streams are running" in tab.text("notice")
    assert tab.eval(shows("Trying again in 3 s."))
    tab.pass_time(2000)
    assert tab.eval(shows("Trying again in 1 s."))
    tab.pass_time(999)
    assert len(server.requests) == 1
    tab.pass_time(1)
    tab.until(DONE)
    assert len(server.requests) == 2
    assert server.requests[0]["messages"] == server.requests[1]["messages"]
    assert not tab.visible("notice")


def test_error_in_mid_stream_keeps_what_came(tab: Tab, server: ScriptedServer) -> None:
    server.script = Script(break_after=12)
    tab.ask("Will it hold?")
    tab.until(shows("the talker stage died"))
    assert "What had arrived is kept." in tab.text("notice")
    assert tab.stats()["turns"][0]["outcome"] == "failed"
    part = tab.text("answer")
    assert part
    assert ANSWER.startswith(part)
    server.script = Script()
    tab.click("retry")
    tab.until(DONE)
    assert tab.text("answer") == ANSWER
    assert not tab.visible("notice")


def test_error_before_anything_came_keeps_nothing(tab: Tab, server: ScriptedServer) -> None:
    server.script = Script(refuse=(500, {}, "the talker stage died"))
    tab.ask("Will it hold?")
    tab.until(shows("the talker stage died"))
    assert "arrived" not in tab.text("notice")


def test_connection_that_breaks(tab: Tab, server: ScriptedServer) -> None:
    server.script = Script(cut_after=12)
    tab.ask("Are you there?")
    tab.until(shows("The connection broke"))
    assert tab.stats()["turns"][0]["outcome"] == "failed"
    assert tab.visible("retry")


def test_asking_again_while_the_answer_is_spoken(tab: Tab, server: ScriptedServer) -> None:
    server.script = Script(packets=(1, 8, 8, 8))
    tab.ask("One?")
    tab.until("strettoStats().turns[0]?.outcome === 'done' && strettoStats().playing")
    assert not tab.visible("send")
    tab.write("question", "Two?")
    assert tab.visible("send")
    tab.click("send")
    tab.until("strettoStats().turns[1]?.outcome === 'done'")
    assert [m["role"] for m in server.requests[1]["messages"]] == ["user", "assistant", "user"]


@pytest.mark.parametrize(
    ("health", "words"),
    [
        ({"status": "draining"}, "The server is shutting down."),
        ({"status": "dead", "error": "the talker host died"}, "the talker host died"),
        ({"status": "what?"}, "It answered 503."),
    ],
)
def test_servers_that_do_not_serve(
    browser: Browser, server: ScriptedServer, health: dict[str, str], words: str
) -> None:
    server.script.health = dict(health)
    tab = browser.open(server.url)
    tab.until(shows(words))
    tab.click("dismiss")
    server.script.health = dict(HEALTHY)
    tab.until(READY)
    assert not tab.visible("notice")
    tab.close()


def test_refused_question_does_not_poison_the_next(tab: Tab, server: ScriptedServer) -> None:
    server.script = Script(refuse=(400, {}, "audio is longer than 40 minutes"), refusals=1)
    tab.ask("First?")
    tab.until(shows("audio is longer than 40 minutes"))
    tab.ask("Second?")
    tab.until(DONE)
    assert server.requests[1]["messages"] == [{"role": "user", "content": "Second?"}]


def test_server_that_goes_away(browser: Browser) -> None:
    with ScriptedServer() as server:
        tab = browser.open(server.url)
        tab.until(READY)
    tab.ask("Still there?")
    tab.until(shows("The server cannot be reached."))
    tab.click("dismiss")
    tab.until("strettoStats().server === 'disconnected'")
    assert tab.text("state") == "Disconnected"
    tab.close()


def test_no_complaint_of_the_page_is_missed(tab: Tab) -> None:
    """That the tests above would hear one."""
    assert tab.complained() == []
    tab.eval("console.error('told')")
    tab.eval("setTimeout(() => { throw new Error('thrown'); })")
    tab.eval("fetch('/nowhere').then(() => null)")
    tab.eval(
        "document.head.append(Object.assign(document.createElement('style'), {textContent: 'a "
        "{}'}))"
    )
    tab.until("violations.length === 1")
    while len(tab.complained()) < 5:
        pass
    for words in ("told", "thrown", "404", "style-src", "Content Security Policy"):
        assert any(words in complaint for complaint in tab.complained()), words
