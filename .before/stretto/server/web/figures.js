// The figures of a turn, written where the page shows them.

import { duration } from "./turn.js";

const $ = (id) => document.getElementById(id);
const number = (value, digits) => (value === null || value === undefined ? "–" : value.toFixed(digits));

/** `live`: the answer is still being made, so that its total is the time up to now. */
export function writeFigures(turn, live) {
  const f = turn?.figures() ?? {};
  const heard = f.firstSound !== null && f.firstSound !== undefined;
  const words = {
    "fig-first-text": duration(f.firstText),
    "fig-first-audio": duration(f.firstAudio),
    "fig-first-sound": duration(f.firstSound),
    "fig-underruns": heard ? String(f.underruns) : "–",
    "fig-buffered": duration(f.buffered),
    "fig-rtf": number(f.rtf, f.rtf < 0.1 ? 3 : 2),
    "fig-rate": number(f.tokenRate, f.tokenRate < 100 ? 1 : 0),
    "fig-total": duration(f.total ?? (live ? turn.clock() : null)),
  };
  for (const [id, word] of Object.entries(words)) if ($(id).textContent !== word) $(id).textContent = word;
  for (const id of ["fig-first-text", "fig-first-audio"]) $(id).classList.toggle("blank", words[id] === "–");
  $("fig-underruns").classList.toggle("alarm", f.underruns > 0);
  $("summary-figures").textContent = turn ? `${words["fig-first-text"]} · ${words["fig-first-audio"]}` : "";
}
