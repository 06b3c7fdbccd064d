// Images that go with the next question: picked, dropped anywhere on the page, or pasted into the question.

import { isImage, readImage } from "./images.js";

const $ = (id) => document.getElementById(id);

function make(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

export class Attachments {
  constructor(onError) {
    this.onError = onError; // told in words about a file that is no image
    this.images = []; // [{name, url}]
    this.depth = 0; // drag events come for every element passed over: entered minus left
    $("file").onchange = ({ target }) => {
      this.add([...target.files]);
      target.value = "";
    };
    $("question").onpaste = (e) => {
      const files = [...e.clipboardData.files].filter(isImage);
      if (!files.length) return;
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
    return !this.images.length;
  }

  /** Hand the images over, and begin anew. */
  take() {
    const { images } = this;
    this.images = [];
    this.show();
    return images;
  }

  async add(files) {
    for (const file of files.filter(isImage)) {
      try {
        this.images = [...this.images, await readImage(file)];
      } catch (error) {
        this.onError(error.message);
      }
    }
    this.show();
  }

  hover(depth) {
    this.depth = depth;
    $("drop").hidden = depth === 0;
  }

  show() {
    const thumbs = this.images.map((image) => {
      const onclick = () => {
        this.images = this.images.filter((other) => other !== image);
        this.show();
      };
      const sign = make("span", { className: "icon icon-close" });
      const remove = make("button", { type: "button", className: "remove", onclick }, sign);
      remove.setAttribute("aria-label", `Remove ${image.name || "the image"}`);
      return make("div", {}, make("img", { src: image.url, alt: image.name || "Image" }), remove);
    });
    $("tray").replaceChildren(...thumbs);
    $("tray").hidden = this.empty;
  }
}
