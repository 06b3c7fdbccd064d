// One question and its answer: what arrived when, and the figures that follow from it. Times are seconds from sending.

import { floatsFromPcm16, fromBase64 } from "./audio.js";

export class Turn {
  /** `live`: of a conversation with an open microphone. Its times are from when the turn was found to be over, `pause`
   * seconds after it was; null where the server does not say. */
  constructor(rate, now = performance.now(), { live = false, pause = null } = {}) {
    this.rate = rate;
    this.sentAt = now;
    this.text = "";
    this.words = []; // {t, length}: pieces of text
    this.packets = []; // {t, start, samples}: start and samples count samples
    this.sound = []; // Float32Array per packet, for replay
    this.levels = []; // {t, seconds, starving}: the playback buffer
    this.firstSound = null; // when the first sample was played
    this.firstAudible = null; // when the first was played that can be heard
    this.playedAt = null; // when the last sample had been played
    this.endedAt = null; // when the stream ended, well or not
    this.underruns = 0;
    this.starved = 0; // seconds
    this.usage = null;
    this.spans = null; // the server's timeline
    this.outcome = null; // "done", "stopped", "failed"
    this.live = live;
    this.pause = pause;
    this.making = null; // seconds from then to the first sound, at the server
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
    if (event.usage) this.usage = event.usage;
    if (event.stretto?.timeline?.length) this.spans = readSpans(event.stretto.timeline);
    const delta = event.choices?.[0]?.delta ?? {};
    const text = delta.content || delta.audio?.transcript || "";
    const samples = delta.audio?.data ? floatsFromPcm16(fromBase64(delta.audio.data)) : null;
    this.add(text, samples);
    return { text, samples };
  }

  /** More of the answer. */
  add(text, samples) {
    const t = this.clock();
    if (text) {
      this.text += text;
      this.words.push({ t, length: text.length });
    }
    if (samples?.length) {
      this.packets.push({ t, start: this.samples, samples: samples.length });
      this.sound.push(samples);
    }
  }

  /** What the server says about a live answer. */
  measure({ vad_wait_s = null, speech_to_audio_s = null, timeline = [] }) {
    this.pause = vad_wait_s ?? this.pause;
    if (speech_to_audio_s !== null) this.making = Math.max(0, speech_to_audio_s - (vad_wait_s ?? 0));
    if (timeline.length) this.spans = readSpans(timeline);
  }

  /** From the end of the question, spoken or sent, to the first sound that could be heard. Null where it is not known. */
  get heardAfter() {
    if (this.firstAudible === null || (this.live && this.pause === null)) return null;
    return this.firstAudible + (this.pause ?? 0);
  }

  /** [{name, seconds, stage}], in their order: of the server's part, what each stage took to its first output. */
  get parts() {
    if (!this.live || this.heardAfter === null || this.making === null) return null;
    const { pause, firstAudio, firstSound, firstAudible } = this;
    const making = Math.min(this.making, firstAudio); // the end of the turn was heard of late: the rest was in that
    return [
      { name: "pause", seconds: pause },
      ...madeOf(this.spans ?? [], making),
      { name: "network", seconds: firstAudio - making },
      { name: "buffer", seconds: firstSound - firstAudio },
      ...(firstAudible > firstSound ? [{ name: "silence", seconds: firstAudible - firstSound }] : []),
    ];
  }

  /** A report of the player's. */
  hear(report, latency) {
    const t = this.clock();
    if (report.event === "started") this.firstSound = t + latency;
    if (report.audible) this.firstAudible ??= t + latency;
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

  /** It was refused, or failed before anything came. */
  get nothing() {
    return this.outcome === "failed" && !this.text && !this.packets.length;
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
      measured: this.spans !== null, live: this.live, heardAfter: this.heardAfter, parts: this.parts,
    };
  }
}

/** Spans as objects, from objects or from rows [lane, name, start, stop]; what cannot be drawn is left out. */
function readSpans(timeline) {
  return timeline
    .map((s) => (Array.isArray(s) ? { lane: s[0], name: s[1], start: s[2], stop: s[3] } : s))
    .filter((s) => typeof s.lane === "string" && Number.isFinite(s.start) && s.stop >= s.start);
}

/** The server's part of a live answer, by what its stages were doing. `making` is from when the turn was over to when the
 * first sound left; the spans count from when the engine was asked, which may be before that or after. */
function madeOf(spans, making) {
  const firsts = firstOutputs(spans);
  if (!firsts.length) return [{ name: "making", seconds: making }];
  const last = Math.max(...firsts.map((one) => one.at));
  let before = Math.max(0, last - making); // what was done before the turn was over made nobody wait
  const parts = [{ name: "server", seconds: Math.max(0, making - last) }];
  for (const { at, ...one } of firsts) {
    parts.push({ ...one, seconds: Math.max(0, at - before) });
    before = Math.max(before, at);
  }
  return parts;
}

/** When each stage had its first output, and before it the encoders of media: [{name, stage, at}], the earliest first. */
function firstOutputs(spans) {
  const firsts = new Map();
  for (const { lane, name, stop } of spans) {
    if (lane === "packets" || lane.includes(">")) continue;
    const key = name === "encode" ? "encode" : lane;
    const known = firsts.get(key);
    if (!known) firsts.set(key, { name: key === "encode" ? key : "stage", stage: lane, span: name, at: stop });
    else if (known.span === name) known.at = name === "encode" || isFirst(name) ? Math.max(known.at, stop) : known.at;
  }
  return [...firsts.values()].map(({ span, ...one }) => one).sort((a, b) => a.at - b.at);
}

/** Spans before a stage's first output; a prompt in chunks has several. */
const isFirst = (name) => /^(prompt|prefill|first)/.test(name);

/** "84 ms", "1.24 s" or a dash. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  return `${seconds.toFixed(seconds < 9.995 ? 2 : 1)} s`;
}
