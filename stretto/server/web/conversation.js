// The conversation on the page, and as messages for the server. One entry per question, with its answer.

import { make, thumbnail } from "./attachments.js";
import { joinFloats, toBase64, wavFile } from "./audio.js";
import { part } from "./files.js";
import { duration } from "./turn.js";

const COPIED_MS = 2000;
const SPOKEN = "(spoken)"; // stands for words that nobody wrote down

function action(icon, words, onclick) {
  const sign = make("span", { className: `icon icon-${icon}`, ariaHidden: "true" });
  return make("button", { type: "button", className: "action", onclick }, sign, make("span", { textContent: words }));
}

/** What stands in the place of a spoken question's words. */
function spoken() {
  const sign = make("span", { className: "icon icon-mic", ariaHidden: "true" });
  return make("p", { className: "spoken" }, sign, make("span", { textContent: "spoken" }));
}

function download(bytes, name) {
  const url = URL.createObjectURL(new Blob([bytes], { type: "audio/wav" }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

/** Whether the words are in the clipboard now. Browsers give it to pages of HTTPS and localhost only; others select. */
async function copy(words) {
  try {
    await navigator.clipboard.writeText(words.textContent);
    return true;
  } catch {
    getSelection().selectAllChildren(words);
    return document.execCommand("copy");
  }
}

export class Conversation {
  /** `onReplay(entry)`, `onShow(entry)`: the reader asks to hear, or to see the timing of, an answer again; `onChange()`:
   * an answer is complete, or all are gone. */
  constructor(list, { onReplay, onShow, onChange }) {
    Object.assign(this, { list, onReplay, onShow, onChange });
    this.entries = [];
    this.pinned = true; // the reader follows the newest words
    list.addEventListener("scroll", () => (this.pinned = list.scrollHeight - list.scrollTop - list.clientHeight < 60));
    new ResizeObserver(() => this.scroll(false)).observe(list);
  }

  /** question: {text, files: [{kind, name, url}], audio: {samples, rate} | null, aloud}; `aloud`: spoken, and its words may
   * still come. */
  add(question) {
    const entry = { question, turn: null, ...this.build(question) };
    this.entries.push(entry);
    this.list.append(entry.asked, entry.answer);
    this.scroll(true);
    return entry;
  }

  build(question) {
    const asked = make("li", { className: "asked" });
    for (const file of question.files) asked.append(thumbnail(file));
    if (question.audio) asked.append(this.recording(question.audio));
    if (question.aloud || question.text === SPOKEN) asked.append(spoken());
    else if (question.text) asked.append(make("p", { textContent: question.text }));
    const words = make("p", { className: "words" });
    words.dataset.testid = "answer";
    const meta = make("p", { className: "meta" });
    const actions = make("div", { className: "actions", hidden: true });
    const answer = make("li", { className: "answer" }, words, meta, actions);
    return { asked, answer, words, meta, actions };
  }

  recording({ samples, rate }) {
    const url = URL.createObjectURL(new Blob([wavFile(samples, rate)], { type: "audio/wav" }));
    const sound = new Audio(url);
    const button = action("play", `Spoken question, ${duration(samples.length / rate)}`, () => {
      sound.currentTime = 0;
      sound.play();
    });
    button.dataset.testid = "spoken";
    return button;
  }

  /** What was asked aloud, in words, as far as they are known. */
  hear(entry, text) {
    entry.question.text = text;
    const known = text.trim() && text !== SPOKEN;
    entry.asked.lastChild.replaceWith(known ? make("p", { textContent: text.trimStart() }) : spoken());
    entry.asked.lastChild.dataset.testid = "heard";
    this.onChange();
    this.scroll(false);
  }

  /** The conversation so far as items of a realtime session. */
  items() {
    const message = (role, type, text) => ({ type: "message", role, content: [{ type, text }] });
    const words = ({ text, audio, aloud }) => text || (audio || aloud ? SPOKEN : "");
    return this.entries.flatMap(({ question, turn }) => [
      ...(words(question) ? [message("user", "input_text", words(question))] : []),
      ...(turn?.text ? [message("assistant", "output_text", turn.text)] : []),
    ]);
  }

  /** The same as words to be kept. What was never answered is left out. */
  words() {
    return this.entries.filter(({ turn }) => turn && !turn.nothing).map(({ question, turn }) => ({
      asked: question.text,
      files: question.note ?? [...question.files.map((file) => file.name || file.kind), ...(question.audio ? ["spoken"] : [])].join(", "),
      answer: turn.text,
    }));
  }

  /** What was kept of an earlier visit. */
  restore(kept) {
    for (const { asked, files, answer } of kept) {
      const entry = this.add({ text: asked, files: [], audio: null, note: files });
      if (files || !asked) entry.asked.append(make("p", { className: "meta", textContent: files || "spoken" }));
      entry.turn = { text: answer, restored: true, figures: () => ({ outcome: "restored", text: answer }) };
      entry.words.textContent = answer;
      entry.meta.textContent = answer ? "" : "The sound is not kept.";
      if (answer) this.offer(entry, [this.copying(entry)]);
    }
  }

  /** Begin (or begin again) the answer to an entry. */
  begin(entry, turn) {
    entry.turn = turn;
    entry.words.textContent = "";
    entry.meta.textContent = "";
    entry.actions.hidden = true;
    entry.answer.hidden = false;
    entry.answer.classList.add("live");
    entry.answer.classList.remove("broken");
  }

  append(entry, text) {
    entry.words.append(entry.words.hasChildNodes() ? text : text.trimStart());
    this.scroll(false);
  }

  finish(entry) {
    const { turn } = entry;
    entry.answer.classList.remove("live");
    entry.answer.classList.toggle("broken", turn.outcome === "failed");
    entry.answer.hidden = turn.nothing; // the notice says it all
    this.describe(entry);
    const buttons = [];
    if (turn.text) buttons.push(this.copying(entry));
    if (turn.samples) {
      const again = action("play", "Play again", () => this.onReplay(entry));
      again.dataset.testid = "replay";
      const number = this.entries.indexOf(entry) + 1;
      const save = action("save", "Save", () => download(wavFile(joinFloats(turn.sound), turn.rate), `answer-${number}.wav`));
      buttons.push(again, save);
    }
    if (turn.firstText !== null || turn.samples) buttons.push(action("timeline", "Timing", () => this.onShow(entry)));
    this.offer(entry, buttons);
    this.onChange();
  }

  /** More was found out about a turn, after its answer was complete. */
  measured(turn) {
    const entry = this.entries.find((one) => one.turn === turn);
    if (entry && turn.outcome !== null) this.describe(entry);
  }

  describe({ turn, meta }) {
    const parts = [];
    if (turn.outcome === "stopped") parts.push("stopped");
    if (turn.outcome === "failed") parts.push("broken off");
    if (turn.samples) parts.push(`${duration(turn.audioSeconds)} of speech`);
    // Of a spoken turn, the clock shows it.
    if (turn.heardAfter !== null && !turn.live) parts.push(`first sound ${duration(turn.heardAfter)}`);
    else if (turn.firstText !== null && !turn.samples) parts.push(`first words ${duration(turn.firstText)}`);
    if (turn.underruns) parts.push(`${turn.underruns} gap${turn.underruns > 1 ? "s" : ""}`);
    meta.textContent = parts.join(" · ");
  }

  offer(entry, buttons) {
    entry.actions.replaceChildren(...buttons);
    entry.actions.hidden = !buttons.length;
    this.scroll(false);
  }

  copying(entry) {
    const button = action("copy", "Copy", async () => {
      const label = button.lastChild;
      label.textContent = (await copy(entry.words)) ? "Copied" : "Press Ctrl+C";
      setTimeout(() => (label.textContent = "Copy"), COPIED_MS);
    });
    button.dataset.testid = "copy";
    return button;
  }

  clear() {
    this.entries = [];
    this.list.replaceChildren();
    this.onChange();
  }

  /** What the server is told: all that was asked and answered up to and including `entry`. */
  messages(instructions, entry) {
    const told = instructions.trim() ? [{ role: "system", content: instructions.trim() }] : [];
    for (const one of this.entries) {
      if (one !== entry && !one.turn?.text) continue; // never answered: it may have been what the server refused
      told.push({ role: "user", content: content(one.question) || SPOKEN });
      if (one === entry) break;
      told.push({ role: "assistant", content: one.turn.text });
    }
    return told;
  }

  /** Show the newest words, unless the reader has scrolled up to older ones. */
  scroll(always) {
    if (always || this.pinned) this.list.scrollTop = this.list.scrollHeight;
  }
}

function content({ text, files, audio }) {
  if (!files.length && !audio) return text;
  const parts = files.map(part);
  if (audio) {
    // Encoded once: a long conversation sends each recording again with every question.
    audio.base64 ??= toBase64(wavFile(audio.samples, audio.rate));
    parts.push({ type: "input_audio", input_audio: { data: audio.base64, format: "wav" } });
  }
  if (text) parts.push({ type: "text", text });
  return parts;
}
