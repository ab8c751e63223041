// The part above every view: the node, its health, and its total rates.

import { h } from "./dom.js";
import { past, seriesOf } from "./history.js";
import { ALL, BYTES, state } from "./model.js";
import { IS_CLUSTER, VIEWS, hrefOf } from "./place.js";
import { nodeNotices, nodesText } from "./nodes.js";
import { chart } from "./spark.js";
import { themeButton } from "./theme.js";
import { age, byteRate, count, number, plural, rate } from "./text.js";

export function header(view) {
  const { status, silence } = state;
  const links = VIEWS.map(([id, label]) =>
    h("a", { href: hrefOf(id), "data-key": id, "aria-current": view === id ? "page" : null }, label, badge(id)),
  );
  return [
    h("img", { class: "logo", src: "icon.svg", alt: "kpx", width: 34, height: 34 }),
    h(
      "div",
      { class: "who" },
      h("h1", {}, status ? status.nodeName : "…", status ? healthPill(status, silence) : null),
      h("p", {}, status ? about(status) : "asking the agent"),
    ),
    h("nav", { "aria-label": "Views" }, links),
    themeButton(),
  ];
}

/** Scrolls the views' links so that the current one is in sight. */
export function showCurrent() {
  const nav = document.querySelector("nav");
  const link = nav.querySelector("[aria-current]");
  nav.scrollLeft = link.offsetLeft - (nav.clientWidth - link.offsetWidth) / 2;
}

/** Returns how many Services of the cluster fail their clients now; on the page of a node the list alone says so. */
export function failingServices() {
  return IS_CLUSTER ? state.rows.filter(({ problem }) => ["refusing", "failing"].includes(problem?.kind)).length : 0;
}

export function healthPill(status, silence) {
  const failing = failingServices();
  const [kind, text] = silence
    ? ["unknown", "no answer"]
    : failing > 0
      ? ["bad", `clients of ${plural(failing, "Service")} fail`]
      : status.healthy
        ? ["good", "healthy"]
        : status.complete || status.nodes?.some(({ problems }) => problems.length > 0)
          ? ["bad", IS_CLUSTER ? "with problems" : "unhealthy"]
          : ["waiting", IS_CLUSTER ? "connecting" : "waiting for the first lists"];
  return h("span", { class: `pill ${kind}`, "data-health": kind }, text);
}

/** Lists the problems in words. */
export function notices() {
  const { status, silence, lastAnswer } = state;
  const notices = [];
  if (silence) {
    const since = lastAnswer ? `; what is shown is ${age(lastAnswer)} old` : "";
    const who = IS_CLUSTER ? "kubectl kpx ui does not answer" : "The agent does not answer";
    notices.push(h("section", { class: "notice bad" }, h("h2", {}, who), h("p", {}, silence, since)));
  }
  if (IS_CLUSTER) return status ? [...notices, ...nodeNotices(status)] : notices;
  if (status?.problems.length > 0) {
    const items = status.problems.map((problem) =>
      h("li", {}, h("b", {}, problem.what), " ", problem.why, h("span", { class: "faint" }, ` for ${age(problem.since)}`)),
    );
    notices.push(h("section", { class: "notice bad" }, h("h2", {}, "This node has ", plural(items.length, "problem")), h("ul", {}, items)));
  }
  return notices;
}

export function tiles() {
  const { status, node, rows } = state;
  if (!status) return [];
  const { ready, total, flows, openFlows } = totals();
  return h(
    "dl",
    { class: "tiles" },
    chartTile("connections", "Flows opened", past(ALL, ["opened"], node.series("event/flow_opened")), rate),
    chartTile("packets", "Packets", past(ALL, ["packets"], packets(node)), rate),
    chartTile("bytes", "Traffic", seriesOf(ALL, [BYTES], ["bytes"]), byteRate),
    chartTile("drops", "Unserved", past(ALL, ["dropped", "rejected"], node.series("unserved")), rate),
    tile("flows", "Flows", number(flows), `${number(openFlows)} open`),
    tile("backends", "Backends ready", number(ready), `of ${count(total)}, for ${plural(rows.length, "service")}`),
  );
}

function packets(node) {
  const [there, back] = ["forwarded", "returned"].map((name) => node.series(`event/${name}`));
  return there.map(([time, value], n) => [time, value === null || back[n][1] === null ? null : value + back[n][1]]);
}

let summed = { version: -1, sums: {} };

/** Returns the sums of the column of each name over all Services. */
function totals() {
  if (summed.version !== state.version) {
    const sum = (name) => state.rows.reduce((total, row) => total + row[name], 0);
    const names = ["ready", "total", "flows", "openFlows"];
    summed = { version: state.version, sums: Object.fromEntries(names.map((name) => [name, sum(name)])) };
  }
  return summed.sums;
}

function chartTile(id, label, series, text) {
  const last = series.findLast(([, value]) => value !== null)?.[1] ?? null;
  return h(
    "div",
    { class: `tile ${id}`, "data-tile": id },
    h("dt", {}, label),
    h("dd", {}, text(last), h("span", { class: "unit" }, "/s")),
    h("dd", { class: "graph" }, chart({ id: `tile ${id}`, label, colour: id, series, text, unit: "/s", size: { width: 200, height: 36 } })),
  );
}

function tile(id, label, value, detail) {
  return h("div", { class: `tile ${id}`, "data-tile": id }, h("dt", {}, label), h("dd", {}, value), h("dd", { class: "faint" }, detail));
}

function about(status) {
  if (IS_CLUSTER) return [`kpx ${status.version}`, nodesText(status)].map((fact) => h("span", {}, fact));
  const facts = [`kpx ${status.version}`];
  if (status.mode) facts.push(`mode ${status.mode}`);
  if (status.nodeAddresses.length > 0) facts.push(status.nodeAddresses.join(", "));
  facts.push(status.lastSync ? `synced ${age(status.lastSync)} ago` : "not synced yet");
  return facts.map((fact) => h("span", {}, fact));
}

/** Marks a view that deserves a look. */
function badge(view) {
  const skipped = state.status?.skipped?.length ?? 0;
  return view === "node" && skipped > 0 ? h("span", { class: "badge", title: "objects skipped" }, count(skipped)) : null;
}
