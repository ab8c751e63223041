// The table of services. Only the visible rows are elements: there may be thousands of rows.

import { Slice } from "./agent.js";
import { namespaceField, rangeField } from "./controls.js";
import { h } from "./dom.js";
import { seriesOf } from "./history.js";
import { PACKETS, state } from "./model.js";
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
  const [sorted, descending] = order();
  const columns = COLUMNS.map(({ id, label, isNumber }) => {
    const is = sorted === id ? (descending ? "descending" : "ascending") : null;
    return h(
      "th",
      { scope: "col", class: `${id} ${isNumber && id !== "problem" ? "number" : ""}`, "aria-sort": is },
      h("button", { type: "button", "data-sort": id }, label, h("span", { class: "arrow", "aria-hidden": "true" })),
    );
  });
  return h(
    "table",
    { class: "services", id: "services", "data-key": "table", "aria-rowcount": rows.length + 1 },
    h("caption", { class: "hidden" }, "Services that this node serves"),
    h("thead", {}, h("tr", { "aria-rowindex": 1 }, columns)),
    h("tbody", {}, body(viewport)),
  );
}

/** Returns the rows in sight, and the room for those above and below. */
export function body(viewport) {
  const rows = chosenRows();
  const [from, to] = rowsInSight(rows.length, viewport);
  const gap = (key, height) => h("tr", { "data-key": key, class: "gap", "aria-hidden": "true", style: `height: ${height}px` });
  return [
    gap("gap above", from * ROW_HEIGHT),
    rows.slice(from, to).map((row, n) => rowOf(row, from + n)),
    gap("gap below", (rows.length - to) * ROW_HEIGHT),
  ];
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

/** The rows as last chosen, and the choice; and those of the next reading. */
let last = { choice: "", rows: [] };
let next = last;

/** Puts the rows of a reading into the reader's order before they are shown, in slices: 10,000 rows may take longer than a frame. */
export async function prepare(rows, version) {
  const choice = choiceOf(version);
  const steps = choosing(rows);
  const slice = new Slice();
  let step = steps.next();
  while (!step.done) {
    if (slice.isOver) await slice.next();
    step = steps.next();
  }
  next = { choice, rows: step.value };
}

/** Returns the rows in the reader's order. */
function chosenRows() {
  const choice = choiceOf(state.version);
  if (next.choice === choice) last = next;
  if (last.choice === choice) return last.rows;
  const steps = choosing(state.rows);
  let step = steps.next();
  while (!step.done) step = steps.next();
  last = { choice, rows: step.value };
  return last.rows;
}

function choiceOf(version) {
  return JSON.stringify([version, ...["namespace", "filter", "only", "sort"].map(chosen)]);
}

/** Chooses and sorts rows step by step. Equal ones stay by namespace and name, as the agent sends them. */
function* choosing(rows) {
  const words = chosen("filter").toLowerCase().split(/\s+/).filter(Boolean);
  const [only, namespace] = [chosen("only"), chosen("namespace")];
  const [id, descending] = order();
  const { value = (row) => row[id] } = COLUMNS.find((column) => column.id === id);
  const keyed = [];
  for (const row of rows) {
    yield;
    const isIn = (!namespace || row.namespace === namespace) && (!only || row.problem?.kind === only);
    if (isIn && words.every((word) => row.words.includes(word))) keyed.push([value(row), row]);
  }
  yield;
  keyed.sort(([a], [b]) => (descending ? compare(b, a) : compare(a, b)));
  yield;
  return keyed.map(([, row]) => row);
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
