// What went wrong, in words for the reader: what a notice shows, with `retry` where asking again makes sense and `check`
// where the server's health is to be looked at.

import { Unreachable } from "./api.js";

const MOST_RETRIES = 5; // of a busy server, without being asked

/** `retries`: how often a busy server has been asked, this time included. `nothing`: no part of the answer arrived. */
export function explainFailure(error, { retries, ready, stages, reads, nothing }) {
  const text = error.message;
  const rest = nothing ? "" : "What had arrived is kept.";
  const thing = reads ? "text" : "question";
  if (error instanceof Unreachable) {
    return { about: "broken", title: text, text: rest, advice: "Try again when the server is back.", retry: true, check: true };
  }
  if (error.status === 429) {
    const patient = retries <= MOST_RETRIES;
    const seconds = Math.max(1, error.retryAfter ?? 2 ** (retries - 1));
    const advice = patient ? "" : "It has been full for a while. Try again later.";
    return { about: "busy", title: "The server is busy.", text, advice, retry: true, seconds: patient ? seconds : null, calm: true };
  }
  if (error.status === 401) {
    return { about: "unauthorized", title: "This server asks for a key.", text, key: true, retry: true };
  }
  if (error.status === 413) {
    const advice = "Send a smaller file or a shorter recording, or start a new conversation.";
    return { about: "failed", title: "That was too much for one request.", text, advice };
  }
  if (error.status === 503 && !ready) {
    return { about: "loading", title: "The model is loading.", text: `Your ${thing} is asked as soon as it is ready.`, stages, calm: true, check: true };
  }
  if (error.status === 503) {
    return { about: "failed", title: "The server cannot answer now.", text, advice: "It may be loading or recovering.", retry: true, check: true };
  }
  if (error.status >= 400 && error.status < 500) {
    const advice = `Change the ${thing} or the settings${reads ? "" : ", or start a new conversation"}.`;
    return { about: "failed", title: `The server refused the ${thing}.`, text, advice };
  }
  return { about: "failed", title: reads ? "The reading failed." : "The answer failed.", text, advice: rest, retry: true };
}

/** A spoken conversation that the server did not take. */
export const TALK_REFUSED = {
  title: "The server did not take the conversation.",
  text: "It may hold as many as it can just now.",
  advice: "Try again in a moment, or ask in writing.",
  again: true,
};

/** Notices about the connection, which come and go by themselves. Others stay: they hold a question's "Try again". */
export const OWN_ACCORD = ["loading", "disconnected", "draining", "dead", "unauthorized", "error"];

/** A server that is not ready; `waits`: a question is asked when it is. Undefined where there is nothing to tell. */
export function explainState(state, { stages, error, waits, hasKey }) {
  return {
    loading: {
      title: "The model is loading.", stages, calm: true,
      text: waits ? "Your question is asked as soon as it is ready." : "You can ask already.",
    },
    draining: { title: "The server is shutting down.", text: "It takes no new questions.", advice: "The page reconnects by itself." },
    dead: { title: "The server has stopped working.", text: error ?? "", advice: "See its log; it may need a restart." },
    disconnected: { title: "No connection to the server.", text: "It may have been stopped, or the network is away.", advice: "The page keeps trying and reconnects by itself." },
    unauthorized: { title: "This server asks for a key.", text: hasKey ? (error ?? "") : "", key: true },
    error: { title: "The server answered with an error.", text: error ?? "" },
  }[state];
}
