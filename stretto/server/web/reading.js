// A model that reads texts aloud: its voices, those that the reader makes of clips, languages, and how it is said.

import { addVoice, ownVoices, removeVoice } from "./api.js";
import { make } from "./attachments.js";
import { readDataUri } from "./files.js";
import { store, stored } from "./storage.js";

const $ = (id) => document.getElementById(id);
const IDEAS = [
  "The sea was calm that night, and the lights of the harbour lay on it like a second town.",
  "One, two, three: this is a test of the voice.",
];
const named = (word) => word.charAt(0).toUpperCase() + word.slice(1);

export class Reading {
  constructor(key) {
    this.key = key; // () => the API key or ""
    this.model = null;
    this.own = []; // names of voices
    $("add-voice").onclick = () => this.open();
    $("close-voices").onclick = () => $("voices").close();
    $("voice-form").onsubmit = (e) => (e.preventDefault(), this.add());
    $("language").onchange = () => store(localStorage, "stretto-language", $("language").value);
    $("manner").onchange = () => store(localStorage, "stretto-manner", $("manner").value);
    $("manner").onkeydown = (e) => e.key === "Enter" && (e.preventDefault(), $("composer").requestSubmit());
  }

  get on() {
    return Boolean(this.model?.reads);
  }

  /** Make the page a reader's, or not, as the model is. */
  async show(model) {
    this.model = model;
    document.body.dataset.mode = model.reads ? "reading" : "chat";
    if (!model.reads) return;
    const described = !model.voices.length && !model.cloning;
    $("question").placeholder = "Write what is to be read…";
    $("question-label").textContent = "The text";
    $("voice-label").hidden = described;
    $("manner").hidden = !model.instructions;
    if (described) $("manner").placeholder = "Describe the voice: an old man, warm, unhurried…";
    $("manner").value = stored(localStorage, "stretto-manner");
    $("language").replaceChildren(...model.languages.map((name) => new Option(named(name), name)));
    $("language").value = model.languages.find((name) => name === stored(localStorage, "stretto-language")) ?? model.languages[0] ?? "";
    $("language-label").hidden = model.languages.length < 2;
    $("add-voice").hidden = !model.cloning;
    if (model.cloning) await this.refresh();
  }

  get ideas() {
    return IDEAS;
  }

  /** What a text is read with. */
  body(text) {
    const { instructions, languages } = this.model;
    return {
      model: this.model.name,
      input: text,
      response_format: "pcm",
      stream_format: "sse",
      timeline: true,
      ...($("voice").disabled ? {} : { voice: $("voice").value }),
      ...(instructions && $("manner").value.trim() ? { instructions: $("manner").value.trim() } : {}),
      ...(languages.length && $("language").value ? { language: $("language").value } : {}),
    };
  }

  // --- voices of clips

  async refresh(chosen = null) {
    const before = chosen ?? $("voice").value;
    this.own = await ownVoices(this.key()).catch(() => this.own);
    const all = [...this.model.voices, ...this.own];
    $("voice").replaceChildren(...all.map((name) => new Option(named(name), name)));
    if (!all.length) $("voice").append(new Option("No voice yet", ""));
    $("voice").disabled = !all.length;
    $("voice").value = all.includes(before) ? before : (all[0] ?? "");
    $("own-voices").replaceChildren(...this.own.map((name) => this.line(name)));
  }

  line(name) {
    const remove = make("button", { type: "button", className: "action", textContent: "Delete" });
    remove.onclick = () => this.attempt(async () => {
      await removeVoice(name, this.key());
      await this.refresh();
    });
    remove.setAttribute("aria-label", `Delete the voice ${name}`);
    return make("li", {}, make("span", { textContent: name }), remove);
  }

  open() {
    $("voice-wrong").hidden = true;
    $("voices").showModal();
  }

  add() {
    return this.attempt(async () => {
      const [file] = $("clip").files;
      if (file.type && !/^(audio|video)\//.test(file.type)) throw new Error(`${file.name} is not a recording.`);
      const url = await readDataUri(file);
      const name = $("voice-name").value.trim();
      const format = /\.([a-z0-9]{1,16})$/.exec(file.name.toLowerCase())?.[1];
      const text = $("voice-text").value.trim();
      const audio = url.slice(url.indexOf(",") + 1);
      await addVoice({ name, audio, ...(format ? { format } : {}), ...(text ? { text } : {}) }, this.key());
      await this.refresh(name);
      $("voice-form").reset();
      $("voices").close();
    });
  }

  /** Do it, with the button at rest; what goes wrong is told in the dialog. */
  async attempt(work) {
    $("voice-wrong").hidden = true;
    $("save-voice").disabled = true;
    try {
      await work();
    } catch (error) {
      $("voice-wrong").textContent = error.message;
      $("voice-wrong").hidden = false;
    }
    $("save-voice").disabled = false;
  }
}
