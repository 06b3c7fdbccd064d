// One question and its answer: what arrived when, and the figures that follow from it. Times are seconds from sending.

import { floatsFromPcm16, fromBase64 } from "./audio.js";

export class Turn {
  constructor(rate, now = performance.now()) {
    this.rate = rate;
    this.sentAt = now;
    this.text = "";
    this.words = []; // {t, length}: pieces of text
    this.packets = []; // {t, start, samples}: start and samples count samples
    this.sound = []; // Float32Array per packet, for replay
    this.levels = []; // {t, seconds, starving}: the playback buffer
    this.firstSound = null;
    this.playedAt = null; // when the last sample had been played
    this.endedAt = null; // when the stream ended, well or not
    this.underruns = 0;
    this.starved = 0; // seconds
    this.usage = null;
    this.spans = null; // the server's timeline
    this.outcome = null; // "done", "stopped", "failed"
  }

  /** The question leaves only now. */
  restart(now = performance.now()) {
    this.sentAt = now;
  }

  clock(now = performance.now()) {
    return (now - this.sentAt) / 1000;
  }

  /** Take one event of the stream. Returns {text, samples}: what is new to show and to play. */
  take(event) {
    const t = this.clock();
    if (event.usage) this.usage = event.usage;
    if (event.stretto?.timeline?.length) this.spans = readSpans(event.stretto.timeline);
    const delta = event.choices?.[0]?.delta ?? {};
    const text = delta.content || delta.audio?.transcript || "";
    const samples = delta.audio?.data ? floatsFromPcm16(fromBase64(delta.audio.data)) : null;
    if (text) {
      this.text += text;
      this.words.push({ t, length: text.length });
    }
    if (samples?.length) {
      this.packets.push({ t, start: this.samples, samples: samples.length });
      this.sound.push(samples);
    }
    return { text, samples };
  }

  /** A report of the player's. */
  hear(report, latency) {
    const t = this.clock();
    if (report.event === "started") this.firstSound = t + latency;
    if (report.event === "drained") this.playedAt = t + latency;
    this.underruns = report.underruns;
    this.starved = report.starved / this.rate;
    const starving = report.state === "filling" && this.firstSound !== null;
    this.levels.push({ t, seconds: report.buffered / this.rate, starving });
  }

  /** The listener stopped it: what was in hand is dropped. */
  hush() {
    this.playedAt = this.clock();
    this.levels.push({ t: this.playedAt, seconds: 0, starving: false });
  }

  end(outcome) {
    this.outcome = outcome;
    this.endedAt = this.clock();
  }

  get samples() {
    const last = this.packets.at(-1);
    return last ? last.start + last.samples : 0;
  }

  get firstText() {
    return this.words[0]?.t ?? null;
  }

  get firstAudio() {
    return this.packets[0]?.t ?? null;
  }

  get buffered() {
    return this.levels.at(-1)?.seconds ?? null;
  }

  get audioSeconds() {
    return this.samples / this.rate;
  }

  /** Time to make the speech over its length. */
  get rtf() {
    return this.packets.length ? this.packets.at(-1).t / this.audioSeconds : null;
  }

  get tokens() {
    const details = this.usage?.completion_tokens_details;
    return details?.text_tokens ?? (details ? null : this.usage?.completion_tokens) ?? this.words.length;
  }

  /** Tokens a second after the first; a piece of text counts as one until the server tells the number. */
  get tokenRate() {
    const time = this.words.length > 1 ? this.words.at(-1).t - this.words[0].t : 0;
    return time > 0.001 ? (this.tokens - 1) / time : null;
  }

  figures() {
    const { firstText, firstAudio, firstSound, underruns, starved, buffered, rtf, tokenRate, audioSeconds } = this;
    return {
      firstText, firstAudio, firstSound, underruns, starved, buffered, rtf, tokenRate, audioSeconds,
      total: this.endedAt, outcome: this.outcome, packets: this.packets.length, text: this.text,
      measured: this.spans !== null,
    };
  }
}

/** Spans as objects, from objects or from rows [lane, name, start, stop]; what cannot be drawn is left out. */
function readSpans(timeline) {
  return timeline
    .map((s) => (Array.isArray(s) ? { lane: s[0], name: s[1], start: s[2], stop: s[3] } : s))
    .filter((s) => typeof s.lane === "string" && Number.isFinite(s.start) && s.stop >= s.start);
}

/** "84 ms", "1.24 s" or a dash. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  return `${seconds.toFixed(seconds < 9.995 ? 2 : 1)} s`;
}
