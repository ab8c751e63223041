// The page's loop: asks the agent, takes in the answer, and shows the view that the address names.

import { ask, poll } from "./agent.js";
import { show } from "./dom.js";
import { state, takeServices, takeStatus } from "./model.js";
import * as node from "./node.js";
import { header, notices, tiles } from "./overview.js";
import { service } from "./service.js";
import { choice, neighbour, sortBy, table, toolbar } from "./services.js";

const part = Object.fromEntries(["header", "notices", "tiles", "view"].map((id) => [id, document.getElementById(id)]));

/** Parses the address: `#/services/shop/web` → ["services", "shop/web"]. */
function place() {
  const [view, ...rest] = location.hash.replace(/^#\/?/, "").split("/").map(decoded);
  return [["drops", "devices", "node"].includes(view) ? view : "services", rest.join("/")];
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // The user typed an invalid address.
  }
}

function render() {
  const [view, key] = place();
  document.title = titleOf(key);
  document.body.dataset.view = view;
  show(part.header, header(view));
  show(part.notices, notices());
  show(part.tiles, tiles());
  show(part.view, contents(view, key));
}

function contents(view, key) {
  if (view !== "services") return node[view]();
  if (key) return service(key);
  if (!state.status) return [];
  return [toolbar(), table({ top: tableTop(), height: innerHeight })];
}

function titleOf(key) {
  const { status, silence } = state;
  const mark = silence || (status && !status.healthy) ? "⚠ " : "";
  return mark + [key, status?.nodeName, "kpx"].filter(Boolean).join(" · ");
}

/** Returns the position of the first row in the window. */
function tableTop() {
  return document.querySelector("#services tbody")?.getBoundingClientRect().top ?? 0;
}

async function read() {
  try {
    if (state.reasons.size === 0) state.reasons = new Map((await ask("reasons")).map((reason) => [reason.name, reason]));
    const [status, services] = await Promise.all([ask("status"), ask("services")]);
    takeStatus(status);
    takeServices(services);
    Object.assign(state, { silence: null, lastAnswer: new Date().toISOString() });
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
  render();
  document.querySelector(`[data-service="${CSS.escape(target.key)}"] a`)?.focus();
}

let scrolledTo = 0;
let shown = place().join("/");

addEventListener("hashchange", () => {
  const before = shown;
  shown = place().join("/");
  render();
  // In the table, the reader gets back to the former place; elsewhere, to the beginning.
  if (shown === "services/") scrollTo(0, scrolledTo);
  else if (shown !== before) scrollTo(0, 0);
  if (shown !== before) part.view.focus({ preventScroll: true });
});

addEventListener("scroll", () => {
  if (shown !== "services/") return;
  scrolledTo = scrollY;
  requestAnimationFrame(render);
}, { passive: true });
addEventListener("resize", () => requestAnimationFrame(render));

document.addEventListener("input", (event) => {
  if (event.target.id !== "filter") return;
  choice.words = event.target.value;
  render();
});

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-sort]");
  const row = event.target.closest("tr[data-service]");
  if (event.target.closest("[data-skip]")) {
    event.preventDefault();
    part.view.focus();
  } else if (button) {
    sortBy(button.dataset.sort);
    render();
  } else if (row && !event.target.closest("a") && getSelection().isCollapsed) {
    row.querySelector("a").click();
  }
});

document.addEventListener("keydown", (event) => {
  const filter = document.getElementById("filter");
  const row = event.target.closest?.("tr[data-service]");
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/" && event.target !== filter) {
    event.preventDefault();
    if (place()[1] || place()[0] !== "services") location.hash = "#/services";
    requestAnimationFrame(() => document.getElementById("filter")?.focus());
  } else if (event.key === "Escape" && place()[1]) {
    location.hash = "#/services";
  } else if (row && step) {
    event.preventDefault();
    moveTo(row.dataset.service, step);
  } else if (event.target === filter && step === 1) {
    event.preventDefault();
    document.querySelector("tr[data-service] a")?.focus();
  }
});

render();
poll(read);
