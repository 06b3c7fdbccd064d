// What the page says in each phase of a spoken conversation: a word or two, and a sentence.

export const PHASES = {
  asking: ["Opening the microphone", "If the browser asks, choose Allow."],
  connecting: ["Connecting", "The microphone is open."],
  listening: ["Listening", "Just talk. Interrupt when you like."],
  hearing: ["Hearing you", "Pause when you are done."],
  interrupted: ["Go on", "You interrupted: the answer has stopped."],
  thinking: ["Thinking", "The answer is on its way."],
  speaking: ["Speaking", "Talk to interrupt."],
  reconnecting: ["Reconnecting", "The connection was lost. What was said is kept."],
  ended: ["Ended", "Press Talk to go on."],
};

/** Phases that a screen reader tells. Not those within a turn: they can be heard, and a voice that told them would talk
 * into the open microphone. */
export const TOLD = ["asking", "listening", "reconnecting", "ended"];
const WITHIN_A_TURN = ["hearing", "interrupted", "thinking", "speaking"];

/** What a screen reader is told when a phase follows another; null: nothing. */
export function told(phase, before) {
  if (!TOLD.includes(phase) || WITHIN_A_TURN.includes(before) && phase === "listening") return null;
  return PHASES[phase].join(". ");
}
