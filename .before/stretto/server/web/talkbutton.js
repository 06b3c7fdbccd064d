// The microphone button: hold it to talk, or press once to start and once more to send. By pointer or, when it has
// the focus, by the space bar.

const HOLD_MS = 350; // a press shorter than this was a click: the recording goes on

export class TalkButton {
  /** `begin()` starts a recording and resolves to whether it runs; `finish()` ends and sends it. */
  constructor(button, { begin, finish }) {
    Object.assign(this, { button, begin, finish });
    this.phase = "idle"; // "idle", "opening", "on"
    this.pressedAt = null; // while it is held down
    this.released = null; // "held" or "clicked", when let go while the microphone was still opening
    button.addEventListener("pointerdown", (e) => e.button === 0 && this.press());
    button.addEventListener("keydown", (e) => e.code === "Space" && (e.preventDefault(), e.repeat || this.press()));
    button.addEventListener("keyup", (e) => e.code === "Space" && (e.preventDefault(), this.release()));
    // Enter clicks the button without a pointer; a pointer's own click has been dealt with by press and release.
    button.addEventListener("keydown", (e) => e.code === "Enter" && (e.preventDefault(), e.repeat || (this.press(), this.click())));
    for (const name of ["pointerup", "pointercancel"]) addEventListener(name, () => this.release());
    button.addEventListener("contextmenu", (e) => e.preventDefault()); // a long touch
  }

  async press() {
    if (this.phase === "on") return this.end();
    if (this.phase !== "idle") return;
    this.phase = "opening";
    this.pressedAt = performance.now();
    this.released = null;
    const running = await this.begin();
    if (!running) return this.reset();
    this.phase = "on";
    if (this.released === "held") this.end();
  }

  release() {
    if (this.pressedAt === null) return;
    const held = performance.now() - this.pressedAt >= HOLD_MS;
    this.pressedAt = null;
    if (this.phase === "opening") this.released = held ? "held" : "clicked";
    else if (this.phase === "on" && held) this.end();
  }

  click() {
    this.pressedAt = null;
    if (this.phase === "opening") this.released = "clicked";
  }

  end() {
    this.reset();
    return this.finish();
  }

  reset() {
    this.phase = "idle";
    this.pressedAt = null;
  }
}
