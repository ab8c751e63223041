// The table of services. Only the visible rows are elements: there may be thousands of rows.

import { h } from "./dom.js";
import { PACKETS, state } from "./model.js";
import { spark } from "./spark.js";
import { byteRate, count, number, plural, rate } from "./text.js";

const ROW_HEIGHT = 44;
/** The number of rows kept above and below the visible ones. */
const MARGIN = 8;

const COLUMNS = [
  { id: "namespace", label: "Namespace", cell: (row) => h("td", { class: "namespace" }, row.namespace) },
  { id: "name", label: "Name", cell: nameCell },
  { id: "type", label: "Type", cell: (row) => h("td", { class: "type" }, row.type) },
  { id: "addresses", label: "Addresses", cell: (row) => listCell("addresses", row.addresses) },
  { id: "ports", label: "Ports", cell: (row) => listCell("ports", row.ports) },
  { id: "ready", label: "Ready", isNumber: true, cell: readyCell },
  { id: "flows", label: "Flows", isNumber: true, cell: (row) => numberCell("flows", number(row.flows), row.flows) },
  { id: "opened", label: "Opened/s", isNumber: true, cell: (row) => numberCell("opened", rate(row.opened), row.opened) },
  { id: "packets", label: "Packets/s", isNumber: true, cell: packetsCell },
  { id: "bytes", label: "Bytes/s", isNumber: true, cell: (row) => numberCell("bytes", byteRate(row.bytes), row.bytes) },
  { id: "refused", label: "Unserved/s", isNumber: true, cell: (row) => numberCell("refused", rate(row.refused), row.refused) },
];

/** The reader's choices. */
export const choice = { words: "", column: "namespace", descending: false };

export function toolbar() {
  return h(
    "div",
    { class: "toolbar", "data-key": "toolbar" },
    h(
      "label",
      { class: "search" },
      h("span", { class: "hidden" }, "Filter services"),
      h("input", {
        type: "search",
        id: "filter",
        value: choice.words,
        placeholder: "Filter by name, address, port, type   ( / )",
        autocomplete: "off",
        spellcheck: "false",
      }),
    ),
    h("p", { class: "faint", id: "shown", role: "status" }, shownText()),
  );
}

export function table(viewport) {
  const rows = chosenRows();
  const [from, to] = rowsInSight(rows.length, viewport);
  const columns = COLUMNS.map(({ id, label, isNumber }) => {
    const order = choice.column === id ? (choice.descending ? "descending" : "ascending") : null;
    return h(
      "th",
      { scope: "col", class: `${id} ${isNumber ? "number" : ""}`, "aria-sort": order },
      h("button", { type: "button", "data-sort": id }, label, h("span", { class: "arrow", "aria-hidden": "true" })),
    );
  });
  const gap = (key, height) => h("tr", { "data-key": key, class: "gap", "aria-hidden": "true", style: `height: ${height}px` });
  return h(
    "table",
    { class: "services", id: "services", "data-key": "table", "aria-rowcount": rows.length + 1 },
    h("caption", { class: "hidden" }, "Services that this node serves"),
    h("thead", {}, h("tr", { "aria-rowindex": 1 }, columns)),
    h(
      "tbody",
      {},
      gap("gap above", from * ROW_HEIGHT),
      rows.slice(from, to).map((row, n) => rowOf(row, from + n)),
      gap("gap below", (rows.length - to) * ROW_HEIGHT),
    ),
  );
}

/** Sorts by a column. A second choice of the same column reverses the order; numbers start with the largest. */
export function sortBy(id) {
  if (choice.column === id) choice.descending = !choice.descending;
  else Object.assign(choice, { column: id, descending: COLUMNS.find((column) => column.id === id).isNumber ?? false });
}

/** Finds the row `step` rows after that of `key`, in pixels from the table's top; null beyond the ends. */
export function neighbour(key, step) {
  const rows = chosenRows();
  const at = rows.findIndex((row) => row.key === key) + step;
  return rows[at] ? { key: rows[at].key, top: at * ROW_HEIGHT, height: ROW_HEIGHT } : null;
}

function chosenRows() {
  const words = choice.words.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = state.rows.filter((row) => words.every((word) => row.words.includes(word)));
  const { column } = choice;
  const turn = choice.descending ? -1 : 1;
  return rows.sort((a, b) => turn * compare(a[column], b[column]) || compare(a.key, b.key));
}

function compare(a, b) {
  if (typeof a === "string") return a < b ? -1 : Number(a > b);
  if (Array.isArray(a)) return String(a).localeCompare(String(b), "en", { numeric: true });
  return (a ?? -1) - (b ?? -1);
}

function rowsInSight(length, { top, height }) {
  const first = Math.floor(-top / ROW_HEIGHT) - MARGIN;
  const from = Math.min(Math.max(0, first), Math.max(0, length - 1));
  return [from, Math.min(length, Math.max(from, first + Math.ceil(height / ROW_HEIGHT) + 2 * MARGIN))];
}

function shownText() {
  const shown = chosenRows().length;
  return choice.words ? `${count(shown)} of ${plural(state.rows.length, "service")}` : plural(shown, "service");
}

function rowOf(row, index) {
  return h(
    "tr",
    { "data-key": row.key, "data-service": row.key, "aria-rowindex": index + 2, class: row.ready === 0 ? "empty" : null },
    COLUMNS.map((column) => column.cell(row)),
  );
}

export function serviceLink(row) {
  return `#/services/${encodeURIComponent(row.namespace)}/${encodeURIComponent(row.name)}`;
}

function nameCell(row) {
  return h(
    "td",
    { class: "name" },
    h("a", { href: serviceLink(row) }, row.name),
    h("span", { class: "faint narrow" }, row.namespace),
  );
}

function listCell(id, texts) {
  const more = texts.length > 1 ? h("span", { class: "more" }, `+${texts.length - 1}`) : null;
  return h("td", { class: `${id} mono`, title: texts.length > 1 ? texts.join("\n") : null }, h("span", {}, texts[0] ?? "–"), more);
}

function readyCell({ ready, total }) {
  const kind = ready === 0 ? "none" : ready < total ? "some" : "all";
  return h(
    "td",
    { class: "ready number" },
    h("span", { class: `meter ${kind}`, style: `--ready: ${total ? ready / total : 0}`, "aria-hidden": "true" }),
    `${count(ready)}/${count(total)}`,
  );
}

function numberCell(id, text, value) {
  return h("td", { class: `${id} number ${value ? "" : "zero"}` }, text);
}

function packetsCell(row) {
  const series = state.services.series(row.key, PACKETS);
  return h("td", { class: `packets number ${row.packets ? "" : "zero"}` }, row.packets ? spark(series, "packets", { width: 64, height: 20 }) : null, rate(row.packets));
}
