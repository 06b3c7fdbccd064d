// The page: joins the parts. It keeps two things of its own: what is being answered now, and what is being played.

import { ApiError, Unreachable, chat } from "./api.js";
import { Attachments } from "./attachments.js";
import { joinFloats } from "./audio.js";
import { Connection } from "./connection.js";
import { Conversation } from "./conversation.js";
import { writeFigures } from "./figures.js";
import { Microphone } from "./microphone.js";
import { Notice } from "./notice.js";
import { Player } from "./player.js";
import { TalkButton } from "./talkbutton.js";
import { Timeline } from "./timeline.js";
import { Turn } from "./turn.js";

const $ = (id) => document.getElementById(id);
const SHORTEST_S = 0.25; // a shorter recording is a slip of the finger
const LONGEST_S = 300;
const BLOCKED_S = 1; // a sound device that has not started by then is held back by the browser
const MOST_RETRIES = 5; // of a busy server, without being asked
const STATES = {
  connecting: "Connecting", loading: "Loading", ready: "Ready", draining: "Shutting down", dead: "Stopped",
  disconnected: "Disconnected", unauthorized: "Key needed", error: "Error", thinking: "Thinking", speaking: "Speaking",
  listening: "Listening", busy: "Busy",
};

let current = null; // {entry, abort, stream}: the answer that is being made
let playing = null; // {turn, stream, replay}: what the player reports about
let retries = 0;
let waiting = null; // an entry that is asked again when the model is loaded
let server = { state: "connecting", stages: {}, model: null };

const notice = new Notice(() => showState());
const player = new Player(hear);
const microphone = new Microphone(showLevel);
const timeline = new Timeline({ canvas: $("timeline"), lanes: $("lanes"), source: $("source") });
const conversation = new Conversation($("history"), { onReplay: replay, onShow: (entry) => showTurn(entry.turn) });
const attachments = new Attachments((title) => notice.show({ about: "image", title, advice: "Use a PNG, JPEG or WebP image." }));
const connection = new Connection(onConnection, apiKey);

// --- settings --------------------------------------------------------------------------------------------------------

function stored(area, name) {
  try {
    return area.getItem(name) ?? "";
  } catch {
    return ""; // storage is off
  }
}

function store(area, name, value) {
  try {
    if (value) area.setItem(name, value);
    else area.removeItem(name);
  } catch {
    // storage is off: the choice lasts as long as the page
  }
}

function apiKey() {
  return $("key").value.trim();
}

function setKey(value) {
  $("key").value = value;
  store(sessionStorage, "stretto-key", value.trim());
  connection.reconnect();
}

function cycleTheme() {
  const root = document.documentElement;
  const next = { undefined: "light", light: "dark", dark: undefined }[root.dataset.theme];
  if (next) root.dataset.theme = next;
  else delete root.dataset.theme;
  store(localStorage, "stretto-theme", next ?? "");
  nameTheme();
  timeline.refresh();
}

function nameTheme() {
  const words = `Theme: ${document.documentElement.dataset.theme ?? "as the system"}`;
  $("theme-label").textContent = words;
  $("theme").title = words;
}

// --- the server's state ----------------------------------------------------------------------------------------------

// Notices about the connection, which come and go by themselves. Others stay: they hold a question's "Try again".
const OURS = ["loading", "disconnected", "draining", "dead", "unauthorized", "error"];

let lastTold = ""; // the latest of them

function onConnection(found) {
  const before = server;
  server = found;
  showState();
  const { state, stages, error, model } = found;
  if (state === "ready") {
    lastTold = "";
    if (OURS.includes(notice.about)) notice.hide();
    if (model && before.model?.name !== model.name) showModel(model);
    if (waiting) answer(waiting);
    return;
  }
  if (current) return; // the answer itself will tell
  if (notice.about && !OURS.includes(notice.about)) return;
  const told = {
    loading: {
      title: "The model is loading.", stages, calm: true,
      text: waiting ? "Your question is asked as soon as it is ready." : "You can ask already.",
    },
    draining: { title: "The server is shutting down.", text: "It takes no new questions.", advice: "The page reconnects by itself." },
    dead: { title: "The server has stopped working.", text: error ?? "", advice: "See its log; it may need a restart." },
    disconnected: { title: "No connection to the server.", text: "It may have been stopped, or the network is away.", advice: "The page keeps trying and reconnects by itself." },
    unauthorized: { title: "This server asks for a key.", text: apiKey() ? (error ?? "") : "", key: true },
    error: { title: "The server answered with an error.", text: error ?? "" },
  }[state];
  // Told once: a notice built anew would take the focus away, be read out again, and undo the reader's "Dismiss".
  const words = JSON.stringify(told);
  if (told && words !== lastTold) {
    lastTold = words;
    notice.show({ about: state, ...told });
  }
}

function showModel(model) {
  const chosen = stored(localStorage, "stretto-voice");
  $("voice").replaceChildren(...model.voices.map((voice) => new Option(voice[0].toUpperCase() + voice.slice(1), voice)));
  $("voice").value = model.voices.includes(chosen) ? chosen : (model.defaultVoice ?? "");
  $("voice").disabled = !model.voices.length;
  $("about").textContent = `Model ${model.name}, speech at ${model.rate / 1000} kHz.`;
}

function showState() {
  let state = server.state;
  if (microphone.recording) state = "listening";
  else if (playing) state = "speaking";
  else if (current) state = "thinking";
  else if (notice.about === "busy") state = "busy";
  if (current && playing && current.entry.turn.firstSound === null) state = "thinking";
  $("state").dataset.state = state;
  $("state-text").textContent = STATES[state];
  const busy = current !== null || playing !== null;
  $("stop").hidden = !busy;
  $("send").hidden = busy && !$("question").value.trim();
}

// --- asking ----------------------------------------------------------------------------------------------------------

function submit(text) {
  if (!text.trim() && attachments.empty) return;
  $("question").value = "";
  fit();
  ask({ text: text.trim(), images: attachments.take(), audio: null });
}

function ask(question) {
  $("welcome").hidden = true;
  retries = 0;
  answer(conversation.add(question));
}

/** Have an entry's question answered; also used to try again. */
async function answer(entry) {
  stop();
  notice.hide();
  const speak = $("speak").checked;
  const rate = server.model?.rate ?? 24000;
  const abort = new AbortController();
  const mine = { entry, abort };
  const turn = new Turn(rate);
  let stream = 0;
  current = mine;
  conversation.begin(entry, turn);
  showTurn(turn);
  showState();
  try {
    if (speak) {
      await player.open(rate);
      abort.signal.throwIfAborted();
      stream = player.begin(Number($("lead").value));
      playing = { turn, stream, replay: false };
      turn.restart(); // the first opening of the sound device is not the server's time
    }
    for await (const event of chat(body(entry, speak), apiKey(), abort.signal)) {
      const { text, samples } = turn.take(event);
      if (text) {
        conversation.append(entry, text);
        announce(turn.text);
      }
      if (samples?.length && speak) player.push(stream, samples.slice());
      if (samples && player.blocked && turn.clock() > BLOCKED_S) soundIsBlocked();
      refresh();
    }
    turn.end("done");
  } catch (error) {
    if (error.name !== "AbortError" && !(error instanceof ApiError) && !(error instanceof Unreachable)) {
      turn.end("failed");
      settle(mine, stream);
      throw error;
    }
    turn.end(error.name === "AbortError" ? "stopped" : "failed");
    if (turn.outcome === "failed") explain(error, entry);
  }
  settle(mine, stream);
}

function settle(mine, stream) {
  const { turn } = mine.entry;
  if (playing?.stream === stream) {
    if (turn.outcome === "stopped" || !turn.samples) {
      player.stop();
      playing = null;
    } else {
      player.end(stream);
    }
  }
  conversation.finish(mine.entry);
  if (current === mine) current = null;
  announce(turn.text, true);
  refresh();
  showState();
}

function body(entry, speak) {
  const voice = $("voice").disabled ? undefined : $("voice").value;
  return {
    model: server.model?.name ?? "default",
    messages: conversation.messages($("instructions").value, entry),
    stream: true,
    stream_options: { include_usage: true },
    timeline: true,
    ...limits(),
    ...(speak ? { modalities: ["text", "audio"], audio: { format: "pcm16", voice } } : { modalities: ["text"] }),
  };
}

/** A limit on text, and one on speech to match: about four tokens a second are spoken, in 12.5 frames. */
function limits() {
  const tokens = Number($("longest").value);
  return tokens ? { max_completion_tokens: tokens, max_audio_frames: Math.ceil((tokens / 4) * 12.5) } : {};
}

function explain(error, entry) {
  const retry = () => answer(entry);
  if (error instanceof Unreachable) {
    notice.show({ about: "broken", title: error.message, text: "What had arrived is kept.", advice: "Try again when the server is back.", retry });
    connection.check();
  } else if (error.status === 429) {
    const seconds = Math.max(1, error.retryAfter ?? 2 ** retries);
    retries += 1;
    const patient = retries <= MOST_RETRIES;
    const advice = patient ? "" : "It has been full for a while. Try again later.";
    notice.show({ about: "busy", title: "The server is busy.", text: error.message, advice, retry, seconds: patient ? seconds : null, calm: true });
  } else if (error.status === 401) {
    notice.show({ about: "unauthorized", title: "This server asks for a key.", text: error.message, key: true, retry });
  } else if (error.status === 413) {
    notice.show({ about: "failed", title: "That was too much for one request.", text: error.message, advice: "Send a smaller image or a shorter recording, or start a new conversation." });
  } else if (error.status === 503 && server.state !== "ready") {
    waiting = entry;
    notice.show({ about: "loading", title: "The model is loading.", text: "Your question is asked as soon as it is ready.", stages: server.stages, calm: true });
    connection.check();
  } else if (error.status === 503) {
    notice.show({ about: "failed", title: "The server cannot answer now.", text: error.message, advice: "It may be loading or recovering.", retry });
    connection.check();
  } else if (error.status >= 400 && error.status < 500) {
    notice.show({ about: "failed", title: "The server refused the question.", text: error.message, advice: "Change the question or the settings, or start a new conversation." });
  } else {
    notice.show({ about: "failed", title: "The answer failed.", text: error.message, advice: "What had arrived is kept.", retry });
  }
}

/** Stop answering, playing and counting down. */
function stop() {
  waiting = null;
  notice.hide("busy");
  current?.abort.abort();
  current = null;
  if (playing) {
    player.stop();
    if (!playing.replay) playing.turn.hush();
    playing = null;
    refresh();
  }
  showState();
}

// --- listening to the answer -----------------------------------------------------------------------------------------

function hear(report) {
  if (!playing || report.stream !== playing.stream) return;
  if (!playing.replay) playing.turn.hear(report, player.latency);
  if (report.event === "started") notice.hide("sound");
  if (report.event === "drained") playing = null;
  refresh();
  showState();
}

async function replay(entry) {
  stop();
  notice.hide("sound");
  await player.open(entry.turn.rate);
  const stream = player.begin(0);
  playing = { turn: entry.turn, stream, replay: true };
  player.push(stream, joinFloats(entry.turn.sound));
  player.end(stream);
  showState();
}

function soundIsBlocked() {
  if (notice.about) return;
  notice.show({
    about: "sound", title: "The browser holds the sound back.", text: "It wants a click first.", calm: true,
    retry: () => player.context.resume(),
  });
}

let announced = 0;

/** Tell screen readers whole sentences, not every token. */
function announce(text, all = false) {
  if (text.length < announced) announced = 0;
  const end = all ? text.length : Math.max(...[". ", "! ", "? ", "\n"].map((mark) => text.lastIndexOf(mark))) + 1;
  if (end <= announced) return;
  $("announcer").textContent = text.slice(announced, end);
  announced = all ? 0 : end;
}

// --- figures ---------------------------------------------------------------------------------------------------------

let shown = null; // the turn in the score

function showTurn(turn) {
  shown = turn;
  timeline.show(turn);
  showFigures();
}

function refresh() {
  timeline.refresh();
  showFigures();
}

function showFigures() {
  writeFigures(shown, shown !== null && shown === current?.entry.turn);
}

// --- speaking --------------------------------------------------------------------------------------------------------

let leaving = null; // the microphone's release, if one is under way

async function beginRecording() {
  stop();
  notice.hide("microphone");
  await leaving;
  try {
    await microphone.start();
  } catch (error) {
    notice.show({ about: "microphone", title: error.message, advice: error.advice ?? "" });
    return false;
  }
  showLevel(0, 0);
  showRecording();
  return true;
}

async function finishRecording() {
  if (!microphone.recording) return;
  const audio = await microphone.stop();
  showRecording();
  if (audio.samples.length / audio.rate < SHORTEST_S) {
    notice.show({ about: "microphone", title: "That was too short.", advice: "Hold the button while you speak, or press it once to start and again to send.", calm: true });
    return;
  }
  ask({ text: "", images: attachments.take(), audio });
}

function dropRecording() {
  talk.reset();
  leaving = microphone.release();
  showRecording();
}

function showRecording() {
  $("recording").hidden = !microphone.recording;
  $("mic").setAttribute("aria-pressed", String(microphone.recording));
  $("composer").classList.toggle("listening", microphone.recording);
  showState();
}

function showLevel(level, seconds) {
  $("level").value = level;
  $("recording-text").textContent = `Listening, ${seconds.toFixed(1)} s`;
  if (seconds >= LONGEST_S) talk.end();
}

const talk = new TalkButton($("mic"), { begin: beginRecording, finish: finishRecording });

// --- wiring ----------------------------------------------------------------------------------------------------------

/** Let the question grow with its text, up to the limit of the style. */
function fit() {
  const box = $("question");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
  showState();
}

function newConversation() {
  stop();
  notice.hide();
  conversation.clear();
  attachments.take();
  showTurn(null);
  $("welcome").hidden = false;
  $("source").textContent = "The voices appear here as they enter.";
  $("question").focus();
}

function setZoom(zoom) {
  timeline.setZoom(zoom);
  $("zoom-making").setAttribute("aria-pressed", String(zoom === "making"));
  $("zoom-hearing").setAttribute("aria-pressed", String(zoom === "hearing"));
}

$("composer").onsubmit = (e) => {
  e.preventDefault();
  submit($("question").value);
};
$("question").oninput = fit;
$("question").onkeydown = (e) => {
  if (e.key !== "Enter" || e.shiftKey || e.isComposing) return;
  e.preventDefault();
  submit($("question").value);
};
$("stop").onclick = stop;
$("new").onclick = newConversation;
$("theme").onclick = cycleTheme;
$("open-settings").onclick = () => $("settings").showModal();
$("settings").onclose = () => {
  store(localStorage, "stretto-instructions", $("instructions").value);
  if (apiKey() !== stored(sessionStorage, "stretto-key")) setKey(apiKey());
};
$("key-form").onsubmit = (e) => {
  e.preventDefault();
  const { retry } = notice;
  setKey($("key-now").value);
  $("key-now").value = "";
  retry?.();
};
$("longest").onchange = () => store(localStorage, "stretto-longest", $("longest").value);
$("voice").onchange = () => store(localStorage, "stretto-voice", $("voice").value);
$("zoom-making").onclick = () => setZoom("making");
$("zoom-hearing").onclick = () => setZoom("hearing");
for (const idea of $("ideas").children) idea.onclick = () => submit(idea.textContent);

addEventListener("keydown", (e) => {
  if (e.key !== "Escape" || $("settings").open) return;
  if (microphone.recording) dropRecording();
  else stop();
});

/** What the page knows, for tests and the curious. */
window.strettoStats = () => ({
  server: server.state,
  state: $("state").dataset.state,
  answering: current !== null,
  playing: playing !== null,
  recording: microphone.recording,
  notice: notice.about,
  lanes: timeline.shown,
  turns: conversation.entries.map((entry) => entry.turn?.figures() ?? null),
});

// In one column the score can be folded away, and on a small phone is at first; beside the talk it is always open.
const oneColumn = matchMedia("(max-width: 900px)");
oneColumn.addEventListener("change", () => ($("score").open ||= !oneColumn.matches));
if (oneColumn.matches && innerHeight <= 640) $("score").open = false;
$("key").value = stored(sessionStorage, "stretto-key");
$("instructions").value = stored(localStorage, "stretto-instructions");
$("longest").value = stored(localStorage, "stretto-longest");
nameTheme();
showFigures();
connection.check();
