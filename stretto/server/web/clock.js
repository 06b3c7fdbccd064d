// The clock of a spoken conversation: it runs from the end of the person's turn until the answer can be heard, and
// stands there until the next turn ends.

import { duration } from "./turn.js";

export class Clock {
  constructor(box, figure) {
    Object.assign(this, { box, figure });
    this.from = null; // while it runs
    this.calm = matchMedia("(prefers-reduced-motion: reduce)");
  }

  /** A turn was found to be over; it ended `seconds` ago. */
  start(seconds) {
    this.from = performance.now() - 1000 * seconds;
    this.box.dataset.clock = "runs";
    this.box.hidden = false;
    if (this.calm.matches) this.figure.textContent = "…";
    else this.tick();
  }

  tick() {
    if (this.from === null) return;
    this.figure.textContent = duration((performance.now() - this.from) / 1000);
    requestAnimationFrame(() => this.tick());
  }

  /** The answer is heard, so long after the end of the turn. */
  stop(seconds) {
    this.from = null;
    this.box.dataset.clock = "stands";
    this.box.hidden = false;
    this.figure.textContent = duration(seconds);
  }

  /** Nothing was measured, or is any more. */
  clear() {
    this.from = null;
    this.box.hidden = true;
  }
}
