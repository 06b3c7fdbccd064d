// Records one utterance at a time. The microphone is opened for a recording and given back after it, so that the
// browser's "in use" sign tells the truth.

import { joinFloats } from "./audio.js";

const WANTED_RATE = 24000;
const ASK = { echoCancellation: true, noiseSuppression: true, autoGainControl: true, channelCount: 1 };

/** Why there is no microphone, in words a person can act on. */
export class MicrophoneError extends Error {
  constructor(message, advice) {
    super(message);
    this.advice = advice;
  }
}

function explain(error) {
  if (error instanceof MicrophoneError) return error;
  if (error.name === "NotAllowedError" || error.name === "SecurityError") {
    return new MicrophoneError(
      "The microphone is not allowed.",
      "Allow it for this page in the browser's address bar, then press the microphone again. You can always type.",
    );
  }
  if (error.name === "NotFoundError") {
    return new MicrophoneError("No microphone was found.", "Connect one and try again, or type your question.");
  }
  if (error.name === "NotReadableError") {
    return new MicrophoneError("The microphone is in use.", "Close the other program that uses it and try again.");
  }
  return new MicrophoneError(`The microphone failed: ${error.message}`, "You can always type your question.");
}

export class Microphone {
  constructor(onLevel) {
    this.onLevel = onLevel; // (level 0..1, seconds so far)
    this.reset();
  }

  reset() {
    Object.assign(this, { media: null, context: null, node: null, pieces: [], length: 0, onLast: null });
  }

  get recording() {
    return this.node !== null;
  }

  async start() {
    if (!navigator.mediaDevices || !globalThis.AudioWorkletNode) {
      throw new MicrophoneError(
        "This page may not use the microphone.",
        "Browsers allow it only over HTTPS or on localhost. You can always type.",
      );
    }
    try {
      this.media = await navigator.mediaDevices.getUserMedia({ audio: ASK });
      await this.connect(WANTED_RATE).catch(() => this.connect(undefined));
    } catch (error) {
      await this.release();
      throw explain(error);
    }
  }

  // Chromium and Safari resample the microphone to the context's rate. Firefox refuses to join the two: then we
  // record at the device's own rate, which the WAV header tells the server.
  async connect(rate) {
    const context = new AudioContext(rate ? { sampleRate: rate } : {});
    try {
      await context.audioWorklet.addModule(new URL("microphone-worklet.js", import.meta.url));
      const form = { numberOfOutputs: 0, channelCount: 1, channelCountMode: "explicit" };
      const node = new AudioWorkletNode(context, "stretto-microphone", form);
      // Pieces come as soon as the source is joined, and may still come after the recording was given up.
      node.port.onmessage = ({ data }) => context === this.context && this.take(data);
      Object.assign(this, { context, pieces: [], length: 0 });
      context.createMediaStreamSource(this.media).connect(node);
      await context.resume();
      this.node = node;
    } catch (error) {
      this.context = null;
      await context.close();
      throw error;
    }
  }

  take({ samples, level, last }) {
    this.pieces.push(samples);
    this.length += samples.length;
    this.onLevel(Math.min(1, level * 4), this.length / this.context.sampleRate);
    if (last) this.onLast?.();
  }

  /** End the recording: {samples, rate}. */
  async stop() {
    const flushed = new Promise((resolve) => (this.onLast = resolve));
    this.node.port.postMessage("flush");
    await flushed;
    const recorded = { samples: joinFloats(this.pieces), rate: this.context.sampleRate };
    await this.release();
    return recorded;
  }

  /** Give the microphone back; what was recorded is dropped. */
  async release() {
    const { media, context } = this;
    this.reset();
    media?.getTracks().forEach((track) => track.stop());
    if (context && context.state !== "closed") await context.close();
  }
}
