// The table of services. Only the visible rows are elements: there may be thousands of rows.

import { namespaceField, rangeField } from "./controls.js";
import { h } from "./dom.js";
import { seriesOf } from "./history.js";
import { PACKETS, state, wordsOf } from "./model.js";
import { choose, chosen, hrefOf } from "./place.js";
import { KINDS } from "./problems.js";
import { spark } from "./spark.js";
import { byteRate, count, number, plural, rate } from "./text.js";

const ROW_HEIGHT = 44;
/** The number of rows kept above and below the visible ones. */
const MARGIN = 8;

const COLUMNS = [
  { id: "problem", label: "Problem", isNumber: true, value: (row) => row.problem?.weight ?? 0, cell: problemCell },
  { id: "namespace", label: "Namespace", cell: (row) => h("td", { class: "namespace" }, row.namespace) },
  { id: "name", label: "Name", cell: nameCell },
  { id: "type", label: "Type", cell: (row) => h("td", { class: "type" }, row.type) },
  { id: "addresses", label: "Addresses", value: (row) => padded(row.addresses), cell: (row) => listCell("addresses", row.addresses) },
  { id: "ports", label: "Ports", value: (row) => padded(row.ports), cell: (row) => listCell("ports", row.ports) },
  { id: "ready", label: "Ready", isNumber: true, cell: readyCell },
  { id: "flows", label: "Flows", isNumber: true, cell: (row) => numberCell("flows", number(row.flows), row.flows) },
  { id: "opened", label: "Opened/s", isNumber: true, cell: (row) => numberCell("opened", rate(row.opened), row.opened) },
  { id: "packets", label: "Packets/s", isNumber: true, cell: packetsCell },
  { id: "bytes", label: "Bytes/s", isNumber: true, cell: (row) => numberCell("bytes", byteRate(row.bytes), row.bytes) },
  { id: "refused", label: "Unserved/s", isNumber: true, cell: (row) => numberCell("refused", rate(row.refused), row.refused) },
];

export function toolbar() {
  const { all, kinds } = inNamespace();
  const now = chosen("only");
  const chips = [["", "All", all], ...KINDS.map(([id, label]) => [id, label, kinds.get(id) ?? 0])];
  return [
    h(
      "div",
      { class: "toolbar", "data-key": "toolbar", role: "search" },
      namespaceField(),
      h(
        "label",
        { class: "search" },
        h("span", { class: "hidden" }, "Filter services"),
        h("input", {
          type: "search",
          id: "filter",
          "data-param": "filter",
          value: chosen("filter"),
          placeholder: "Filter by name, address, port, type   ( / )",
          autocomplete: "off",
          spellcheck: "false",
        }),
      ),
      rangeField(),
      h("p", { class: "faint", id: "shown", role: "status" }, shownText()),
    ),
    h(
      "div",
      { class: "chips", "data-key": "chips", role: "group", "aria-label": "Services by problem" },
      chips
        .filter(([id, , number]) => number > 0 || id === "" || id === now)
        .map(([id, label, number]) =>
          h("button", { type: "button", "data-key": `chip ${id}`, "data-only": id, class: `chip ${id}`, "aria-pressed": String(now === id) }, label, " ", h("b", {}, count(number))),
        ),
    ),
  ];
}

export function table(viewport) {
  const rows = chosenRows();
  const [from, to] = rowsInSight(rows.length, viewport);
  const [sorted, descending] = order();
  const columns = COLUMNS.map(({ id, label, isNumber }) => {
    const is = sorted === id ? (descending ? "descending" : "ascending") : null;
    return h(
      "th",
      { scope: "col", class: `${id} ${isNumber && id !== "problem" ? "number" : ""}`, "aria-sort": is },
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
  const [sorted, descending] = order();
  const isDown = sorted === id ? !descending : (COLUMNS.find((column) => column.id === id).isNumber ?? false);
  choose({ sort: `${isDown ? "-" : ""}${id}` });
}

function order() {
  const sort = chosen("sort");
  const id = sort.replace(/^-/, "");
  return COLUMNS.some((column) => column.id === id) ? [id, sort.startsWith("-")] : ["problem", true];
}

/** Finds the row `step` rows after that of `key`, in pixels from the table's top; null beyond the ends. */
export function neighbour(key, step) {
  const rows = chosenRows();
  const at = rows.findIndex((row) => row.key === key) + step;
  return rows[at] ? { key: rows[at].key, top: at * ROW_HEIGHT, height: ROW_HEIGHT } : null;
}

/** Puts the rows into the reader's order ahead of time: of 10,000 rows it takes a part of a frame. */
export function prepare() {
  chosenRows();
  inNamespace();
}

/** The rows as last chosen, and the choice. */
let last = { choice: "", rows: [] };

/** Returns the rows in the reader's order. Equal ones stay by namespace and name, as the agent sends them. */
function chosenRows() {
  const choice = JSON.stringify([state.version, chosen("namespace"), chosen("filter"), chosen("only"), chosen("sort")]);
  if (last.choice === choice) return last.rows;
  const words = chosen("filter").toLowerCase().split(/\s+/).filter(Boolean);
  const [only, namespace] = [chosen("only"), chosen("namespace")];
  const rows = state.rows.filter(
    (row) => (!namespace || row.namespace === namespace) && (!only || row.problem?.kind === only) && (words.length === 0 || words.every((word) => wordsOf(row).includes(word))),
  );
  const [id, descending] = order();
  const { value = (row) => row[id] } = COLUMNS.find((column) => column.id === id);
  const keyed = rows.map((row) => [value(row), row]);
  keyed.sort(([a], [b]) => (descending ? compare(b, a) : compare(a, b)));
  last = { choice, rows: keyed.map(([, row]) => row) };
  return last.rows;
}

function compare(a, b) {
  if (typeof a !== "string") return (a ?? -1) - (b ?? -1);
  return a < b ? -1 : Number(a > b);
}

/** Returns a text that sorts by the numbers in it. */
function padded(texts) {
  return texts.join(" ").replace(/\d+/g, (digits) => digits.padStart(5, "0"));
}

let counted = { choice: "" };

/** Returns the number of Services of the namespace, and of those with each kind of problem. */
function inNamespace() {
  const namespace = chosen("namespace");
  const choice = `${state.version} ${namespace}`;
  if (counted.choice === choice) return counted;
  counted = { choice, all: 0, kinds: new Map() };
  for (const row of state.rows) {
    if (namespace && row.namespace !== namespace) continue;
    counted.all += 1;
    if (row.problem) counted.kinds.set(row.problem.kind, (counted.kinds.get(row.problem.kind) ?? 0) + 1);
  }
  return counted;
}

function rowsInSight(length, { top, height }) {
  const first = Math.floor(-top / ROW_HEIGHT) - MARGIN;
  const from = Math.min(Math.max(0, first), Math.max(0, length - 1));
  return [from, Math.min(length, Math.max(from, first + Math.ceil(height / ROW_HEIGHT) + 2 * MARGIN))];
}

function shownText() {
  const [shown, all] = [chosenRows().length, state.rows.length];
  if (all < state.announced) return `${count(all)} of ${plural(state.announced, "service")} so far`;
  return shown < all ? `${count(shown)} of ${plural(all, "service")}` : plural(shown, "service");
}

function rowOf(row, index) {
  return h(
    "tr",
    { "data-key": row.key, "data-service": row.key, "aria-rowindex": index + 2, class: row.problem?.kind },
    COLUMNS.map((column) => column.cell(row)),
  );
}

export function serviceLink(row) {
  return hrefOf("services", row.key);
}

function problemCell({ problem }) {
  return h("td", { class: "problem" }, problem ? h("span", { class: `mark ${problem.kind}`, title: problem.long }, problem.text) : h("span", { class: "faint" }, "none"));
}

function nameCell(row) {
  return h(
    "td",
    { class: "name" },
    h("a", { href: serviceLink(row) }, row.name),
    h("span", { class: "faint narrow" }, row.namespace, row.problem ? h("b", { class: `mark ${row.problem.kind}` }, row.problem.text) : null),
  );
}

function listCell(id, texts) {
  const more = texts.length > 1 ? h("span", { class: "more" }, `+${texts.length - 1}`) : null;
  return h("td", { class: `${id} mono`, title: texts.length > 1 ? texts.join("\n") : null }, h("span", {}, texts[0] ?? "–"), more);
}

/** A Service without endpoints is no fault by itself: its pods may be asleep, or wanted nowhere. */
function readyCell({ ready, total }) {
  const kind = total === 0 ? "nobody" : ready === 0 ? "none" : ready < total ? "some" : "all";
  return h(
    "td",
    { class: `ready number ${kind}` },
    h("span", { class: `meter ${kind}`, style: `--ready: ${total ? ready / total : 0}`, "aria-hidden": "true" }),
    `${count(ready)}/${count(total)}`,
  );
}

function numberCell(id, text, value) {
  return h("td", { class: `${id} number ${value ? "" : "zero"}` }, text);
}

function packetsCell(row) {
  const series = () => seriesOf(row.key, [PACKETS], ["packets"]);
  return h("td", { class: `packets number ${row.packets ? "" : "zero"}` }, row.packets ? spark(series(), "packets", { width: 64, height: 20 }) : null, rate(row.packets));
}
