// Records one utterance at a time, or hands over pieces as they come (`onPiece`). The microphone is opened for that and
// given back after it, so that the browser's "in use" sign tells the truth.

import { joinFloats } from "./audio.js";
import { store, stored } from "./storage.js";

const WANTED_RATE = 24000;
const ASK = { echoCancellation: true, noiseSuppression: true, autoGainControl: true, channelCount: 1 };

const CHOSEN = "stretto-microphone";

/** Fill a list with the microphones there are. Browsers tell their names once the page may use one. */
export async function listMicrophones(list) {
  const devices = (await navigator.mediaDevices?.enumerateDevices?.().catch(() => [])) ?? [];
  const found = devices.filter((device) => device.kind === "audioinput" && device.deviceId && device.deviceId !== "default");
  const options = found.map((device, i) => new Option(device.label || `Microphone ${i + 1}`, device.deviceId));
  list.replaceChildren(new Option("The browser's choice", ""), ...options);
  list.value = stored(localStorage, CHOSEN);
  if (list.selectedIndex < 0) list.value = ""; // it is not plugged in now
}

export function chooseMicrophone(id) {
  store(localStorage, CHOSEN, id);
}

/** The chosen microphone, or any if that one is gone. */
async function openMicrophone() {
  const chosen = stored(localStorage, CHOSEN);
  try {
    return await navigator.mediaDevices.getUserMedia({ audio: chosen ? { ...ASK, deviceId: { exact: chosen } } : ASK });
  } catch (error) {
    if (!chosen || !["OverconstrainedError", "NotFoundError"].includes(error.name)) throw error;
    return navigator.mediaDevices.getUserMedia({ audio: ASK });
  }
}

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
      "Allow it for this page in the browser's address bar, then try again. You can always type.",
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
    this.onLevel = onLevel; // (root mean square of a piece, seconds so far)
    this.onPiece = null; // (samples, rate): then nothing is kept
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
      this.media = await openMicrophone();
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
    if (this.onPiece) this.onPiece(samples, this.context.sampleRate);
    else this.pieces.push(samples);
    this.length += samples.length;
    this.onLevel(level, this.length / this.context.sampleRate);
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
