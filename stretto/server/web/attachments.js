// Files that go with the next question: picked, dropped anywhere on the page, or pasted into the question.

import { kindOf, readFile, taken } from "./files.js";

const $ = (id) => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** A picture, or the name of a file that is none. */
export function thumbnail({ kind, name, url }) {
  if (kind === "image") return make("img", { src: url, alt: name || "Image" });
  const sign = make("span", { className: `icon icon-${kind}`, ariaHidden: "true" });
  const words = make("span", { className: "chip-name", textContent: name || (kind === "audio" ? "Sound" : "Video") });
  return make("span", { className: "chip", title: name || "" }, sign, words);
}

export class Attachments {
  constructor(onError) {
    this.onError = onError; // (words, advice): a file that cannot be sent
    this.files = []; // [{kind, name, url}]
    this.depth = 0; // drag events come for every element passed over: entered minus left
    this.enabled = true;
    $("file").onchange = ({ target }) => {
      this.add([...target.files]);
      target.value = "";
    };
    $("question").onpaste = (e) => {
      const files = [...e.clipboardData.files].filter(kindOf);
      if (!files.length || !this.enabled) return;
      e.preventDefault();
      this.add(files);
    };
    addEventListener("dragenter", (e) => e.dataTransfer.types.includes("Files") && this.hover(this.depth + 1));
    addEventListener("dragleave", () => this.hover(Math.max(0, this.depth - 1)));
    addEventListener("dragover", (e) => e.preventDefault());
    addEventListener("drop", (e) => {
      e.preventDefault();
      this.hover(0);
      this.add([...e.dataTransfer.files]);
    });
  }

  get empty() {
    return !this.files.length;
  }

  /** Hand the files over, and begin anew. */
  take() {
    const { files } = this;
    this.files = [];
    this.show();
    return files;
  }

  async add(files) {
    if (!this.enabled) return;
    for (const file of files) {
      try {
        this.files = [...this.files, await readFile(file)];
      } catch (error) {
        this.onError(error.message, `You can attach ${taken()}.`);
      }
    }
    this.show();
  }

  hover(depth) {
    this.depth = this.enabled ? depth : 0;
    $("drop").hidden = this.depth === 0;
  }

  show() {
    const thumbs = this.files.map((file) => {
      const onclick = () => {
        this.files = this.files.filter((other) => other !== file);
        this.show();
      };
      const sign = make("span", { className: "icon icon-close" });
      const remove = make("button", { type: "button", className: "remove", onclick }, sign);
      remove.setAttribute("aria-label", `Remove ${file.name || "the file"}`);
      return make("div", {}, thumbnail(file), remove);
    });
    $("tray").replaceChildren(...thumbs);
    $("tray").hidden = this.empty;
  }
}
