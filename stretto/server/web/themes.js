// The button that goes through the themes: the system's, light, dark. (`theme.js` sets the chosen one before the page is
// drawn.)

import { store } from "./storage.js";

const $ = (id) => document.getElementById(id);

export function cycleTheme() {
  const root = document.documentElement;
  const next = { undefined: "light", light: "dark", dark: undefined }[root.dataset.theme];
  if (next) root.dataset.theme = next;
  else delete root.dataset.theme;
  store(localStorage, "stretto-theme", next ?? "");
  nameTheme();
}

export function nameTheme() {
  const words = `Theme: ${document.documentElement.dataset.theme ?? "as the system"}`;
  $("theme-label").textContent = words;
  $("theme").title = words;
}
