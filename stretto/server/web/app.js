// The page: joins the parts. It keeps two things of its own: what is being answered now, and what is being played.

import { announce } from "./announcer.js";
import { ApiError, Unreachable, chat, speech } from "./api.js";
import { Attachments } from "./attachments.js";
import { joinFloats } from "./audio.js";
import { Connection } from "./connection.js";
import { Conversation } from "./conversation.js";
import { writeFigures } from "./figures.js";
import { accepted, setLimits, taken } from "./files.js";
import { keep, recall } from "./kept.js";
import { Microphone, chooseMicrophone, listMicrophones } from "./microphone.js";
import { Notice } from "./notice.js";
import { Player } from "./player.js";
import { Reading } from "./reading.js";
import { store, stored } from "./storage.js";
import { Talk } from "./talk.js";
import { TalkButton } from "./talkbutton.js";
import { cycleTheme, nameTheme } from "./themes.js";
import { Timeline } from "./timeline.js";
import { OWN_ACCORD, TALK_REFUSED, explainFailure, explainState } from "./trouble.js";
import { Turn } from "./turn.js";
import { named, setStageWords } from "./words.js";

const $ = (id) => document.getElementById(id);
const SHORTEST_S = 0.25; // a shorter recording is a slip of the finger
const LONGEST_S = 300;
const BLOCKED_S = 1; // a sound device that has not started by then is held back by the browser
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
const conversation = new Conversation($("history"), { onReplay: replay, onShow: showTiming, onChange: remember });
const attachments = new Attachments((title, advice) => notice.show({ about: "file", title, advice }));
const reading = new Reading(apiKey);
const connection = new Connection(onConnection, apiKey);
const talk = new Talk({
  conversation, player, settings: talkSettings, onTrouble: tellTalkTrouble, onRefused: tellRefusal,
  onPlay: ({ turn, stream }) => { playing = { turn, stream, replay: false }; showTurn(turn); showState(); },
  onHush: () => { playing = null; refresh(); showState(); },
  onChange: () => { refresh(); showState(); },
});

// --- settings --------------------------------------------------------------------------------------------------------

function apiKey() {
  return $("key").value.trim();
}

function setKey(value) {
  $("key").value = value;
  store(sessionStorage, "stretto-key", value.trim());
  connection.reconnect();
}

/** Keep the conversation's words for the next visit, if the reader wants that. */
function remember() {
  keep($("remember").checked ? conversation.words() : []);
}

// --- the server's state ----------------------------------------------------------------------------------------------

let lastTold = ""; // the latest notice about the connection

function onConnection(found) {
  const before = server;
  server = found;
  showState();
  const { state, stages, error, model } = found;
  timeline.setStages(Object.keys(stages));
  if (state === "ready") {
    lastTold = "";
    if (OWN_ACCORD.includes(notice.about)) notice.hide();
    if (model && before.model?.name !== model.name) showModel(model);
    if (waiting) answer(waiting);
    return;
  }
  if (current) return; // the answer itself will tell
  if (notice.about && !OWN_ACCORD.includes(notice.about)) return;
  const told = explainState(state, { stages, error, waits: waiting !== null, hasKey: apiKey() !== "" });
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
  setStageWords(model.stages);
  timeline.rename();
  setLimits({ kinds: model.inputs, bytes: model.maxBytes });
  attachments.enabled = !model.reads && accepted() !== "";
  $("attach").hidden = !attachments.enabled;
  $("attach").title = `Attach ${taken()}`;
  $("file").accept = accepted();
  reading.show(model).then(showState);
  const idea = (words) => Object.assign(document.createElement("button"), { type: "button", className: "idea", textContent: words });
  const ideas = reading.on ? reading.ideas : model.ideas;
  if (ideas.length) $("ideas").replaceChildren(...ideas.map(idea));
  $("description").textContent = model.description ? `${named(model.name)}. ${model.description}` : "";
  const noise = model.random ? " Its weights are random: what it says is noise." : "";
  $("model").textContent = `${model.reads ? "Read by" : "Answers by"} ${model.name}.${noise}`;
  $("model").title = model.random ? "Nobody has trained this model. It shows how the server works, not what a model can say." : "The model that this server runs";
  $("model").classList.toggle("noise", model.random);
  $("model").hidden = false;
  $("about").textContent = `Model ${model.name}, speech at ${model.rate / 1000} kHz.${noise}`;
}

function showState() {
  let state = server.state;
  if (microphone.recording) state = "listening";
  else if (talk.open) state = server.state; // the talk tells the rest
  else if (playing) state = "speaking";
  else if (current) state = "thinking";
  else if (notice.about === "busy") state = "busy";
  if (!talk.open && current && playing && current.entry.turn.firstSound === null) state = "thinking";
  $("state").dataset.state = state;
  $("state-text").textContent = STATES[state];
  const busy = current !== null || playing !== null;
  $("stop").hidden = !busy || talk.open;
  $("mic").hidden = talk.open;
  $("send").hidden = (busy || talk.open) && !$("question").value.trim();
}

// --- asking ----------------------------------------------------------------------------------------------------------

function submit(text) {
  if (!text.trim() && attachments.empty) return;
  $("question").value = "";
  fit();
  ask({ text: text.trim(), files: attachments.take(), audio: null });
}

function ask(question) {
  retries = 0;
  answer(conversation.add(question));
}

/** Have an entry's question answered; also used to try again. */
async function answer(entry) {
  stop();
  talk.close(); // a question in writing ends it
  notice.hide();
  const speak = reading.on || $("speak").checked;
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
    const events = reading.on
      ? speech(reading.body(entry.question.text), apiKey(), abort.signal)
      : chat(body(entry, speak), apiKey(), abort.signal);
    for await (const event of events) {
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
  if (turn.nothing && shown === turn) showTurn(latestTurn()); // a refused question has no timing
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
  if (error.status === 429) retries += 1;
  const { nothing } = entry.turn;
  const told = explainFailure(error, { retries, ready: server.state === "ready", stages: server.stages, reads: reading.on, nothing });
  if (told.about === "loading") waiting = entry;
  notice.show({ ...told, retry: told.retry ? () => answer(entry) : null });
  if (told.check) connection.check();
}

/** Stop answering, playing and counting down. */
function stop() {
  waiting = null;
  notice.hide("busy");
  current?.abort.abort();
  current = null;
  if (talk.open && playing) talk.quiet();
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
  talk.heard(report);
  if (!playing || report.stream !== playing.stream) return;
  const { turn, replay } = playing;
  const before = turn.heardAfter;
  if (!replay) turn.hear(report, player.latency);
  if (turn.heardAfter !== before) conversation.measured(turn);
  if (report.event === "started") notice.hide("sound");
  if (report.event === "drained") playing = null;
  if (report.event || turn.heardAfter !== before) talk.show();
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

// --- figures ---------------------------------------------------------------------------------------------------------

let shown = null; // the turn in the score

function showTurn(turn) {
  shown = turn;
  timeline.show(turn);
  showFigures();
}

/** Of the latest answer that there is any of. */
function latestTurn() {
  return conversation.entries.map((entry) => entry.turn).findLast((turn) => turn && !turn.nothing && !turn.restored) ?? null;
}

/** The reader wants to see it. */
function showTiming(entry) {
  $("score").open = true;
  showTurn(entry.turn);
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
  talk.close();
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
  ask({ text: "", files: attachments.take(), audio });
}

function dropRecording() {
  recorder.reset();
  leaving = microphone.release();
  showRecording();
}

function showRecording() {
  $("recording").hidden = !microphone.recording;
  $("question").hidden = microphone.recording;
  $("mic").setAttribute("aria-pressed", String(microphone.recording));
  $("composer").classList.toggle("listening", microphone.recording);
  showState();
}

function showLevel(level, seconds) {
  $("level").value = Math.min(1, 4 * level);
  $("recording-text").textContent = `Listening, ${seconds.toFixed(1)} s`;
  if (seconds >= LONGEST_S) recorder.end();
}

const recorder = new TalkButton($("mic"), { begin: beginRecording, finish: finishRecording });

// --- open microphone -------------------------------------------------------------------------------------------------

/** What a spoken conversation is opened with. */
function talkSettings() {
  stop();
  notice.hide();
  const url = new URL("v1/realtime", document.baseURI);
  url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
  const voice = $("voice").disabled ? undefined : $("voice").value;
  const tokens = Number($("longest").value);
  const session = {
    type: "realtime", instructions: $("instructions").value.trim(), timeline: true,
    ...(tokens ? { max_output_tokens: tokens, max_audio_frames: limits().max_audio_frames } : {}),
    audio: { input: { transcription: {}, turn_detection: { type: "server_vad" } }, output: { voice } },
  };
  return { url, key: apiKey(), session, leadMs: Number($("lead").value) };
}

function tellTalkTrouble({ title, text = "", advice = "", again = false }) {
  notice.show({ about: "talk", title, text, advice, retry: again ? () => talk.toggle() : null });
  connection.check();
}

/** A browser does not tell why a server refused a WebSocket; its health and its list of models tell some of it. */
async function tellRefusal() {
  await connection.reconnect();
  if (server.state !== "ready") return; // the notice about the connection says it
  tellTalkTrouble(TALK_REFUSED);
}

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
  conversation.clear();
  talk.close();
  notice.hide();
  attachments.take();
  showTurn(null);
  $("source").textContent = "The parts of the model appear here as they begin.";
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
$("theme").onclick = () => (cycleTheme(), timeline.refresh());
$("cancel").onclick = dropRecording;
$("open-settings").onclick = () => {
  listMicrophones($("microphone"));
  $("settings").showModal();
};
$("microphone").onchange = () => chooseMicrophone($("microphone").value);
navigator.mediaDevices?.addEventListener?.("devicechange", () => listMicrophones($("microphone")));
$("remember").onchange = () => {
  store(localStorage, "stretto-forget", $("remember").checked ? "" : "yes");
  remember();
};
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
$("ideas").onclick = (e) => e.target.matches(".idea") && submit(e.target.textContent);

addEventListener("keydown", (e) => {
  if (e.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (microphone.recording) dropRecording();
  else if (talk.open) talk.toggle();
  else stop();
});

/** What the page knows, for tests and the curious. */
window.strettoStats = () => ({
  server: server.state,
  state: $("state").dataset.state,
  answering: current !== null,
  playing: playing !== null,
  recording: microphone.recording,
  talk: talk.phase,
  notice: notice.about,
  lanes: timeline.shown,
  turns: conversation.entries.map((entry) => entry.turn?.figures() ?? null),
});

// Open where there is room, until the reader wants it otherwise; then as the reader left it.
const timingKept = stored(localStorage, "stretto-timing");
$("score").open = timingKept ? timingKept === "open" : matchMedia("(min-width: 901px)").matches;
$("score").ontoggle = () => timeline.refresh();
$("score-summary").onclick = () => store(localStorage, "stretto-timing", $("score").open ? "closed" : "open");
// What a label means, for readers without a pointer to rest on it.
$("score-body").onclick = (e) => {
  const { title } = e.target.closest("[title]:not(button)") ?? {};
  if (title) $("source").textContent = title;
};
$("remember").checked = !stored(localStorage, "stretto-forget");
conversation.restore(recall());
talk.show();
$("key").value = stored(sessionStorage, "stretto-key");
$("instructions").value = stored(localStorage, "stretto-instructions");
$("longest").value = stored(localStorage, "stretto-longest");
nameTheme();
showFigures();
connection.check();
