// Controls that several views share.

import { h, late, svg } from "./dom.js";
import { latest } from "./history.js";
import { DROPPED, PACKETS, REJECTED, state } from "./model.js";
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

/** Makes a labelled choice of pairs of value and text, which is a parameter of the address; without it, `instead` is chosen. */
export function select(name, label, options, instead = "") {
  const now = chosen(name) || instead;
  const known = options.some(([value]) => value === now) ? options : [...options, [now, now]];
  return h(
    "label",
    { class: "field", "data-key": name },
    h("span", {}, label),
    late("select", { id: `field-${name}`, "data-param": name, "data-instead": instead || null }, known.map(([value, text]) => `${value} ${text} ${value === now}`), (n) => {
      const [value, text] = known[n];
      return h("option", { value, "data-key": `option ${value}`, selected: value === now }, text);
    }),
  );
}

/** Makes the choice of a namespace. */
export function namespaceField() {
  return select("namespace", "Namespace", [["", "All namespaces"], ...namespaces().map((name) => [name, name])]);
}

/** Makes the choice of the namespace that the map shows. */
export function mapNamespaceField() {
  return select("namespace", "Namespace", namespaces().map((name) => [name, name]), mapNamespace());
}

let busiest = "";

/** Returns the chosen namespace; without a choice, the one that was the busiest at first. Empty while the first rows come in. */
export function mapNamespace() {
  if (chosen("namespace")) return chosen("namespace");
  if (!busiest && state.rows.length < state.announced) return "";
  if (!namespaces().includes(busiest)) busiest = busiestNamespace();
  return busiest;
}

function busiestNamespace() {
  const sums = new Map(namespaces().map((name) => [name, { now: 0, ever: 0 }]));
  for (const row of state.rows) {
    const sum = sums.get(row.namespace);
    sum.now += (row.packets ?? latest(row.key, "packets") ?? 0) + (row.refused ?? 0);
    sum.ever += row.counts[PACKETS] + row.counts[DROPPED] + row.counts[REJECTED];
  }
  const [first] = [...sums].sort(([, a], [, b]) => b.now - a.now || b.ever - a.ever);
  return first ? first[0] : "";
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
