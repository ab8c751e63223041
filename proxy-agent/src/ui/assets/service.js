// The view of one service: its ports, its frontends and its backends.

import { h } from "./dom.js";
import { BYTES, OPENED, PACKETS, UNSERVED, portKey, portText, readiness, state } from "./model.js";
import { spark } from "./spark.js";
import { age, byteRate, count, endpoint, number, plural, rate } from "./text.js";

const CHARTS = [
  ["connections", "Flows opened", OPENED, rate],
  ["packets", "Packets", PACKETS, rate],
  ["bytes", "Traffic", BYTES, byteRate],
  ["drops", "Unserved", UNSERVED, rate],
];

export function service(key) {
  const row = state.rows.find((row) => row.key === key);
  const back = h("p", { class: "back", "data-key": "back" }, h("a", { href: "#/services" }, "← Services"));
  if (!row) {
    const text = state.rows.length > 0 ? `There is no service ${key} on this node.` : "…";
    return [back, h("p", { class: "nothing", "data-key": "nothing" }, text)];
  }
  return [back, title(row), ...row.service.ports.map((port) => portSection(row.service, port))];
}

function title({ service, ready, total }) {
  const facts = [
    ["Type", service.type],
    ["Addresses", [...service.clusterIps, ...service.loadBalancerIps, ...service.externalIps].join(", ") || "none"],
    ["Backends ready", `${count(ready)} of ${count(total)}`],
    ["Traffic policy", `internal ${service.internalTrafficPolicy}, external ${service.externalTrafficPolicy}`],
    ["Session affinity", service.affinitySecs ? `client's address, ${count(service.affinitySecs)} s` : "none"],
    ["Algorithm", service.algorithm],
    ["Health check", service.healthCheckNodePort ? `port ${service.healthCheckNodePort}` : null],
    ["Age", service.created ? age(service.created) : null],
  ];
  return h(
    "header",
    { class: "title", "data-key": "title" },
    h("h2", {}, h("span", { class: "faint" }, `${service.namespace} / `), service.name),
    h("dl", { class: "facts" }, facts.filter(([, fact]) => fact).map(([name, fact]) => h("div", {}, h("dt", {}, name), h("dd", {}, fact)))),
  );
}

function portSection(service, port) {
  const key = portKey(service, port);
  const [ready, total] = readiness(port.backends);
  return h(
    "section",
    { class: "card port", "data-key": key, "data-port": port.port },
    h("h3", {}, h("span", { class: "mono" }, portText(port)), port.name ? h("span", { class: "faint" }, ` ${port.name}`) : null),
    h("div", { class: "charts" }, CHARTS.map((chart) => chartOf(key, chart)), totals(port.counts)),
    h("h4", {}, "Offered at"),
    frontends(port.frontends),
    h("h4", {}, "Backends ", h("span", { class: "faint" }, `${count(ready)} of ${count(total)} ready`)),
    zones(port.backends),
  );
}

function chartOf(key, [colour, label, field, text]) {
  const series = state.services.series(key, field);
  return h(
    "div",
    { class: `chart ${colour}`, "data-chart": colour },
    h("span", { class: "faint" }, label),
    h("b", {}, text(series.at(-1) ?? null), h("span", { class: "unit" }, "/s")),
    spark(series, colour, { width: 220, height: 48 }),
  );
}

function totals(counts) {
  const facts = [
    ["Flows", counts.flows],
    ["Opened", counts.flowsOpened],
    ["Packets there", counts.packets],
    ["and back", counts.packetsReturned],
    ["Dropped", counts.dropped],
    ["Rejected", counts.rejected],
  ];
  return h("dl", { class: "totals" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, number(value)))));
}

function frontends(frontends) {
  if (frontends.length === 0) return h("p", { class: "nothing" }, "Nowhere: it is not in force.");
  const items = frontends.map((frontend) =>
    h(
      "li",
      { class: frontend.conflict ? "conflict" : null },
      h("span", { class: "mono" }, frontend.address ? endpoint(frontend.address, frontend.port) : `the node's addresses, port ${frontend.port}`),
      h("span", { class: "faint" }, ` ${frontend.kind}`),
      frontend.conflict ? h("span", { class: "why" }, ` ${frontend.conflict}`) : null,
    ),
  );
  return h("ul", { class: "frontends" }, items);
}

/** Shows backends by zone, then by node; this node comes first, then the others by name. */
function zones(backends) {
  if (backends.length === 0) return h("p", { class: "nothing" }, "No endpoints are listed for this port.");
  const zones = grouped(backends, (backend) => backend.zone ?? "");
  return h("div", { class: "zones" }, [...zones].map(([zone, backends]) => zoneOf(zone, backends)));
}

function zoneOf(zone, backends) {
  const [ready, total] = readiness(backends);
  const nodes = grouped(backends, (backend) => backend.node ?? "");
  return h(
    "section",
    { class: "zone", "data-key": `zone ${zone}`, "data-zone": zone },
    h(
      "h5",
      {},
      h("span", {}, zone || "no zone"),
      h("span", { class: "faint" }, `${count(ready)} of ${count(total)} ready, ${plural(flowsOf(backends), "flow")}`),
    ),
    [...nodes].map(([node, backends]) => nodeOf(node, backends)),
  );
}

function nodeOf(node, backends) {
  const isLocal = backends.some((backend) => backend.local);
  return h(
    "section",
    { class: `node ${isLocal ? "local" : ""}`, "data-key": `node ${node}`, "data-node": node },
    h("h6", {}, node || "no node", isLocal ? h("span", { class: "tag" }, "this node") : null),
    h("ul", {}, backends.map(backendOf)),
  );
}

function backendOf(backend) {
  const [kind, text] = stateOf(backend);
  return h(
    "li",
    { class: `backend ${kind}`, "data-key": backend.address, "data-backend": backend.address },
    h("span", { class: "mono" }, backend.address),
    h("span", { class: `state ${kind}` }, text),
    h("span", { class: "pod faint", title: backend.pod }, backend.pod?.split("/").at(-1)),
    h("span", { class: "faint" }, takes(backend), backend.flows > 0 ? ` · ${plural(backend.flows, "flow")}` : null),
  );
}

function stateOf({ ready, serving, terminating }) {
  if (terminating) return serving ? ["draining", "terminating, serving"] : ["down", "terminating"];
  if (ready) return ["up", "ready"];
  return serving ? ["draining", "serving, not ready"] : ["down", "not ready"];
}

/** Says which new flows the backend takes. */
function takes({ inClusterSet, inLocalSet }) {
  if (inClusterSet) return "takes flows";
  return inLocalSet ? "takes local flows" : "takes none";
}

function flowsOf(backends) {
  return backends.reduce((flows, backend) => flows + backend.flows, 0);
}

function grouped(backends, keyOf) {
  const groups = new Map();
  const isElsewhere = (backend) => Number(!backend.local);
  const sorted = [...backends].sort((a, b) => a.address.localeCompare(b.address, "en", { numeric: true }));
  for (const backend of sorted) {
    const key = keyOf(backend);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(backend);
  }
  const order = ([a, as], [b, bs]) => Math.min(...as.map(isElsewhere)) - Math.min(...bs.map(isElsewhere)) || a.localeCompare(b);
  return [...groups].sort(order);
}
