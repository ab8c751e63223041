// The page's loop: asks the agent, takes in the answer, and shows the view that the address names.

import { ask, askStatus, askLines, poll, turn } from "./agent.js";
import { copy, mapNamespace } from "./controls.js";
import { show } from "./dom.js";
import { readHistory } from "./history.js";
import * as live from "./live.js";
import * as map from "./map.js";
import { Reading, state, takeService, takeStatus } from "./model.js";
import * as node from "./node.js";
import { nodes } from "./nodes.js";
import { failingServices, header, notices, showCurrent, tiles } from "./overview.js";
import { IS_CLUSTER, choose, chosen, place } from "./place.js";
import { service } from "./service.js";
import { body, isGrowing, neighbour, prepare, relink, sortBy, table, toolbar } from "./services.js";
import { leave, pointAt, step as stepChart } from "./spark.js";
import { applyTheme, nextTheme } from "./theme.js";
import * as trace from "./trace.js";

const part = Object.fromEntries(["header", "notices", "tiles", "view"].map((id) => [id, document.getElementById(id)]));

/** The number of rows that are shown before all have come. */
const FIRST = 200;

function render() {
  renderFrame();
  renderView();
}

/** Renders a reading in two frames, so that it takes no whole one. */
async function renderInSteps() {
  await turn();
  renderFrame();
  await turn();
  renderView();
}

/** Renders what is above the view. */
function renderFrame() {
  const { view, key } = place();
  document.title = titleOf(key);
  document.body.dataset.view = view;
  show(part.header, header(view));
  show(part.notices, notices());
  show(part.tiles, tiles());
}

function renderView() {
  const { view, key } = place();
  show(part.view, contents(view, key));
  relink();
  if (isGrowing()) renderSoon(renderRows);
}

function contents(view, key) {
  if (view === "live") return live.view();
  if (view === "map") return map.view();
  if (view === "trace") return trace.view();
  if (view === "nodes") return nodes();
  if (view !== "services") return node[view](key);
  if (key) return service(key);
  if (!state.announced && !state.status) return [];
  return [toolbar(), table(viewport())];
}

/** Renders only the rows in sight, where nothing else changes. */
function renderRows() {
  const rows = document.querySelector("#services tbody");
  if (!rows) return;
  show(rows, body(viewport()));
  relink();
  if (isGrowing()) renderSoon(renderRows);
}

const due = new Set();

/** Renders the view, or a part, before the next frame, however many events ask for it. */
function renderSoon(draw = renderView) {
  if (due.size === 0) {
    requestAnimationFrame(() => {
      const draws = [...due];
      due.clear();
      for (const draw of draws) draw();
    });
  }
  due.add(draw);
}

let isTyped = false;
let isFiltering = false;

/** Shows the rows that the typed text chooses, behind the letter itself and in turns. What is typed meanwhile comes next. */
async function filterBy(text) {
  choose({ filter: text });
  isTyped = true;
  if (isFiltering) return;
  isFiltering = true;
  try {
    while (isTyped) {
      isTyped = false;
      await turn();
      await prepare(state.rows, state.version);
      await turn();
      renderView();
    }
  } finally {
    isFiltering = false;
  }
}

function titleOf(key) {
  const { status, silence } = state;
  const mark = silence || (status && (!status.healthy || failingServices() > 0)) ? "⚠ " : "";
  return mark + [key, status?.nodeName, "kpx"].filter(Boolean).join(" · ");
}

function viewport() {
  return { top: tableTop(), height: innerHeight };
}

/** Returns the position of the first row in the window. */
function tableTop() {
  return document.querySelector("#services tbody")?.getBoundingClientRect().top ?? 0;
}

async function read() {
  live.watchFor(place().view, renderSoon);
  try {
    await Promise.all([readStatus(), readTable()]);
    await readView();
    Object.assign(state, { silence: null, lastAnswer: new Date().toISOString() });
  } catch (error) {
    state.silence = error.message;
  }
  await renderInSteps();
}

async function readStatus() {
  if (state.reasons.size === 0) state.reasons = new Map((await ask("reasons")).map((reason) => [reason.name, reason]));
  takeStatus(await askStatus());
}

let tableReading = null;

/** Reads the table. A failed status leaves a slow reading behind, and the next one waits for its end. */
function readTable() {
  // The history goes first: with it the charts have a past, and slow Services are known, from the first rows on.
  tableReading ??= readPast().then(readRows).finally(() => (tableReading = null));
  return tableReading;
}

/** Reads the history. A node of a cluster may hang, and the rows do not wait for it. */
async function readPast() {
  const { view, key } = place();
  const called = view === "map" && chosen("service").trim() ? `${mapNamespace()}/${chosen("service").trim()}` : "";
  const reading = readHistory(view === "services" ? key : called);
  if (IS_CLUSTER) reading.then(() => renderSoon(render));
  else await reading;
}

async function readRows() {
  const reading = new Reading();
  const isFirst = state.announced === 0;
  await askLines(isFirst ? "rows?ahead=true" : "rows", (line, number) => {
    reading.take(line, number);
    if (!isFirst || number !== FIRST) return;
    reading.showSoFar();
    render();
  });
  await prepare(reading.rows, state.version + 1);
  reading.end();
}

/** Reads what only the current view shows. */
async function readView() {
  const { view, key } = place();
  if (view === "map") {
    // The first rows decide which namespace the map opens with.
    live.watchFor(view, renderSoon);
    await map.readMap();
  }
  if (view === "node") await node.readOptions();
  if (view !== "services" || !key) return;
  if (IS_CLUSTER) readPast();
  const [namespace, ...name] = key.split("/");
  const found = await ask(`service?${new URLSearchParams({ namespace, name: name.join("/") })}`).catch((error) => {
    if (error.status === 404) return false;
    throw error;
  });
  if (place().key === key) takeService(found);
}

/** Reads for a view that the reader has just opened. */
async function readNow() {
  live.watchFor(place().view, renderSoon);
  try {
    await readView();
  } catch (error) {
    state.silence = error.message;
  }
  render();
}

/** Moves the focus to the link of another row, after scrolling it into view. */
function moveTo(key, step) {
  const target = neighbour(key, step);
  if (!target) return;
  const top = tableTop() + target.top;
  const header = document.querySelector("#services thead").offsetHeight;
  if (top < header) scrollBy(0, top - header);
  else if (top + target.height > innerHeight) scrollBy(0, top + target.height - innerHeight);
  renderView();
  document.querySelector(`[data-service="${CSS.escape(target.key)}"] a`)?.focus();
}

let scrolledTo = 0;
let shown = pathOf();

function pathOf() {
  const { view, key } = place();
  return `${view}/${key}`;
}

addEventListener("hashchange", () => {
  const before = shown;
  shown = pathOf();
  if (shown !== before) state.open = null;
  render();
  takeFields();
  // In the table, the reader gets back to the former place; elsewhere, to the beginning.
  if (shown !== before) scrollTo(0, shown === "services/" ? scrolledTo : 0);
  if (shown !== before) part.view.focus({ preventScroll: true });
  showCurrent();
  renderView();
  readNow();
});

/** Gives the fields the values of the address, which Back may have changed. */
function takeFields() {
  for (const field of document.querySelectorAll("[data-param]")) field.value = chosen(field.dataset.param) || field.dataset.instead || "";
}

addEventListener("scroll", () => {
  if (shown !== "services/") return;
  scrolledTo = scrollY;
  renderSoon(renderRows);
}, { passive: true });
addEventListener("resize", () => {
  showCurrent();
  renderSoon();
});
addEventListener("visibilitychange", () => live.watchFor(place().view, renderSoon));

document.addEventListener("input", (event) => {
  const { param } = event.target.dataset;
  if (!param) return;
  if (param === "filter") return void filterBy(event.target.value);
  choose({ [param]: event.target.value });
  // Only a whole word is worth a new stream or a walk through the flows.
  if (event.target.tagName === "SELECT") readNow();
  else renderView();
});
document.addEventListener("change", (event) => {
  if (event.target.dataset.param && event.target.tagName === "INPUT") readNow();
});

document.addEventListener("submit", (event) => {
  event.preventDefault();
  if (event.target.id === "trace") trace.run(renderView);
});

document.addEventListener("click", (event) => {
  const on = (selector) => event.target.closest(selector);
  const row = on("tr[data-service]");
  if (on("[data-skip]")) {
    event.preventDefault();
    part.view.focus();
  } else if (on("[data-copy]")) {
    copy(on("[data-copy]"));
  } else if (on("#theme")) {
    nextTheme();
    render();
  } else if (on("#pause")) {
    live.pause();
    renderView();
  } else if (on("[data-only]")) {
    choose({ only: on("[data-only]").dataset.only });
    renderView();
  } else if (on("[data-sort]")) {
    sortBy(on("[data-sort]").dataset.sort);
    renderView();
  } else if (row && !on("a") && getSelection().isCollapsed) {
    row.querySelector("a").click();
  }
});

document.addEventListener("pointermove", (event) => {
  if (event.pointerType !== "touch" && pointAt(event)) renderSoon(render);
});
document.addEventListener("pointerdown", (event) => {
  if (event.pointerType === "touch" && pointAt(event)) renderSoon(render);
});
document.addEventListener("focusout", (event) => {
  if (event.target.dataset?.plot && leave()) renderSoon(render);
});

document.addEventListener("keydown", (event) => {
  const isTyping = event.target.matches?.("input, select, textarea");
  const row = event.target.closest?.("tr[data-service]");
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.dataset?.plot && stepChart(event)) {
    event.preventDefault();
    render();
  } else if (event.key === "/" && !isTyping) {
    event.preventDefault();
    if (pathOf() !== "services/") location.hash = "#/services";
    requestAnimationFrame(() => document.getElementById("filter")?.focus());
  } else if (event.key === "Escape" && place().key) {
    document.querySelector(".back a")?.click();
  } else if (row && step) {
    event.preventDefault();
    moveTo(row.dataset.service, step);
  } else if (event.target.id === "filter" && step === 1) {
    event.preventDefault();
    document.querySelector("tr[data-service] a")?.focus();
  }
});

applyTheme();
render();
showCurrent();
poll(read);
