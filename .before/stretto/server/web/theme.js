// Sets the chosen theme before the first paint; a plain script so that it runs before the style applies.
// The choice is "system" (nothing stored), "light" or "dark".
(() => {
  try {
    const chosen = localStorage.getItem("stretto-theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // Storage is off (private window): the system's choice stands.
  }
})();
