// The form of a spoken conversation: the three bars of the project's sign. The person's voice reaches into them from the
// left, in ink; the answer leaves them to the right, in the colours of the stages. The lower bars follow the first a
// little later each, as the voices of a canon do. Draws only while something moves.

const SVG = "http://www.w3.org/2000/svg";
const BARS = [[200, 304], [240, 344], [280, 368]]; // ends at rest, in the picture's units: 600 wide
const TOP = 25;
const APART = 59;
const REACH = { you: 168, answer: 200 }; // how far the loudest voice goes
const APART_MS = 90; // between one bar and the next
const QUIETEST_DB = -46;
const LOUDEST_DB = -12;
const RISE_MS = 45;
const FALL_MS = 170;
const OLD_MS = 120; // a level that nothing follows is over by then
const STILL = 0.002; // of the reach: at rest
const CALM_REACH = 0.45; // of whoever speaks, where the reader asked for less motion

/** 0 in silence, 1 for loud speech: in decibels, as ears have it. `level` is a root mean square. */
export function loudness(level) {
  if (level <= 0) return 0;
  const db = 20 * Math.log10(level);
  return Math.min(1, Math.max(0, (db - QUIETEST_DB) / (LOUDEST_DB - QUIETEST_DB)));
}

/** One voice: how loud it was when, and how far each bar has followed it. */
class Voice {
  constructor() {
    this.levels = []; // {t, loud}, the oldest first
    this.reach = BARS.map(() => 0);
  }

  add(loud, t) {
    this.levels.push({ t, loud });
    while (this.levels.length > 1 && this.levels[0].t < t - 1000) this.levels.shift();
  }

  at(t) {
    const latest = this.levels.findLast((one) => one.t <= t);
    return latest && t - latest.t < OLD_MS ? latest.loud : 0;
  }

  follow(now, passed) {
    this.reach = this.reach.map((reach, i) => {
      const aim = this.at(now - i * APART_MS);
      const next = aim + (reach - aim) * Math.exp(-passed / (aim > reach ? RISE_MS : FALL_MS));
      return aim === 0 && next < STILL ? 0 : next;
    });
  }

  /** Whether it moves, or will. */
  moves(now) {
    const last = this.levels.at(-1)?.t ?? -Infinity;
    return this.reach.some((reach) => reach > 0) || now - last < OLD_MS + BARS.length * APART_MS;
  }
}

function line(name, i) {
  const one = document.createElementNS(SVG, "line");
  one.setAttribute("class", name);
  for (const y of ["y1", "y2"]) one.setAttribute(y, TOP + i * APART);
  return one;
}

export class Presence {
  constructor(picture) {
    this.picture = picture;
    this.you = new Voice();
    this.answer = new Voice();
    this.phase = "idle";
    this.drawnAt = null; // while it draws
    this.calm = matchMedia("(prefers-reduced-motion: reduce)");
    this.calm.addEventListener("change", () => this.rest());
    this.bars = BARS.map((ends, i) => {
      const lines = { staff: line("staff-line", i), you: line("you", i), bar: line("bar", i) };
      lines.bar.dataset.tone = i;
      lines.staff.setAttribute("x2", 600);
      return lines;
    });
    picture.append(...this.bars.flatMap(({ staff, you, bar }) => [staff, you, bar]));
    this.draw();
  }

  /** "listening", "speaking" and so on: the style colours the bars by it. */
  show(phase) {
    if (phase === this.phase) return;
    this.phase = phase;
    if (this.calm.matches) this.rest();
  }

  /** The microphone's level, now. */
  hear(level) {
    this.take(this.you, level, 0);
  }

  /** The level of what is played; it is heard `delayMs` later. */
  speak(level, delayMs) {
    this.take(this.answer, level, delayMs);
  }

  take(voice, level, delayMs) {
    if (this.calm.matches) return;
    voice.add(loudness(level), performance.now() + delayMs);
    if (level > 0) this.wake();
  }

  wake() {
    if (this.drawnAt !== null) return;
    this.drawnAt = performance.now();
    requestAnimationFrame(() => this.step());
  }

  step() {
    const now = performance.now();
    const voices = [this.you, this.answer];
    for (const voice of voices) voice.follow(now, now - this.drawnAt);
    this.draw();
    const moving = !this.calm.matches && voices.some((voice) => voice.moves(now));
    this.drawnAt = moving ? now : null;
    if (moving) requestAnimationFrame(() => this.step());
  }

  /** No motion: one length for each state, or none. */
  rest() {
    const speaks = this.calm.matches ? this.phase : null;
    const length = { you: ["hearing", "interrupted"].includes(speaks), answer: speaks === "speaking" };
    for (const name of ["you", "answer"]) {
      this[name].levels = [];
      this[name].reach = BARS.map(() => (length[name] ? CALM_REACH : 0));
    }
    this.draw();
  }

  draw() {
    this.bars.forEach(({ you, bar }, i) => {
      const [left, right] = BARS[i];
      const ink = this.you.reach[i];
      you.setAttribute("x1", (left - ink * REACH.you).toFixed(1));
      you.setAttribute("x2", left);
      you.classList.toggle("none", ink === 0);
      bar.setAttribute("x1", left);
      bar.setAttribute("x2", (right + this.answer.reach[i] * REACH.answer).toFixed(1));
    });
  }
}
