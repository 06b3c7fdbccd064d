// A conversation with an open microphone, over the server's realtime WebSocket. The server finds out when somebody
// speaks and when a turn is over; this plays what it answers, and falls silent at once when it is spoken to.

import { floatsFromPcm16, fromBase64, pcm16, resample, toBase64 } from "./audio.js";
import { Microphone } from "./microphone.js";
import { Turn } from "./turn.js";

const RATE = 24000; // of both directions
const HARMLESS = ["response_cancel_not_active"];
const CLOSED = {
  1001: "The server has closed the conversation.",
  1008: "The server has closed the conversation: nothing was said for too long.",
  1012: "The server is restarting.",
};

export class Live {
  /** `onPlay({turn, stream})` when an answer begins, `onHush()` when it is stopped, `onLevel(level)` of the microphone,
   * `onEnd(message)` when the conversation is over: null if the person ended it. */
  constructor({ conversation, player, onPlay, onHush, onLevel, onChange, onEnd }) {
    Object.assign(this, { conversation, player, onPlay, onHush, onChange, onEnd });
    this.microphone = new Microphone(onLevel);
    this.microphone.onPiece = (samples, rate) => this.speak(samples, rate);
    Object.assign(this, { opening: false, unwanted: false }); // the browser may still be asking for the microphone
    this.reset();
  }

  reset() {
    Object.assign(this, { socket: null, answer: null, entry: null, entries: new Map(), stoppedAt: null, speaking: false });
  }

  get open() {
    return this.socket !== null;
  }

  /** Must be called from a click. Throws a MicrophoneError if there is none. */
  async start({ url, key, session, history, leadMs }) {
    Object.assign(this, { leadMs, opening: true, unwanted: false });
    try {
      await this.player.open(RATE);
      await this.microphone.start();
    } finally {
      this.opening = false;
    }
    if (this.unwanted) return this.microphone.release();
    const socket = new WebSocket(url, ["realtime", ...(key ? [`openai-insecure-api-key.${key}`] : [])]);
    this.socket = socket;
    socket.onopen = () => {
      this.send({ type: "session.update", session });
      for (const item of history) this.send({ type: "conversation.item.create", item });
    };
    socket.onmessage = ({ data }) => socket === this.socket && this.take(JSON.parse(data));
    socket.onclose = ({ code, reason }) => {
      if (socket !== this.socket) return;
      this.end(CLOSED[code] ?? (reason || "The server cannot be reached, or refused the conversation."));
    };
  }

  /** The person is done. */
  stop() {
    if (this.open) this.end(null);
    this.unwanted = true;
  }

  end(message) {
    const { socket } = this;
    this.hush();
    if (this.answer) this.finish("stopped");
    this.reset();
    socket.close(1000);
    this.microphone.release();
    this.onEnd(message);
  }

  send(event) {
    if (this.socket.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(event));
  }

  speak(samples, rate) {
    if (!this.open) return;
    const sound = rate === RATE ? samples : resample(samples, rate, RATE);
    this.send({ type: "input_audio_buffer.append", audio: toBase64(pcm16(sound)) });
  }

  take(event) {
    const handler = HANDLERS[event.type];
    if (handler) handler.call(this, event);
  }

  begin(response) {
    const entry = this.entry ?? this.conversation.add({ text: "", files: [], audio: null });
    const turn = new Turn(RATE, this.stoppedAt ?? performance.now());
    turn.live = true;
    this.conversation.begin(entry, turn);
    const stream = this.player.begin(this.leadMs);
    this.answer = { id: response.id, entry, turn, stream, item: null, played: 0 };
    Object.assign(this, { entry: null, stoppedAt: null });
    this.onPlay({ turn, stream });
  }

  /** What the player reports; true if the stream is ours. */
  heard(report) {
    const { answer } = this;
    if (answer && report.stream === answer.stream) answer.played = report.played;
    return Boolean(answer && report.stream === answer.stream);
  }

  /** The person wants this answer no more. */
  quiet() {
    this.hush();
    this.send({ type: "response.cancel" });
  }

  /** Somebody speaks: silence, and the server is told how much was heard. */
  hush() {
    const { answer } = this;
    if (!answer || answer.turn.playedAt !== null || !answer.turn.samples) return;
    this.player.stop();
    answer.turn.hush();
    if (answer.item) {
      const heardMs = Math.floor((answer.played / RATE) * 1000);
      this.send({ type: "conversation.item.truncate", item_id: answer.item, content_index: 0, audio_end_ms: heardMs });
    }
    this.onHush();
  }

  finish(outcome) {
    const { entry, turn, stream } = this.answer;
    turn.end(outcome);
    if (turn.playedAt === null) this.player.end(stream);
    this.conversation.finish(entry);
    this.onChange();
  }

  /** Words of what the person said. */
  words(itemId, text, whole) {
    const entry = this.entries.get(itemId);
    if (entry) this.conversation.hear(entry, whole ? text : entry.question.text + text);
  }
}

const HANDLERS = {
  "input_audio_buffer.speech_started"() {
    this.speaking = true;
    this.hush();
    this.onChange();
  },
  "input_audio_buffer.speech_stopped"({ item_id }) {
    this.speaking = false;
    this.stoppedAt = performance.now();
    this.entry = this.conversation.add({ text: "", files: [], audio: null });
    this.entries.set(item_id, this.entry);
    this.onChange();
  },
  "conversation.item.input_audio_transcription.delta"({ item_id, delta }) {
    this.words(item_id, delta, false);
  },
  "conversation.item.input_audio_transcription.completed"({ item_id, transcript }) {
    this.words(item_id, transcript, true);
  },
  "response.created"({ response }) {
    this.begin(response);
  },
  "response.output_item.added"({ response_id, item }) {
    if (this.answer?.id === response_id && item.type === "message") this.answer.item = item.id;
  },
  "response.output_audio_transcript.delta"({ response_id, delta }) {
    if (this.answer?.id !== response_id) return;
    this.answer.turn.add(delta, null);
    this.conversation.append(this.answer.entry, delta);
    this.onChange();
  },
  "response.output_audio.delta"({ response_id, delta }) {
    const { answer } = this;
    if (answer?.id !== response_id || answer.turn.playedAt !== null) return;
    const samples = floatsFromPcm16(fromBase64(delta));
    answer.turn.add("", samples);
    this.player.push(answer.stream, samples.slice());
    this.onChange();
  },
  "response.done"({ response }) {
    if (this.answer?.id !== response.id) return;
    this.answer.turn.measure(response.stretto ?? {});
    this.finish({ completed: "done", incomplete: "done", cancelled: "stopped" }[response.status] ?? "failed");
    if (response.status === "failed") this.onEnd(response.status_details?.error?.message ?? "The answer failed.", true);
  },
  error({ error }) {
    if (!HARMLESS.includes(error.code)) this.onEnd(error.message, true);
  },
};
