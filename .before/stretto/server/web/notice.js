// The one place where trouble is shown: what happened, what to do, and a button for it.

const $ = (id) => document.getElementById(id);

export class Notice {
  constructor(onChange) {
    this.onChange = onChange;
    this.box = $("notice");
    this.retry = null;
    this.timer = null;
    this.about = null; // what it is about, so that it can be taken back when that is over
    $("notice-close").onclick = () => this.hide();
    $("notice-retry").onclick = () => {
      const { retry } = this;
      this.hide();
      retry?.();
    };
  }

  /** `retry`: a function for the button; `seconds`: call it by itself after a countdown. */
  show({ about, title, text = "", advice = "", stages = {}, retry = null, seconds = null, key = false, calm = false }) {
    clearInterval(this.timer);
    Object.assign(this, { about, retry });
    this.box.dataset.about = about;
    this.box.classList.toggle("calm", calm);
    $("notice-title").textContent = title;
    $("notice-text").textContent = text;
    $("notice-advice").textContent = advice;
    const items = Object.entries(stages).map(([stage, word]) => {
      const item = document.createElement("li");
      const name = Object.assign(document.createElement("span"), { textContent: stage });
      const far = /(\d+(?:\.\d+)?)\s*%/.exec(String(word));
      const value = /ready/i.test(word) ? 100 : far ? Number(far[1]) : null;
      const bar = document.createElement("progress");
      bar.max = 100;
      if (value !== null) bar.value = value;
      bar.setAttribute("aria-label", stage);
      item.append(name, bar, Object.assign(document.createElement("span"), { textContent: String(word) }));
      return item;
    });
    $("notice-stages").replaceChildren(...items);
    $("notice-retry").hidden = !retry;
    $("notice-close").hidden = about === "loading" || about === "connecting";
    $("key-form").hidden = !key;
    this.box.hidden = false;
    if (seconds !== null) this.countDown(Math.ceil(seconds));
    if (key) $("key-now").focus();
    this.onChange();
  }

  countDown(left) {
    const tell = () => ($("notice-advice").textContent = `Trying again in ${left} s.`);
    tell();
    this.timer = setInterval(() => {
      left -= 1;
      tell();
      if (left <= 0) $("notice-retry").click();
    }, 1000);
  }

  /** Hide it, or only if it is about this. */
  hide(about = this.about) {
    if (about !== this.about) return;
    clearInterval(this.timer);
    this.about = this.retry = null;
    this.box.hidden = true;
    this.onChange();
  }
}
