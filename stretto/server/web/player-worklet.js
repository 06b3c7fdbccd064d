// The player's audio thread: a queue of packets that is played without clicks, whatever the network does.
//
// Packets are queued as they come, not copied into a ring: an answer may be minutes long and comes faster than it is
// heard, and growing a ring would copy it on this thread. Playing starts when `lead` samples are in hand. When the
// queue runs dry before the end, the last value dies away (no click), the gap is counted, and the lead doubles.

const FADE = 120; // samples of fade-in, 5 ms at 24 kHz
const DECAY = 0.96; // per sample, of what is left when sound stops: gone in about 5 ms
const REPORT_BLOCKS = 8; // a report every 1024 samples, 43 ms at 24 kHz
const LONGEST_LEAD_S = 0.6;
const AUDIBLE = 0.004; // a sample that can be heard: -48 dB; voices often begin with some silence

export class Playout {
  constructor(rate) {
    this.longestLead = Math.round(LONGEST_LEAD_S * rate);
    this.last = 0; // the last sample that was played from the queue
    this.tail = 0; // what still dies away
    this.power = this.measured = 0; // of what was played since the last `takeLevel`
    this.begin(0);
  }

  /** A new stream: forgets what is queued. */
  begin(lead) {
    this.clear();
    Object.assign(this, { state: "filling", lead, ended: false, started: false, played: 0, underruns: 0, starved: 0 });
    this.tentative = false; // the latest underrun may turn out to have been the end
    this.audible = false; // something of it was played that can be heard
  }

  clear() {
    this.queue = [];
    this.head = 0; // samples taken from queue[0]
    this.buffered = 0;
    this.tail += this.state === "playing" ? this.last : 0;
  }

  push(samples) {
    if (!samples.length || this.state === "idle") return;
    this.queue.push(samples);
    this.buffered += samples.length;
    this.tentative = false;
  }

  /** Nothing more will be pushed. A queue that was dry since the last packet was at its end, not starved. */
  end() {
    this.ended = true;
    if (!this.tentative) return;
    this.tentative = false;
    this.underruns -= 1;
    this.starved -= this.dry;
  }

  stop() {
    this.clear();
    this.state = "idle";
  }

  /** Fill one block. Returns what happened in it: "started", "underrun", "drained" or null. */
  pull(out) {
    let event = null;
    if (this.state === "filling" && (this.ended || (this.buffered > 0 && this.buffered >= this.lead))) {
      if (!this.started && this.buffered) event = "started";
      this.started ||= this.buffered > 0;
      this.state = "playing";
      this.fade = 0;
    }
    let n = 0;
    let dried = false;
    if (this.state === "playing") {
      n = this.read(out);
      dried = n < out.length;
      if (dried) event = this.runDry();
    }
    if (this.state === "filling" && this.started) {
      this.starved += out.length - n;
      this.dry += out.length - n;
    }
    for (let i = 0; i < out.length; i++) {
      if (dried && i === n) this.tail += this.last * DECAY;
      out[i] = (i < n ? out[i] : 0) + this.tail;
      this.tail *= DECAY;
    }
    if (Math.abs(this.tail) < 1e-5) this.tail = 0;
    this.measure(out, n);
    return event;
  }

  /** `n`: samples at the front of it that are the stream's own. */
  measure(out, n) {
    for (let i = 0; i < out.length; i++) {
      this.power += out[i] * out[i];
      if (i < n && Math.abs(out[i]) >= AUDIBLE) this.audible = true;
    }
    this.measured += out.length;
  }

  /** The root mean square of what was played since the last call. */
  takeLevel() {
    const level = this.measured ? Math.sqrt(this.power / this.measured) : 0;
    this.power = this.measured = 0;
    return level;
  }

  read(out) {
    const n = Math.min(out.length, this.buffered);
    for (let i = 0; i < n; ) {
      const part = this.queue[0];
      const take = Math.min(n - i, part.length - this.head);
      for (let k = 0; k < take; k++) {
        const gain = this.fade < FADE ? this.fade++ / FADE : 1;
        out[i + k] = part[this.head + k] * gain;
      }
      i += take;
      this.head += take;
      if (this.head === part.length) {
        this.queue.shift();
        this.head = 0;
      }
    }
    this.buffered -= n;
    this.played += n;
    if (n) this.last = out[n - 1];
    return n;
  }

  runDry() {
    if (this.ended) {
      this.state = "idle";
      return "drained";
    }
    this.state = "filling";
    this.underruns += 1;
    this.tentative = true;
    this.dry = 0;
    this.lead = Math.min(Math.max(2 * this.lead, 8 * FADE), this.longestLead);
    return "underrun";
  }
}

class PlayerProcessor extends AudioWorkletProcessor {
  constructor() {
    super();
    this.playout = new Playout(sampleRate);
    this.playout.stop();
    this.stream = 0;
    this.blocks = 0;
    this.port.onmessage = ({ data }) => this.receive(data);
  }

  receive(message) {
    if (message.type === "begin") {
      this.stream = message.stream;
      this.playout.begin(message.lead);
    } else if (message.stream !== this.stream) {
      return; // of an answer that was stopped
    } else if (message.type === "push") {
      this.playout.push(message.samples);
    } else if (message.type === "end") {
      this.playout.end();
    } else if (message.type === "stop") {
      this.playout.stop();
    }
  }

  report(event) {
    const { buffered, played, underruns, starved, state, audible } = this.playout;
    const level = this.playout.takeLevel();
    this.port.postMessage({ stream: this.stream, event, state, buffered, played, underruns, starved, audible, level });
  }

  process(inputs, outputs) {
    const [first, ...others] = outputs[0];
    const { audible } = this.playout;
    const event = this.playout.pull(first);
    for (const other of others) other.set(first);
    this.blocks += 1;
    const heard = this.playout.audible && !audible;
    if (event || heard || (this.playout.state !== "idle" && this.blocks % REPORT_BLOCKS === 0)) this.report(event);
    return true;
  }
}

registerProcessor("stretto-player", PlayerProcessor);
