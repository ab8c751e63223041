// Controls that several views share.

import { h, late, svg } from "./dom.js";
import { state } from "./model.js";
import { RANGES, chosen } from "./place.js";

/** Makes a labelled field whose value is a parameter of the address. */
export function field(name, label, attributes = {}) {
  const { id = `field-${name}`, size, ...more } = attributes;
  return h(
    "label",
    { class: "field", "data-key": name },
    h("span", {}, label),
    h("input", { id, "data-param": name, value: chosen(name), autocomplete: "off", spellcheck: "false", size, ...more }),
  );
}

/** Makes a labelled choice of pairs of value and text, which is a parameter of the address. */
export function select(name, label, options) {
  const now = chosen(name);
  const known = options.some(([value]) => value === now) ? options : [...options, [now, now]];
  return h(
    "label",
    { class: "field", "data-key": name },
    h("span", {}, label),
    late("select", { id: `field-${name}`, "data-param": name }, known.map(([value, text]) => `${value} ${text} ${value === now}`), (n) => {
      const [value, text] = known[n];
      return h("option", { value, "data-key": `option ${value}`, selected: value === now }, text);
    }),
  );
}

/** Makes the choice of a namespace. */
export function namespaceField(all = "All namespaces") {
  return select("namespace", "Namespace", [["", all], ...namespaces().map((name) => [name, name])]);
}

export function rangeField() {
  return select("range", "Time", RANGES.map((minutes) => [minutes, `${minutes} min`]));
}

let known = { version: -1, names: [] };

function namespaces() {
  if (known.version !== state.version) {
    known = { version: state.version, names: [...new Set(state.rows.map((row) => row.namespace))].sort() };
  }
  return known.names;
}

/** Makes a button that copies a text. */
export function copyButton(text, label = `Copy ${text}`) {
  return h("button", { type: "button", class: "copy", "data-copy": text, "aria-label": label, title: label }, icon());
}

/** Draws two sheets. */
function icon() {
  const sheet = (x, y) => svg("rect", { x, y, width: 8, height: 10, rx: 1.5 });
  return svg("svg", { viewBox: "0 0 14 16", width: 13, height: 14, "aria-hidden": "true" }, sheet(1, 1), sheet(5, 5));
}

/** Copies the text of a button, and says so. */
export async function copy(button) {
  const text = button.dataset.copy;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // A browser has no clipboard for pages of an address that is not this host's.
    const area = h("textarea", { class: "hidden" }, text);
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
  }
  document.getElementById("said").textContent = `Copied ${text}`;
  button.classList.add("done");
  setTimeout(() => button.classList.remove("done"), 1_500);
}

/** Links a reason to its explanation. */
export function reasonLink(name, href) {
  return h("a", { class: "mono", href, title: state.reasons.get(name)?.meaning }, name);
}
