// Knows whether there is a server to talk to. Polls its health: quickly while it loads, patiently while it is away,
// now and then while all is well.

import { ApiError, Unreachable, health, model } from "./api.js";

const FIRST_MS = 500;
const LONGEST_MS = { loading: 4000, draining: 4000, dead: 8000, disconnected: 8000, error: 8000 };
const READY_MS = 20000;

export class Connection {
  /** `onChange({state, stages, error, model})` is called whenever something changed. */
  constructor(onChange, key) {
    this.onChange = onChange;
    this.key = key; // () => the API key or ""
    this.model = null;
    this.state = "connecting";
    this.delay = FIRST_MS;
    this.timer = null;
    this.checking = this.again = false;
    addEventListener("online", () => this.check());
    document.addEventListener("visibilitychange", () => document.hidden || this.check());
  }

  /** Look now; the next look is planned from what is found. */
  async check() {
    this.again = this.checking; // asked for while looking: what is found may be old
    if (this.checking) return;
    this.checking = true;
    clearTimeout(this.timer);
    const found = await this.look();
    this.checking = false;
    if (this.again) return this.check();
    this.delay = found.state === this.state ? Math.min(this.delay * 1.6, LONGEST_MS[found.state] ?? READY_MS) : FIRST_MS;
    this.state = found.state;
    this.onChange({ stages: {}, error: null, model: this.model, ...found });
    if (found.state !== "unauthorized") {
      this.timer = setTimeout(() => this.check(), found.state === "ready" ? READY_MS : this.delay);
    }
  }

  async look() {
    try {
      const found = await health(AbortSignal.timeout(10000));
      if (found.state === "ready" && !this.model) this.model = await model(this.key());
      return found;
    } catch (error) {
      if (error instanceof ApiError && (error.status === 401 || error.status === 403)) {
        return { state: "unauthorized", error: error.message };
      }
      if (error instanceof ApiError) return { state: "error", error: error.message };
      if (error instanceof Unreachable || error.name === "TimeoutError" || error.name === "AbortError") {
        return { state: "disconnected" };
      }
      throw error;
    }
  }

  /** The key changed: ask again who we are. */
  reconnect() {
    this.model = null;
    this.delay = FIRST_MS;
    return this.check();
  }
}
