// The player as the page sees it: streams of samples in, reports out. One audio context for the page's life.

import { ApiError, Unreachable } from "./api.js";

export class Player {
  /** `onReport({stream, event, state, buffered, played, underruns, starved, audible, level})` is called about 23 times a
   * second. `audible`: something of the stream was played that can be heard; `level`: root mean square since the last. */
  constructor(onReport) {
    this.onReport = onReport;
    this.context = null;
    this.node = null;
    this.stream = 0;
    this.opening = null;
  }

  /** Must first be called from a click or a key press: browsers let no page play before. */
  async open(rate) {
    if (this.context && this.context.sampleRate !== rate) await this.close();
    this.opening ??= this.build(rate);
    try {
      await this.opening;
    } catch (error) {
      this.opening = null; // build it anew next time
      // The worklet's file could not be fetched.
      if (error.name === "AbortError") throw new Unreachable("The server cannot be reached.");
      throw new ApiError(`This browser cannot play sound (${error.message}). Speech can be turned off in the settings.`);
    }
    if (this.context.state !== "running") {
      // Not awaited: where the browser refuses, the promise stays open until somebody clicks.
      this.context.resume().catch(() => {});
    }
  }

  async build(rate) {
    this.context ??= new AudioContext({ sampleRate: rate, latencyHint: "interactive" });
    await this.context.audioWorklet.addModule(new URL("player-worklet.js", import.meta.url));
    this.node = new AudioWorkletNode(this.context, "stretto-player", { numberOfInputs: 0, outputChannelCount: [1] });
    this.node.port.onmessage = ({ data }) => this.onReport(data);
    this.node.connect(this.context.destination);
  }

  async close() {
    await this.context.close();
    this.context = this.node = this.opening = null;
  }

  get blocked() {
    return this.context !== null && this.context.state !== "running";
  }

  get rate() {
    return this.context.sampleRate;
  }

  /** Delay between a sample leaving the queue and the loudspeaker, in seconds. */
  get latency() {
    return this.context ? this.context.outputLatency || this.context.baseLatency || 0 : 0;
  }

  /** Start a stream; what was playing dies away. Returns the stream's number. */
  begin(leadMs) {
    this.stream += 1;
    const lead = Math.round((leadMs / 1000) * this.rate);
    this.node.port.postMessage({ type: "begin", stream: this.stream, lead });
    return this.stream;
  }

  push(stream, samples) {
    this.node.port.postMessage({ type: "push", stream, samples }, [samples.buffer]);
  }

  end(stream) {
    this.node.port.postMessage({ type: "end", stream });
  }

  stop() {
    this.node?.port.postMessage({ type: "stop", stream: this.stream });
  }
}
