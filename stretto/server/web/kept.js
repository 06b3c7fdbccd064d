// The conversation's words, kept in this browser so that they are still there after a reload. Words only: pictures and
// sound are too large. Bounded: the oldest entries give way.

import { store, stored } from "./storage.js";

const NAME = "stretto-history";
const MOST_ENTRIES = 40;
const MOST_LETTERS = 100_000; // of all entries together

/** `entries`: [{asked, files, answer}], all text. */
export function keep(entries) {
  let kept = entries.slice(-MOST_ENTRIES);
  const size = () => kept.reduce((sum, one) => sum + one.asked.length + one.answer.length, 0);
  while (kept.length && size() > MOST_LETTERS) kept = kept.slice(1);
  while (!store(localStorage, NAME, kept.length ? JSON.stringify(kept) : "") && kept.length) kept = kept.slice(1);
}

/** What was kept; nothing if it makes no sense. */
export function recall() {
  try {
    const found = JSON.parse(stored(localStorage, NAME) || "[]");
    const isText = (value) => typeof value === "string";
    return found.filter((one) => isText(one.asked) && isText(one.answer) && isText(one.files)).slice(-MOST_ENTRIES);
  } catch {
    return [];
  }
}
