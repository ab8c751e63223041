// The table of services. Only the visible rows are elements: there may be thousands of rows.

import { Slice } from "./agent.js";
import { namespaceField, rangeField } from "./controls.js";
import { h, late } from "./dom.js";
import { seriesOf } from "./history.js";
import { PACKETS, state } from "./model.js";
import { IS_CLUSTER, choose, chosen, hrefOf } from "./place.js";
import { KINDS } from "./problems.js";
import { spark } from "./spark.js";
import { byteRate, count, number, plural, rate } from "./text.js";

const ROW_HEIGHT = 44;
/** The number of rows kept above and below the visible ones. */
const MARGIN = 8;
/** The number of rows by which the margins grow in a frame, and the number that one scrolls by in a jump. */
const GROWTH = 2;
const JUMP = 4;

/** The column of a cluster's page: how many nodes serve the Service alike. */
const NODES = { id: "nodes", label: "Nodes", isNumber: true, content: (row) => `${row.serving}/${allNodes()} ${row.differ.map(({ node, what }) => node + what)}`, value: (row) => -row.serving, cell: nodesCell };

/** The columns: what a row sorts by, where it is no plain field; a text that differs where cells do; and the cell. */
const COLUMNS = [
  { id: "problem", label: "Problem", isNumber: true, value: (row) => row.problem?.weight ?? 0, content: (row) => row.problem?.long, cell: problemCell },
  { id: "namespace", label: "Namespace", content: (row) => row.namespace, cell: (row) => cell({ class: "namespace" }, row.namespace) },
  { id: "name", label: "Name", content: (row) => `${row.key} ${row.problem?.long}`, cell: nameCell },
  { id: "type", label: "Type", content: (row) => row.type, cell: (row) => cell({ class: "type" }, row.type) },
  { id: "addresses", label: "Addresses", value: (row) => padded(row.addresses), content: (row) => row.addresses.join(), cell: (row) => listCell("addresses", row.addresses) },
  { id: "ports", label: "Ports", value: (row) => padded(row.ports), content: (row) => row.ports.join(), cell: (row) => listCell("ports", row.ports) },
  { id: "ready", label: "Ready", isNumber: true, content: (row) => `${row.ready}/${row.total}`, cell: readyCell },
  ...(IS_CLUSTER ? [NODES] : []),
  { id: "flows", label: "Flows", isNumber: true, content: (row) => row.flows, cell: (row) => numberCell("flows", number(row.flows), row.flows) },
  { id: "opened", label: "Opened/s", isNumber: true, content: (row) => row.opened, cell: (row) => numberCell("opened", rate(row.opened), row.opened) },
  { id: "packets", label: "Packets/s", isNumber: true, content: (row) => (row.packets ? `${row.key} ${state.version} ${chosen("range")}` : row.packets), cell: packetsCell },
  { id: "bytes", label: "Bytes/s", isNumber: true, content: (row) => row.bytes, cell: (row) => numberCell("bytes", byteRate(row.bytes), row.bytes) },
  { id: "refused", label: "Unserved/s", isNumber: true, content: (row) => row.refused, cell: (row) => numberCell("refused", rate(row.refused), row.refused) },
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
      rangeField(),
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
      { scope: "col", role: "columnheader", class: `${id} ${isNumber && id !== "problem" ? "number" : ""}`, "aria-sort": is },
      h("button", { type: "button", "data-sort": id }, label, h("span", { class: "arrow", "aria-hidden": "true" })),
    );
  });
  return h(
    "table",
    { class: "services", id: "services", "data-key": "table", role: "table", "aria-rowcount": rows.length + 1 },
    h("caption", { class: "hidden" }, IS_CLUSTER ? "Services of the cluster" : "Services that this node serves"),
    h("thead", { role: "rowgroup" }, h("tr", { role: "row", "aria-rowindex": 1 }, columns)),
    h("tbody", { role: "rowgroup", style: `height: ${rows.length * ROW_HEIGHT}px` }, body(viewport)),
  );
}

/** Returns the rows in sight, and the room above them. */
export function body(viewport) {
  const rows = chosenRows();
  [range.from, range.to] = rowsInSight(rows.length, viewport);
  range.shift = shiftOf(rows);
  return [
    h("tr", { "data-key": "gap", "aria-hidden": "true", style: `height: ${range.from * ROW_HEIGHT}px` }),
    rows.slice(range.from, range.to).map((row, n) => rowOf(row, range.from + n)),
  ];
}

/** The rows that are elements. `shift` leads from the index of a row to the number of its element. */
const range = { first: 0, margin: MARGIN, from: 0, to: 0, shift: 0 };

/** Chooses the elements of rows. After a jump, elements that are there show other rows: new ones would cost more. The one with the focus stays with its row. */
function shiftOf(rows) {
  const { from, to, shift } = range;
  const focused = document.activeElement?.closest("tr[data-service]");
  const at = focused ? rows.slice(from, to).findIndex(({ key }) => key === focused.dataset.service) : -1;
  if (at >= 0) return Number(focused.dataset.key.slice(4)) - from - at;
  if (focused) document.activeElement.blur();
  return Math.abs(from + shift) * 3 > to - from ? -from : shift;
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

/** The number of rows between two looks at the clock. */
const STEP = 100;

/** The rows in the reader's order, and those of them that the reader chose; and the same of the next reading. */
let last = { order: "", sorted: [], choice: "", rows: [] };
let next = last;

/** Chooses rows before they are shown, in slices: 10,000 rows may take longer than a frame. */
export async function prepare(rows, version) {
  const steps = choosing(rows, version);
  const slice = new Slice();
  let step = steps.next();
  while (!step.done) {
    if (slice.isOver) await slice.next();
    step = steps.next();
  }
  if (version === state.version) last = step.value;
  else next = step.value;
}

/** Returns the rows in the reader's order. */
function chosenRows() {
  const order = orderOf(state.version);
  // What was chosen since the reading began counts more than what was prepared for it.
  if (last.order !== order && next.order === order) last = next;
  if (last.choice === choiceOf(state.version)) return last.rows;
  const steps = choosing(state.rows, state.version);
  let step = steps.next();
  while (!step.done) step = steps.next();
  last = step.value;
  return last.rows;
}

function orderOf(version) {
  return `${version} ${chosen("sort")}`;
}

function choiceOf(version) {
  return JSON.stringify([version, ...["namespace", "filter", "only", "sort"].map(chosen)]);
}

/** Chooses rows step by step. Only another order has them sorted again. */
function* choosing(rows, version) {
  const [order, choice] = [orderOf(version), choiceOf(version)];
  const words = chosen("filter").toLowerCase().split(/\s+/).filter(Boolean);
  const [only, namespace] = [chosen("only"), chosen("namespace")];
  const sorted = order === last.order ? last.sorted : yield* sorting(rows);
  const found = [];
  for (const [n, row] of sorted.entries()) {
    if (n % STEP === 0) yield;
    const isIn = (!namespace || row.namespace === namespace) && (!only || row.problem?.kind === only);
    if (isIn && words.every((word) => row.words.includes(word))) found.push(row);
  }
  return { order, sorted, choice, rows: found };
}

/** Sorts rows step by step. Equal ones stay by namespace and name, as the agent sends them. */
function* sorting(rows) {
  const [id, descending] = order();
  const { value = (row) => row[id] } = COLUMNS.find((column) => column.id === id);
  const keyed = [];
  for (const [n, row] of rows.entries()) {
    if (n % STEP === 0) yield;
    keyed.push([value(row), row]);
  }
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

/** Returns the rows in sight and some above and below: none after a jump, and more with each drawing. */
function rowsInSight(length, { top, height }) {
  const first = Math.floor(-top / ROW_HEIGHT);
  range.margin = Math.abs(first - range.first) > JUMP ? 0 : Math.min(MARGIN, range.margin + GROWTH);
  range.first = first;
  const from = Math.min(Math.max(0, first - range.margin), Math.max(0, length - 1));
  return [from, Math.min(length, Math.max(from, first + Math.ceil(height / ROW_HEIGHT) + 1 + range.margin))];
}

/** Tells whether the margins lack rows. */
export function isGrowing() {
  return range.margin < MARGIN;
}

function shownText() {
  const [shown, all] = [chosenRows().length, state.rows.length];
  if (all < state.announced) return `${count(all)} of ${plural(state.announced, "service")} so far`;
  return shown < all ? `${count(shown)} of ${plural(all, "service")}` : plural(shown, "service");
}

function rowOf(row, index) {
  return late(
    "tr",
    { role: "row", "data-key": `row ${index + range.shift}`, "data-service": row.key, "aria-rowindex": index + 2, class: row.problem?.kind },
    COLUMNS.map((column) => column.content(row)),
    (n) => COLUMNS[n].cell(row),
  );
}

/** The choices that the rows' links keep. */
let linked = "";

/** Has the links of the rows keep the reader's choices: rows outlive these. */
export function relink() {
  const now = hrefOf("services");
  if (linked === now) return;
  linked = now;
  for (const row of document.querySelectorAll("tr[data-service]")) row.querySelector("a").setAttribute("href", hrefOf("services", row.dataset.service));
}

/** Makes a cell. Its role must be said, because rows are no table to the browser's layout. */
function cell(attributes, ...children) {
  return h("td", { role: "cell", ...attributes }, ...children);
}

export function serviceLink(row) {
  return hrefOf("services", row.key);
}

function problemCell({ problem }) {
  return cell({ class: "problem" }, problem ? h("span", { class: `mark ${problem.kind}`, title: problem.long }, problem.text) : h("span", { class: "faint" }, "–"));
}

function nameCell(row) {
  return cell(
    { class: "name" },
    h("a", { href: serviceLink(row) }, row.name),
    h("span", { class: "faint narrow" }, row.namespace, row.problem ? h("b", { class: `mark ${row.problem.kind}` }, row.problem.short) : null),
  );
}

function listCell(id, texts) {
  const more = texts.length > 1 ? h("span", { class: "more" }, `+${texts.length - 1}`) : null;
  return cell({ class: `${id} mono`, title: texts.length > 1 ? texts.join("\n") : null }, h("span", {}, texts[0] ?? "–"), more);
}

/** A Service without endpoints is no fault by itself: its pods may be asleep, or wanted nowhere. */
function readyCell({ ready, total }) {
  const kind = total === 0 ? "nobody" : ready === 0 ? "none" : ready < total ? "some" : "all";
  return cell(
    { class: `ready number ${kind}` },
    h("span", { class: `meter ${kind}`, style: `--ready: ${total ? ready / total : 0}`, "aria-hidden": "true" }),
    `${count(ready)}/${count(total)}`,
  );
}

function allNodes() {
  return state.status?.nodes.length ?? 0;
}

function nodesCell({ serving, differ }) {
  const all = allNodes();
  const title = differ.map(({ node, what }) => `${node}: ${what}`).join("\n");
  return cell({ class: `nodes number ${serving < all ? "some" : ""}`, title: title || null }, `${count(serving)}/${count(all)}`);
}

function numberCell(id, text, value) {
  return cell({ class: `${id} number ${value ? "" : "zero"}` }, text);
}

function packetsCell(row) {
  const series = () => seriesOf(row.key, [PACKETS], ["packets"]);
  return cell({ class: `packets number ${row.packets ? "" : "zero"}` }, row.packets ? spark(series(), "packets", { width: 64, height: 20 }) : null, rate(row.packets));
}
