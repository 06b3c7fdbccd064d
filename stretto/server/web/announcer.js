// Tells screen readers an answer as it comes.

const box = document.getElementById("announcer");
let announced = 0;

/** Tell screen readers whole sentences, not every token. */
export function announce(text, all = false) {
  if (text.length < announced) announced = 0;
  const end = all ? text.length : Math.max(...[". ", "! ", "? ", "\n"].map((mark) => text.lastIndexOf(mark))) + 1;
  if (end <= announced) return;
  box.textContent = text.slice(announced, end);
  announced = all ? 0 : end;
}
