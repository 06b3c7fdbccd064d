// The conversation on the page, and as messages for the server. One entry per question, with its answer.

import { joinFloats, toBase64, wavFile } from "./audio.js";
import { duration } from "./turn.js";

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function action(icon, words, onclick) {
  const sign = make("span", { className: `icon icon-${icon}`, ariaHidden: "true" });
  return make("button", { type: "button", className: "action", onclick }, sign, make("span", { textContent: words }));
}

function download(bytes, name) {
  const url = URL.createObjectURL(new Blob([bytes], { type: "audio/wav" }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

export class Conversation {
  /** `onReplay(entry)`, `onShow(entry)`: the reader asks to hear, or to see the timeline of, an answer again. */
  constructor(list, { onReplay, onShow }) {
    Object.assign(this, { list, onReplay, onShow });
    this.entries = [];
    this.pinned = true; // the reader follows the newest words
    list.addEventListener("scroll", () => (this.pinned = list.scrollHeight - list.scrollTop - list.clientHeight < 60));
    new ResizeObserver(() => this.scroll(false)).observe(list);
  }

  /** question: {text, images: [{url}], audio: {samples, rate} | null} */
  add(question) {
    const entry = { question, turn: null, ...this.build(question) };
    this.entries.push(entry);
    this.list.append(entry.asked, entry.answer);
    this.scroll(true);
    return entry;
  }

  build(question) {
    const asked = make("li", { className: "asked" });
    for (const image of question.images) asked.append(make("img", { src: image.url, alt: image.name || "Attached image" }));
    if (question.audio) asked.append(this.recording(question.audio));
    if (question.text) asked.append(make("p", { textContent: question.text }));
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
    entry.answer.hidden = turn.outcome === "failed" && !turn.text && !turn.samples; // the notice says it all
    const parts = [];
    if (turn.outcome === "stopped") parts.push("stopped");
    if (turn.outcome === "failed") parts.push("broken off");
    if (turn.samples) parts.push(`${duration(turn.audioSeconds)} of speech`);
    if (turn.firstAudio !== null) parts.push(`first audio ${duration(turn.firstAudio)}`);
    else if (turn.firstText !== null) parts.push(`first text ${duration(turn.firstText)}`);
    if (turn.underruns) parts.push(`${turn.underruns} underrun${turn.underruns > 1 ? "s" : ""}`);
    entry.meta.textContent = parts.join(" · ");
    const buttons = [];
    if (turn.samples) {
      const again = action("play", "Play again", () => this.onReplay(entry));
      again.dataset.testid = "replay";
      const number = this.entries.indexOf(entry) + 1;
      const save = action("save", "Save", () => download(wavFile(joinFloats(turn.sound), turn.rate), `answer-${number}.wav`));
      buttons.push(again, save);
    }
    if (turn.firstText !== null || turn.samples) buttons.push(action("timeline", "Timeline", () => this.onShow(entry)));
    entry.actions.replaceChildren(...buttons);
    entry.actions.hidden = !buttons.length;
    this.scroll(false);
  }

  clear() {
    this.entries = [];
    this.list.replaceChildren();
  }

  /** What the server is told: all that was asked and answered up to and including `entry`. */
  messages(instructions, entry) {
    const told = instructions.trim() ? [{ role: "system", content: instructions.trim() }] : [];
    for (const one of this.entries) {
      if (one !== entry && !one.turn?.text) continue; // never answered: it may have been what the server refused
      told.push({ role: "user", content: content(one.question) });
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

function content({ text, images, audio }) {
  if (!images.length && !audio) return text;
  const parts = images.map((image) => ({ type: "image_url", image_url: { url: image.url } }));
  if (audio) {
    // Encoded once: a long conversation sends each recording again with every question.
    audio.base64 ??= toBase64(wavFile(audio.samples, audio.rate));
    parts.push({ type: "input_audio", input_audio: { data: audio.base64, format: "wav" } });
  }
  if (text) parts.push({ type: "text", text });
  return parts;
}
