// The theme: the system's, or the one that the reader chose on this machine.

import { h } from "./dom.js";

const THEMES = [["", "System"], ["light", "Light"], ["dark", "Dark"]];
const KEY = "kpx-theme";

function theme() {
  try {
    return localStorage.getItem(KEY) ?? "";
  } catch {
    return ""; // The browser keeps nothing for this page.
  }
}

export function applyTheme() {
  document.documentElement.dataset.theme = theme();
}

/** Makes the button that goes to the next theme. */
export function themeButton() {
  const [, text] = THEMES.find(([id]) => id === theme()) ?? THEMES[0];
  return h("button", { type: "button", id: "theme", class: "quiet", "data-key": "theme", "aria-label": `Theme: ${text}` }, h("span", { "aria-hidden": "true" }, "◐ "), text);
}

export function nextTheme() {
  const at = THEMES.findIndex(([id]) => id === theme());
  try {
    localStorage.setItem(KEY, THEMES[(at + 1) % THEMES.length][0]);
  } catch {
    return; // The system's theme stays.
  }
  applyTheme();
}
