// Draws a turn as a score: one lane per stage and link, time to the right. While the answer is made, what the stages
// do is inferred from what arrives; the server's own timeline replaces that when it comes.

import { duration } from "./turn.js";

const ORDER = ["thinker", "thinker>talker", "talker", "talker>code2wav", "code2wav", "packets", "playback"];
const NAMES = { thinker: "Thinker", talker: "Talker", code2wav: "Code2wav", packets: "Packets", playback: "Playback" };
const SLOW_MS = 250; // between pictures when the reader asked for less motion
const AXIS = 22; // pixels

const READING = /^(prompt|prefill|first)/; // spans before a stage's first output
const isLink = (lane) => lane.includes(">");

export class Timeline {
  constructor({ canvas, lanes, source }) {
    Object.assign(this, { canvas, list: lanes, source });
    this.turn = null;
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
    this.setLanes(ORDER.filter((lane) => !isLink(lane)));
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
    this.list.replaceChildren(
      ...lanes.map((lane) => {
        const item = document.createElement("li");
        item.dataset.lane = isLink(lane) ? "link" : (NAMES[lane] ? lane : "other");
        item.dataset.name = lane;
        item.textContent = isLink(lane) ? `→ ${lane.split(">")[1]}` : (NAMES[lane] ?? lane);
        return item;
      }),
    );
  }

  draw() {
    this.drawnAt = performance.now();
    const spans = this.turn ? allSpans(this.turn) : [];
    const named = new Set(spans.map((s) => s.lane));
    const extra = [...named].filter((lane) => !ORDER.includes(lane));
    this.setLanes([
      ...ORDER.slice(0, 5).filter((lane) => !isLink(lane) || named.has(lane)), ...extra, ...ORDER.slice(5),
    ]);

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
      const spanLanes = rows.filter((row) => row.lane !== "packets" && row.lane !== "playback");
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
      this.boxes.push({ ...box, words: `${NAMES[lane] ?? lane}: ${span.name}, at ${duration(span.start)}${took}` });
    }
    if (lane !== "thinker" || this.turn.spans) return;
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
      const words = `Packet ${i + 1}: ${duration(packet.samples / rate)} of speech, at ${duration(packet.t)}`;
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
    this.boxes.push({ x: 0, y, w: width, h, words: `Playback: up to ${duration(most)} in hand` });
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
      ? "Stages as the server measured them."
      : "From what arrives here; pale bars are inferred.";
    const parts = [`${turn.words.length} pieces of text`, `${turn.packets.length} packets of speech`];
    if (turn.firstText !== null) parts.push(`first text after ${duration(turn.firstText)}`);
    if (turn.firstAudio !== null) parts.push(`first audio after ${duration(turn.firstAudio)}`);
    parts.push(`${turn.underruns} underruns`);
    this.canvas.setAttribute("aria-label", `Timeline of the pipeline: ${parts.join(", ")}`);
  }
}

/** The server's spans, and for lanes it said nothing about what can be inferred. */
function allSpans(turn) {
  const told = turn.spans ?? [];
  const lanes = new Set(told.map((span) => span.lane));
  return [...told, ...inferred(turn).filter((span) => !lanes.has(span.lane))];
}

/** What the stages must have been doing, judged by what has arrived. */
function inferred(turn) {
  const now = turn.endedAt ?? turn.clock();
  const { firstText, firstAudio, packets, words } = turn;
  const spans = [{ lane: "thinker", name: "reads the question", start: 0, stop: firstText ?? firstAudio ?? now, guess: true }];
  const lastText = words.at(-1)?.t ?? null;
  if (firstText !== null && lastText > firstText) {
    spans.push({ lane: "thinker", name: "writes", start: firstText, stop: lastText, guess: true });
  }
  if (!packets.length) return spans;
  const lastAudio = packets.at(-1).t;
  const opened = Math.min(firstText ?? firstAudio, firstAudio);
  spans.push({ lane: "talker", name: "speaks", start: opened, stop: lastAudio, guess: true });
  let before = opened;
  packets.forEach((packet, i) => {
    spans.push({ lane: "code2wav", name: `packet ${i + 1}`, start: before, stop: packet.t, guess: true });
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

