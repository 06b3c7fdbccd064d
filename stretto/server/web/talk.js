// The spoken conversation as the page shows it: the form of the two voices, what is going on in words, the clock, the
// button that begins and ends it, and which part of the page has the room: the welcome, the talk, or the history.

import { Clock } from "./clock.js";
import { Live } from "./live.js";
import { PHASES, told } from "./phases.js";
import { Presence } from "./presence.js";

const $ = (id) => document.getElementById(id);

export class Talk {
  /** `settings()`: what a conversation is opened with; `onTrouble({title, text, advice, again})`: something to tell, `again`
   * if a new attempt makes sense; `onRefused()`: the server did not take the conversation; `onPlay`, `onHush`, `onChange`
   * as in `Live`. */
  constructor({ conversation, player, settings, onPlay, onHush, onChange, onTrouble, onRefused }) {
    Object.assign(this, { conversation, player, settings, onChange, onTrouble, onRefused });
    this.presence = new Presence($("form"));
    this.clock = new Clock($("clock"), $("clock-figure"));
    this.over = false; // it has ended, and stays to be seen
    this.phase = "idle";
    this.live = new Live({
      conversation, player, onPlay, onHush,
      onLevel: (level) => this.presence.hear(level),
      onChange: () => this.changed(),
      onTrouble: (text) => {
        onTrouble({ title: "That did not work.", text });
        this.changed();
      },
      onEnd: (why) => this.ended(why),
    });
    for (const id of ["talk", "live"]) $(id).onclick = () => this.toggle();
  }

  /** Whether the microphone is open, or is being opened. */
  get open() {
    return !["idle", "ended"].includes(this.phase);
  }

  async toggle() {
    if (this.live.phase !== "idle") return this.live.stop();
    this.over = false;
    this.clock.clear();
    try {
      await this.live.start(this.settings());
    } catch (error) {
      this.onTrouble({ title: error.message, advice: error.advice ?? "", again: true });
    }
    this.changed();
  }

  /** End it, and make room for what is asked in writing. */
  close() {
    this.live.stop();
    this.over = false;
    this.changed();
  }

  /** The answer that is being heard is not wanted any more. */
  quiet() {
    this.live.quiet();
  }

  ended({ message, refused }) {
    this.over = !refused && this.conversation.entries.length > 0;
    if (message) this.onTrouble({ title: "The conversation has ended.", text: message, again: true });
    this.changed();
    if (refused) this.onRefused();
  }

  /** What the player reports. */
  heard(report) {
    this.live.heard(report);
    this.presence.speak(report.level, 1000 * this.player.latency);
  }

  changed() {
    this.show();
    this.onChange();
  }

  show() {
    const before = this.phase;
    this.phase = this.live.phase === "idle" && this.over ? "ended" : this.live.phase;
    this.showClock(before);
    this.showView();
    if (this.phase === before) return;
    this.presence.show(this.phase);
    $("presence").dataset.phase = this.phase;
    const [title, note] = PHASES[this.phase] ?? ["", ""];
    $("phase").textContent = title;
    $("phase-note").textContent = note;
    const words = this.phase === "idle" && before !== "idle" ? "Ended." : told(this.phase, before);
    if (words !== null) $("phase-told").textContent = words;
  }

  showClock(before) {
    const { turn = null } = this.live.answer ?? {};
    if (this.phase === "idle") this.clock.clear();
    else if (this.phase === "thinking" && before !== "thinking") this.clock.start(this.live.pause ?? 0);
    else if (this.clock.from === null || this.live.waiting) return;
    else if (turn?.heardAfter != null) this.clock.stop(turn.heardAfter);
    else if (!["thinking", "speaking"].includes(this.phase)) this.clock.clear(); // nothing was heard
  }

  showView() {
    const focused = document.activeElement?.id;
    const asked = this.conversation.entries.length > 0;
    const view = this.phase !== "idle" ? "talk" : asked ? "history" : "welcome";
    document.body.dataset.view = view;
    $("welcome").hidden = view !== "welcome";
    $("live-label").textContent = this.open ? "End" : "Talk";
    $("live").title = this.open ? "End the conversation (Escape)" : "Talk with an open microphone";
    $("live").classList.toggle("on", this.open);
    $("live-icon").className = `icon icon-${this.open ? "stop" : "mic"}`;
    if (focused === "talk" && view !== "welcome") $("live").focus();
    if (focused === "live" && view === "welcome") $("talk").focus();
  }
}
