// Draws a turn as a score: one lane per stage and link, time to the right. Which stages there are, the server says: in
// its health while it is asked nothing, in its timeline of an answer. While the answer is made, what they do is inferred
// from what arrives; the timeline replaces that when it comes.

import { duration } from "./turn.js";
import { explained, named } from "./words.js";

const OURS = ["packets", "playback"]; // lanes of what arrives and is heard here
const TONES = 6; // colours of stages in the style; after the last comes the first
const SLOW_MS = 250; // between pictures when the reader asked for less motion
const AXIS = 22; // pixels

const READING = /^(encode|prompt|prefill|first)/; // spans before a stage's first output
const isLink = (lane) => lane.includes(">");
const OURS_WORDS = {
  packets: ["Arriving", "Pieces of sound, when they arrived in this browser and how long they play"],
  playback: ["Playing", "Sound in hand: what has arrived and was not played yet. Red: a gap, nothing was left to play"],
};

export class Timeline {
  constructor({ canvas, lanes, source }) {
    Object.assign(this, { canvas, list: lanes, source });
    this.turn = null;
    this.stages = []; // names, in data-flow order
    this.zoom = "making";
    this.shown = []; // lane names, top to bottom
    this.boxes = []; // {x, y, w, h, words}: what the pointer can ask about
    this.pending = false;
    this.drawnAt = 0;
    this.calm = matchMedia("(prefers-reduced-motion: reduce)");
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    canvas.addEventListener("pointermove", (e) => this.point(e.offsetX, e.offsetY));
    canvas.addEventListener("pointerleave", () => this.describe());
    this.setLanes(OURS);
  }

  /** As the server's health names them: with replicas, each stage of each, such as "p0.writer". */
  setStages(names) {
    const stages = [...new Set(names.map((name) => name.replace(/^p\d+\./, "")))];
    if (!stages.length || stages.join() === this.stages.join()) return;
    this.stages = stages;
    this.refresh();
  }

  /** What stages are called or do has changed. */
  rename() {
    this.shown = [];
    this.refresh();
  }

  show(turn) {
    this.turn = turn;
    this.refresh();
  }

  setZoom(zoom) {
    this.zoom = zoom;
    this.refresh();
  }

  /** Something changed: draw soon, at most once a picture. */
  refresh() {
    if (this.pending) return;
    this.pending = true;
    const wait = this.calm.matches ? Math.max(0, SLOW_MS - (performance.now() - this.drawnAt)) : 0;
    const draw = () => requestAnimationFrame(() => ((this.pending = false), this.draw()));
    wait ? setTimeout(draw, wait) : draw();
  }

  setLanes(lanes) {
    if (lanes.join() === this.shown.join()) return;
    this.shown = lanes;
    let tone = 0;
    this.list.replaceChildren(
      ...lanes.map((lane) => {
        const item = document.createElement("li");
        const kind = isLink(lane) ? "link" : OURS.includes(lane) ? lane : "stage";
        Object.assign(item.dataset, { name: lane, lane: kind, ...(kind === "stage" && { tone: tone++ % TONES }) });
        const label = document.createElement("span");
        label.textContent = kind === "link" ? `→ ${lane.split(">")[1]}` : (OURS_WORDS[lane]?.[0] ?? named(lane));
        item.title = OURS_WORDS[lane]?.[1] ?? (kind === "link" ? `On the way: ${lane.replace(">", " to ")}` : explained(lane));
        item.append(label);
        return item;
      }),
    );
  }

  draw() {
    this.drawnAt = performance.now();
    const spans = this.turn ? allSpans(this.turn, this.stages) : [];
    this.setLanes([...lanesOf(this.stages, spans), ...OURS]);

    const ratio = devicePixelRatio || 1;
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (!width || !height) return;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    const g = this.canvas.getContext("2d");
    g.scale(ratio, ratio);

    const style = getComputedStyle(this.canvas);
    const pen = { ink: style.color, line: style.borderTopColor, alarm: style.outlineColor, font: style.fontFamily };
    const end = this.span();
    const x = (t) => (t / end) * (width - 12);
    const rows = this.rows();
    this.boxes = [];
    drawAxis(g, x, end, width, height, pen);
    for (const row of rows) drawStaff(g, row, width, pen);
    if (this.turn) {
      const spanLanes = rows.filter((row) => !OURS.includes(row.lane));
      for (const row of spanLanes) this.drawSpans(g, x, row, spans);
      for (const row of rows) {
        if (row.lane === "packets") this.drawPackets(g, x, row);
        if (row.lane === "playback") this.drawBuffer(g, x, row, width, pen);
      }
      this.drawNow(g, x, height, pen);
    }
    this.describe();
  }

  /** Seconds across the picture: the making of the answer, or all that is heard of it. */
  span() {
    const turn = this.turn;
    if (!turn) return 1;
    const made = turn.endedAt ?? turn.clock();
    const heard = turn.playedAt ?? (turn.levels.length ? turn.levels.at(-1).t : made);
    return Math.max(0.05, (this.zoom === "hearing" ? Math.max(made, heard) : made) * 1.03);
  }

  /** Where each lane lies: the labels are laid out by the page, the picture follows them. */
  rows() {
    const top = this.list.getBoundingClientRect().top;
    return [...this.list.children].map((item) => {
      const box = item.getBoundingClientRect();
      return { lane: item.dataset.name, y: box.top - top, h: box.height, color: getComputedStyle(item).color };
    });
  }

  drawSpans(g, x, { lane, y, h, color }, spans) {
    const thin = isLink(lane);
    const inset = thin ? h * 0.3 : h * 0.2;
    for (const span of spans) {
      if (span.lane !== lane) continue;
      const left = x(span.start);
      const box = { x: left, y: y + inset, w: Math.max(1.5, x(span.stop) - left - 0.5), h: h - 2 * inset };
      g.globalAlpha = span.guess ? 0.3 : thin || READING.test(span.name) ? 0.5 : 0.85;
      g.fillStyle = color;
      g.beginPath();
      g.roundRect(box.x, box.y, box.w, box.h, Math.min(3, box.w / 2));
      g.fill();
      const took = span.stop > span.start ? `, ${duration(span.stop - span.start)}` : "";
      this.boxes.push({ ...box, words: `${named(lane)}: ${span.name}, at ${duration(span.start)}${took}` });
    }
    if (lane !== this.stages[0] || this.turn.spans) return;
    g.globalAlpha = 1; // the words that arrived, over the inferred stage
    for (const word of this.turn.words) g.fillRect(x(word.t) - 0.75, y + h * 0.2, 1.5, h * 0.6);
  }

  // A packet is a note: it stands where it arrived, and is as long as it sounds (cut where the next one stands).
  drawPackets(g, x, { y, h, color }) {
    const { packets, rate } = this.turn;
    g.fillStyle = color;
    packets.forEach((packet, i) => {
      const left = x(packet.t);
      const length = x(packet.samples / rate);
      const room = i + 1 < packets.length ? x(packets[i + 1].t) - left - 1 : Infinity;
      const box = { x: left, y: y + h * 0.24, w: Math.max(2, Math.min(length, room)), h: h * 0.52 };
      g.globalAlpha = 0.5;
      g.fillRect(box.x, box.y, box.w, box.h);
      g.globalAlpha = 1;
      g.fillRect(box.x, box.y - h * 0.08, 2, box.h + h * 0.16);
      const words = `Piece ${i + 1}: ${duration(packet.samples / rate)} of speech, arrived at ${duration(packet.t)}`;
      this.boxes.push({ ...box, w: Math.max(6, box.w), words });
    });
  }

  drawBuffer(g, x, { y, h, color }, width, pen) {
    const { levels, firstSound } = this.turn;
    if (!levels.length) return;
    const most = Math.max(0.2, ...levels.map((level) => level.seconds));
    const up = (seconds) => y + h - 3 - (seconds / most) * (h - 8);
    g.globalAlpha = 1;
    g.strokeStyle = g.fillStyle = color;
    g.lineWidth = 1.5;
    g.beginPath();
    levels.forEach((level, i) => (i ? g.lineTo(x(level.t), up(level.seconds)) : g.moveTo(x(level.t), up(level.seconds))));
    g.stroke();
    g.lineTo(x(levels.at(-1).t), y + h - 3);
    g.lineTo(x(levels[0].t), y + h - 3);
    g.closePath();
    g.globalAlpha = 0.18;
    g.fill();
    g.globalAlpha = 0.3; // where there was nothing to play
    g.fillStyle = pen.alarm;
    levels.forEach((level, i) => {
      if (level.starving && i) g.fillRect(x(levels[i - 1].t), y + 3, x(level.t) - x(levels[i - 1].t), h - 6);
    });
    g.globalAlpha = 1;
    if (firstSound !== null && x(firstSound) < width) {
      g.fillStyle = color;
      g.fillRect(x(firstSound) - 1, y + 2, 2, h - 4);
    }
    this.boxes.push({ x: 0, y, w: width, h, words: `Playing: up to ${duration(most)} of sound in hand` });
  }

  drawNow(g, x, height, pen) {
    const turn = this.turn;
    if (turn.endedAt !== null && (this.zoom === "making" || turn.playedAt !== null)) return;
    g.globalAlpha = 0.5;
    g.fillStyle = pen.ink;
    g.fillRect(x(turn.clock()), 0, 1, height - AXIS);
    g.globalAlpha = 1;
  }

  point(px, py) {
    const hit = this.boxes.find(({ x, y, w, h }) => px >= x - 2 && px <= x + w + 2 && py >= y && py <= y + h);
    if (hit) this.source.textContent = hit.words;
    else this.describe();
  }

  describe() {
    const turn = this.turn;
    if (!turn) return;
    this.source.textContent = turn.spans
      ? "As the server measured it. Point at a bar to see what it is."
      : "From what arrives here; pale bars are guesses.";
    const parts = [`${turn.words.length} pieces of text`, `${turn.packets.length} pieces of speech`];
    if (turn.firstText !== null) parts.push(`first words after ${duration(turn.firstText)}`);
    if (turn.firstAudio !== null) parts.push(`first sound after ${duration(turn.firstAudio)}`);
    parts.push(`${turn.underruns} gaps`);
    this.canvas.setAttribute("aria-label", `Timeline of the pipeline: ${parts.join(", ")}`);
  }
}

/** Stages in their order, those behind that only a timeline names; each link before the stage that it leads to. */
function lanesOf(stages, spans) {
  const seen = [...new Set(spans.map((span) => span.lane))].filter((lane) => !OURS.includes(lane));
  const links = new Set(seen.filter(isLink));
  const lanes = [];
  for (const stage of new Set([...stages, ...seen.filter((lane) => !isLink(lane))])) {
    for (const link of links) {
      if (link.split(">")[1] !== stage) continue;
      lanes.push(link);
      links.delete(link);
    }
    lanes.push(stage);
  }
  return [...lanes, ...links];
}

/** The server's spans or, before they come, what can be inferred. */
const allSpans = (turn, stages) => turn.spans ?? inferred(turn, stages);

/** What the stages must have been doing, judged by what has arrived: the first writes, the last makes the packets. */
function inferred(turn, stages) {
  if (!stages.length || turn.nothing) return [];
  const now = turn.endedAt ?? turn.clock();
  const { firstText, firstAudio, packets, words } = turn;
  const [first, ...later] = stages;
  const spans = [{ lane: first, name: "reads the question", start: 0, stop: firstText ?? firstAudio ?? now, guess: true }];
  const lastText = words.at(-1)?.t ?? null;
  if (firstText !== null && lastText > firstText) {
    spans.push({ lane: first, name: "writes", start: firstText, stop: lastText, guess: true });
  }
  if (!packets.length || !later.length) return spans;
  const lastAudio = packets.at(-1).t;
  const opened = Math.min(firstText ?? firstAudio, firstAudio);
  const last = later.pop();
  for (const lane of later) spans.push({ lane, name: "speaks", start: opened, stop: lastAudio, guess: true });
  let before = opened;
  packets.forEach((packet, i) => {
    spans.push({ lane: last, name: `packet ${i + 1}`, start: before, stop: packet.t, guess: true });
    before = packet.t;
  });
  return spans;
}

function drawStaff(g, { y, h }, width, pen) {
  g.globalAlpha = 1;
  g.fillStyle = pen.line;
  g.fillRect(0, Math.round(y + h / 2), width, 1);
}

function drawAxis(g, x, end, width, height, pen) {
  const least = end / Math.max(2, width / 84); // a label needs about 84 pixels
  const ten = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((m) => m * ten).find((s) => s >= least);
  g.font = `11px ${pen.font}`;
  g.textBaseline = "bottom";
  for (let i = 0; i * step <= end; i++) {
    const at = Math.round(x(i * step));
    g.globalAlpha = 0.6;
    g.fillStyle = pen.line;
    g.fillRect(at, 0, 1, height - AXIS + 4);
    g.globalAlpha = 1;
    g.fillStyle = pen.ink;
    g.textAlign = i ? "center" : "left";
    const label = i === 0 ? "0" : step < 1 && end < 2 ? `${Math.round(i * step * 1000)} ms` : `${+(i * step).toFixed(2)} s`;
    if (at < width - 18) g.fillText(label, at, height - 2);
  }
}

