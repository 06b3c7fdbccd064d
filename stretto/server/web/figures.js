// The figures of a turn, written where the page shows them.

import { duration } from "./turn.js";
import { explained, ordinary } from "./words.js";

const PARTS = {
  pause: ["Pause", "Waiting to be sure that you had finished speaking (voice activity detection)"],
  making: ["Answer", "The server, from the end of your turn to the first sound"],
  server: ["Server", "Taking the question in, and handing the first sound over"],
  encode: ["Encode", "Turning your voice into something that the model can read"],
  network: ["Network", "From the server to this browser"],
  buffer: ["Buffer", "Sound kept in hand before playing, and the sound device's own delay"],
  silence: ["Silence", "The voice's own, before its first word"],
};
const $ = (id) => document.getElementById(id);
const number = (value, digits) => (value === null || value === undefined ? "–" : value.toFixed(digits));

/** "4.9×": seconds of speech made in a second. */
const speed = (rtf) => (rtf ? `${(1 / rtf).toFixed(rtf > 0.1 ? 1 : 0)}×` : "–");

/** `live`: the answer is still being made, so that its total is the time up to now. */
export function writeFigures(turn, live) {
  const f = turn?.nothing ? {} : (turn?.figures() ?? {});
  const heard = f.firstSound !== null && f.firstSound !== undefined;
  const words = {
    "fig-first-text": duration(f.firstText),
    "fig-first-audio": duration(f.firstAudio),
    "fig-first-sound": duration(f.heardAfter),
    "fig-underruns": heard ? String(f.underruns) : "–",
    "fig-buffered": duration(f.buffered),
    "fig-rtf": speed(f.rtf),
    "fig-rate": number(f.tokenRate, f.tokenRate < 100 ? 1 : 0),
    "fig-total": duration(f.total ?? (live ? turn.clock() : null)),
  };
  for (const [id, word] of Object.entries(words)) if ($(id).textContent !== word) $(id).textContent = word;
  $("live-figure").hidden = !f.live;
  $("fig-written").hidden = Boolean(f.live);
  writeParts(f.parts ?? []);
  for (const id of ["fig-first-text", "fig-first-sound"]) $(id).classList.toggle("blank", words[id] === "–");
  $("fig-underruns").classList.toggle("alarm", f.underruns > 0);
  const sound = words["fig-first-sound"];
  const first = sound === "–" ? `First words ${words["fig-first-text"]}` : `First sound ${sound}`;
  $("summary-figures").textContent = first.endsWith("–") ? "" : first;
}

let shown = ""; // the parts, as they stand there

/** A bar of the parts, as long as they took, and their names under it. */
function writeParts(parts) {
  const words = JSON.stringify(parts);
  if (words === shown) return;
  shown = words;
  const total = parts.reduce((sum, part) => sum + part.seconds, 0) || 1;
  let writes = true; // the first stage: what it takes to its first output is reading
  const items = parts.map((part, i) => {
    let [label, title] = PARTS[part.name] ?? [ordinary(part.stage), explained(part.stage)];
    if (part.name === "stage" && writes) {
      writes = false;
      [label, title] = ["Prefill", `${explained(part.stage)}. Here: reading, up to the first word`];
    }
    if (part.stage && part.seconds < 0.0005) title += ". It was done before the pause was over";
    const item = Object.assign(document.createElement("li"), { title });
    item.dataset.part = part.name === "stage" ? part.stage : part.name;
    item.dataset.tone = i % 6;
    item.append(
      Object.assign(document.createElement("span"), { className: "part-name", textContent: label }),
      Object.assign(document.createElement("span"), { className: "part-time", textContent: duration(part.seconds) }),
    );
    const bar = Object.assign(document.createElement("progress"), { max: total, value: part.seconds, ariaHidden: "true" });
    item.append(bar);
    return item;
  });
  $("fig-parts").replaceChildren(...items);
}
