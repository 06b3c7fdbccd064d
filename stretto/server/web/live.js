// A conversation with an open microphone, over the server's realtime WebSocket. The server finds out when somebody
// speaks and when a turn is over; this plays what it answers, and falls silent at once when it is spoken to. A connection
// that is lost is made again, with what was said so far.

import { floatsFromPcm16, fromBase64, pcm16, resample, toBase64 } from "./audio.js";
import { Microphone } from "./microphone.js";
import { Turn } from "./turn.js";

const RATE = 24000; // of both directions
const HARMLESS = ["response_cancel_not_active"];
const RETRY_MS = [500, 1000, 2000, 4000, 8000, 8000, 8000]; // before each new attempt
const LOST = [1006, 1012]; // closed by the network, or by a server that restarts
const UNREACHABLE = "The connection to the server was lost.";
const CLOSED = {
  1001: "The server has closed the conversation.",
  1008: "The server has closed the conversation: nothing was said for too long.",
};

export class Live {
  /** `onPlay({turn, stream})` when an answer begins, `onHush()` when it is stopped, `onLevel(level)` of the microphone,
   * `onChange()` when anything else happened, `onTrouble(message)` when something went wrong and the conversation goes on,
   * `onEnd({message, refused})` when it is over: without a message if the person ended it, `refused` if it never began. */
  constructor({ conversation, player, onPlay, onHush, onLevel, onChange, onTrouble, onEnd }) {
    Object.assign(this, { conversation, player, onPlay, onHush, onChange, onTrouble, onEnd });
    this.microphone = new Microphone(onLevel);
    this.microphone.onPiece = (samples, rate) => this.speak(samples, rate);
    Object.assign(this, { opening: false, unwanted: false }); // the browser may still be asking for the microphone
    this.reset();
  }

  reset() {
    this.session = null; // {url, key, session, leadMs} while there is a conversation
    Object.assign(this, { socket: null, ready: false, begun: false, tries: 0, timer: null, answer: null });
    this.resetTurn();
  }

  resetTurn() {
    Object.assign(this, { entry: null, entries: new Map(), stoppedAt: null, pause: null });
    Object.assign(this, { speaking: false, interrupted: false, waiting: false }); // whose turn it is
  }

  get open() {
    return this.session !== null;
  }

  /** What it is doing: a name of `PHASES`, or "idle". */
  get phase() {
    if (this.opening && !this.unwanted) return "asking";
    if (!this.open) return "idle";
    if (!this.ready) return this.begun ? "reconnecting" : "connecting";
    if (this.speaking) return this.interrupted ? "interrupted" : "hearing";
    if (this.sounding) return "speaking";
    return this.waiting ? "thinking" : "listening";
  }

  /** Whether the latest answer is being heard. */
  get sounding() {
    const turn = this.answer?.turn;
    return Boolean(turn && turn.firstSound !== null && turn.playedAt === null);
  }

  /** Must be called from a click. Throws a MicrophoneError if there is none. */
  async start({ url, key, session, leadMs }) {
    this.unwanted = false;
    if (this.opening) return this.onChange(); // the browser is asking already
    this.opening = true;
    this.onChange();
    try {
      await this.player.open(RATE);
      await this.microphone.start();
    } finally {
      this.opening = false;
    }
    if (this.unwanted) return this.microphone.release();
    this.session = { url, key, session, leadMs };
    this.connect();
    this.onChange();
  }

  connect() {
    const { url, key, session } = this.session;
    const socket = new WebSocket(url, ["realtime", ...(key ? [`openai-insecure-api-key.${key}`] : [])]);
    this.socket = socket;
    socket.onopen = () => {
      if (socket !== this.socket) return;
      this.ready = this.begun = true;
      this.send({ type: "session.update", session });
      for (const item of this.conversation.items()) this.send({ type: "conversation.item.create", item });
      this.onChange();
    };
    socket.onmessage = ({ data }) => socket === this.socket && this.take(JSON.parse(data));
    socket.onclose = ({ code, reason }) => socket === this.socket && this.closed(code, reason);
  }

  closed(code, reason) {
    this.ready = false;
    if (!this.begun) return this.end({ refused: true });
    if (!LOST.includes(code)) return this.end({ message: CLOSED[code] ?? (reason || UNREACHABLE) });
    if (this.tries === RETRY_MS.length) return this.end({ message: UNREACHABLE });
    this.socket = null;
    this.breakOff("failed"); // what has arrived of it is played
    this.resetTurn();
    this.timer = setTimeout(() => this.connect(), RETRY_MS[this.tries]);
    this.tries += 1;
    this.onChange();
  }

  /** The person is done. */
  stop() {
    this.unwanted = true;
    if (this.open) this.end({});
    else if (this.opening) this.onEnd({});
  }

  end(why) {
    const { socket } = this;
    clearTimeout(this.timer);
    this.hush();
    this.breakOff("stopped");
    this.reset();
    socket?.close(1000);
    this.microphone.release();
    this.onEnd(why);
  }

  /** Nothing more comes of the answer that is being made, if one is. */
  breakOff(outcome) {
    if (this.answer && this.answer.turn.outcome === null) this.finish(outcome);
  }

  send(event) {
    if (this.socket?.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(event));
  }

  speak(samples, rate) {
    if (!this.ready) return;
    const sound = rate === RATE ? samples : resample(samples, rate, RATE);
    this.send({ type: "input_audio_buffer.append", audio: toBase64(pcm16(sound)) });
  }

  take(event) {
    const handler = HANDLERS[event.type];
    if (handler) handler.call(this, event);
  }

  begin(response) {
    const entry = this.entry ?? this.conversation.add({ text: "", files: [], audio: null, aloud: true });
    const turn = new Turn(RATE, this.stoppedAt ?? performance.now(), { live: true, pause: this.pause });
    this.conversation.begin(entry, turn);
    const stream = this.player.begin(this.session.leadMs);
    this.answer = { id: response.id, entry, turn, stream, item: null, played: 0 };
    Object.assign(this, { entry: null, stoppedAt: null, pause: null, waiting: true });
    this.onPlay({ turn, stream });
  }

  /** What the player reports. */
  heard(report) {
    if (report.stream !== this.answer?.stream) return;
    this.answer.played = report.played;
    if (report.event === "started") this.waiting = false;
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
    this.waiting &&= Boolean(turn.samples) && turn.firstSound === null;
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
    this.tries = 0; // it holds
    Object.assign(this, { speaking: true, interrupted: this.sounding, waiting: false });
    this.hush();
    this.onChange();
  },
  "input_audio_buffer.speech_stopped"({ item_id, vad_wait_s = null }) {
    Object.assign(this, { speaking: false, interrupted: false, waiting: true });
    Object.assign(this, { stoppedAt: performance.now(), pause: vad_wait_s });
    this.entry = this.conversation.add({ text: "", files: [], audio: null, aloud: true });
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
    if (response.status === "failed") this.onTrouble(response.status_details?.error?.message ?? "The answer failed.");
  },
  error({ error }) {
    if (HARMLESS.includes(error.code)) return;
    this.waiting = false;
    this.onTrouble(error.message);
  },
};
