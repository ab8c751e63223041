// The map: clients, Services and backends, with what flows between them.

import { ask } from "./agent.js";
import { field, mapNamespace, mapNamespaceField } from "./controls.js";
import { h, svg } from "./dom.js";
import { latest } from "./history.js";
import { cut, live, recent } from "./live.js";
import { state } from "./model.js";
import { IS_CLUSTER, chosen, hrefOf } from "./place.js";
import { count, plural, rate, seconds } from "./text.js";

/** The number of nodes in a column of the picture; the table has all. */
const NODES = 14;
/** The least time between two readings: each walks the flow tables, of all nodes for the page of a cluster. */
const PERIOD_MS = IS_CLUSTER ? 10_000 : 5_000;

/** The columns: the part of a way, the heads of the picture and of the table. */
const PARTS = [["client", "Clients", "Client"], ["service", "Services", "Service"], ["backend", "Backends", "Backend"], ...(IS_CLUSTER ? [["node", "Nodes of backends", "Node"]] : [])];
const [WIDTH, ROW, TOP, BOX] = [1120, 46, 34, IS_CLUSTER ? 226 : 250];
const COLUMNS = PARTS.map(([, label], n) => [label, (n * (WIDTH - BOX)) / (PARTS.length - 1)]);
/** The letters of a name that a box has room for, in a wide font. */
const LETTERS = Math.floor(BOX / 9.2);

const known = { question: null, map: null, fault: "", asked: -Infinity };

/** Reads the open flows again when it is time to. */
export async function readMap() {
  const [namespace, service] = [mapNamespace(), chosen("service").trim()];
  if (!namespace) return;
  const question = new URLSearchParams(service ? { namespace, service } : { namespace }).toString();
  if (question === known.question && performance.now() - known.asked < PERIOD_MS) return;
  if (question !== known.question) Object.assign(known, { question, map: null });
  known.asked = performance.now();
  try {
    const map = await ask(`map?${question}${IS_CLUSTER ? "" : unnamed()}`);
    if (question === known.question) Object.assign(known, { map, fault: "" });
  } catch (error) {
    known.fault = error.message;
  }
}

/** Asks for the pods of addresses that events have told of. */
function unnamed() {
  const ends = recent()[0].flatMap(({ client, decision }) => [client, decision?.backend]).filter(Boolean);
  const addresses = [...new Set(ends.map((at) => cut(at)[0]))].slice(0, 128);
  return addresses.length > 0 ? `&also=${addresses.join(",")}` : "";
}

export function view() {
  return [
    h("h2", { "data-key": "title" }, "Who calls what"),
    h(
      "div",
      { class: "toolbar", "data-key": "toolbar", role: "search" },
      mapNamespaceField(),
      field("service", "Service", { placeholder: "all of the namespace", size: 20 }),
    ),
    contents(),
  ];
}

function contents() {
  const { map, fault } = known;
  if (fault) return h("section", { class: "notice bad", "data-key": "fault" }, h("h3", {}, "No map"), h("p", {}, fault));
  if (!map) return h("p", { class: "nothing", "data-key": "nothing" }, state.status && state.announced === 0 ? `${IS_CLUSTER ? "No node" : "This node"} serves ${IS_CLUSTER ? "a" : "no"} Service.` : "…");
  const ways = waysOf(map);
  const all = [...ways.values()].sort((a, b) => b.opened + b.unserved - a.opened - a.unserved || b.flows - a.flows || a.id.localeCompare(b.id));
  const rest = map.leftOut > 0 || map.partial ? ` ${plural(map.leftOut, "flow")} of less busy ways ${map.leftOut === 1 ? "is" : "are"} left out${map.partial ? ", and more than can be read" : ""}.` : "";
  const missing = map.missing?.length > 0 ? ` The open flows of ${map.missing.join(", ")} are missing.` : "";
  return [
    h("p", { class: "faint", "data-key": "about", id: "map-about" }, `Rates are means of the last half minute at the most, while this view is open${live.lost > 0 ? ", and too low: some packets were too many to count" : ""}.${rest}${missing}`),
    all.length === 0 ? h("p", { class: "nothing", "data-key": "nothing" }, "No open flow, and no packet since this view was opened.") : [picture(all), table(all)],
  ];
}

/** Adds up open flows and recent events by workload, Service and backend. */
function waysOf(map) {
  const ways = new Map();
  const way = (client, service, backend, node = "") => {
    const id = [client, service, backend].join(" → ");
    if (!ways.has(id)) ways.set(id, { id, client, service, backend, node, flows: 0, opened: 0, unserved: 0, reasons: new Map() });
    return ways.get(id);
  };
  const clientOf = (address) => (address === null ? state.status?.nodeName ?? "this node" : map.nodes?.[address] ?? workload(map.pods[address]) ?? address);
  const backendOf = (at) => {
    const [address, port] = cut(at);
    const node = map.nodes?.[address];
    return node ? `${node}:${port}` : map.pods[address] ?? at;
  };
  // A cluster names both ends, at the time of the packet, and the nodes of backends.
  const placed = new Map();
  for (const { client, service, backend, flows, clientName, backendName, backendNode } of map.ways) {
    placed.set(backend, backendNode);
    const found = IS_CLUSTER ? way(whose(clientName, client), service, podOr(backendName, backend), backendNode ?? "") : way(clientOf(client), service, backendOf(backend));
    found.flows += flows;
  }
  const [events, secs] = recent();
  for (const { what, reason, client, decision, clientName, backendName, backendNode } of events) {
    if (!decision?.name || !client) continue;
    const from = IS_CLUSTER ? whose(clientName, cut(client)[0]) : clientOf(decision.origin === "node" ? null : cut(client)[0]);
    const service = `${decision.namespace}/${decision.name}`;
    if (what === "decision") {
      const to = decision.backend;
      (IS_CLUSTER ? way(from, service, podOr(backendName, to), backendNode ?? placed.get(to) ?? "") : way(from, service, backendOf(to))).opened += 1 / secs;
    }
    else {
      const refused = way(from, service, "not served");
      refused.unserved += 1 / secs;
      refused.reasons.set(reason, (refused.reasons.get(reason) ?? 0) + 1);
    }
  }
  return ways;
}

/** Names the client of a way by what the cluster knows of it. */
function whose(name, address) {
  return workload(name?.pod) ?? name?.node ?? (name === "outside" ? "outside" : address);
}

/** Names a backend: a pod, a node with its port, or an address. */
function podOr(name, at) {
  return name?.pod ?? (name?.node ? `${name.node}:${cut(at)[1]}` : at);
}

/** Returns the workload of a pod: its name without what a ReplicaSet, a DaemonSet or a StatefulSet adds. */
export function workload(pod) {
  return pod?.replace(/-[0-9a-f]{8,10}-[0-9a-z]{5}$/, "").replace(/-([bcdfghjklmnpqrstvwxz2456789]{5}|\d+)$/, "");
}

function picture(ways) {
  const columns = PARTS.map(([part]) => column(ways, part));
  const height = TOP + ROW * Math.max(...columns.map((nodes) => nodes.size)) + 8;
  const most = Math.max(...ways.map(weight), 1e-9);
  const lines = new Map();
  for (const way of ways) {
    const ends = PARTS.map(([part], n) => (way[part] === "" || columns[n].has(way[part]) ? way[part] : OTHERS));
    for (let n = 0; n + 1 < PARTS.length; n += 1) {
      // The node of a backend may be unknown.
      if (ends[n + 1] === "") continue;
      const id = `${n} ${ends[n]} ${ends[n + 1]}`;
      const line = lines.get(id) ?? { n, from: columns[n].get(ends[n]), to: columns[n + 1].get(ends[n + 1]), weight: 0, unserved: 0 };
      line.weight += weight(way);
      line.unserved += way.unserved;
      lines.set(id, line);
    }
  }
  const shown = plural(ways.length, "way");
  return h(
    "div",
    { class: "map", "data-key": "picture", tabindex: 0, role: "region", "aria-label": "Map" },
    svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": `Map of ${shown} from clients over Services to backends${IS_CLUSTER ? " and their nodes" : ""}. The table below has the same.` },
      COLUMNS.map(([label, x]) => svg("text", { class: "head", x, y: 18 }, label)),
      [...lines.values()].map((line) => edge(line, most)),
      columns.flatMap((nodes, n) => [...nodes].map(([name, node]) => box(name, node, n))),
    ),
  );
}

const OTHERS = "others";

function weight(way) {
  return way.opened + way.unserved + way.flows / 1_000;
}

/** Places the busiest nodes of a column, and one for the others. */
function column(ways, part) {
  const nodes = new Map();
  for (const way of ways) {
    if (way[part] === "") continue;
    const node = nodes.get(way[part]) ?? { weight: 0, opened: 0, unserved: 0, flows: 0 };
    node.weight += weight(way);
    for (const field of ["opened", "unserved", "flows"]) node[field] += way[field];
    nodes.set(way[part], node);
  }
  const sorted = [...nodes].sort(([a, as], [b, bs]) => bs.weight - as.weight || a.localeCompare(b));
  const shown = sorted.slice(0, sorted.length > NODES ? NODES - 1 : NODES);
  const rest = sorted.slice(shown.length);
  if (rest.length > 0) {
    const sum = (field) => rest.reduce((sum, [, node]) => sum + node[field], 0);
    shown.push([OTHERS, { number: rest.length, weight: 0, opened: sum("opened"), unserved: sum("unserved"), flows: sum("flows") }]);
  }
  shown.forEach(([, node], n) => (node.y = TOP + n * ROW));
  return new Map(shown);
}

function edge({ n, from, to, weight, unserved }, most) {
  const [x1, x2] = [COLUMNS[n][1] + BOX, COLUMNS[n + 1][1]];
  const [y1, y2] = [from.y + ROW / 2 - 4, to.y + ROW / 2 - 4];
  const middle = (x1 + x2) / 2;
  const width = 1 + 7 * Math.sqrt(Math.min(1, weight / most));
  return svg("path", { class: unserved > 0 ? "edge bad" : "edge", d: `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`, "stroke-width": width.toFixed(1) });
}

function box(name, node, n) {
  const label = name === OTHERS && node.number ? `${node.number} others` : name;
  const latency = n === 1 ? latest(name, "connectP50") : null;
  const facts = [node.opened > 0 ? `${rate(node.opened)}/s` : null, node.unserved > 0 ? `${rate(node.unserved)}/s not served` : null, node.flows > 0 ? plural(node.flows, "flow") : null, latency === null ? null : `connects ${seconds(latency)}`];
  return svg(
    "g",
    { class: node.unserved > 0 ? "box bad" : "box", transform: `translate(${COLUMNS[n][1]} ${node.y})` },
    svg("rect", { width: BOX, height: ROW - 8, rx: 8 }),
    svg("text", { class: "name", x: 10, y: 16 }, short(label)),
    svg("text", { class: "facts", x: 10, y: 31 }, facts.filter(Boolean).join(" · ") || "idle"),
  );
}

/** Shortens a name: the map's namespace goes first, and then the beginning. */
function short(name) {
  const own = `${mapNamespace()}/`;
  const text = name.startsWith(own) ? name.slice(own.length) : name;
  return text.length > LETTERS ? `…${text.slice(1 - LETTERS)}` : text;
}

function table(ways) {
  const number = (text, value) => h("td", { class: `number ${value ? "" : "zero"}` }, text);
  const rows = ways.map((way) =>
    h(
      "tr",
      { "data-key": way.id, "data-way": way.id },
      h("td", {}, way.client),
      h("td", {}, h("a", { href: hrefOf("services", way.service) }, way.service)),
      h("td", {}, way.backend, [...way.reasons.keys()].map((reason) => [" ", h("a", { class: "mono", href: hrefOf("drops", reason) }, reason)])),
      IS_CLUSTER && h("td", {}, way.node || "–"),
      number(rate(way.opened), way.opened),
      number(rate(way.unserved), way.unserved),
      number(count(way.flows), way.flows),
      h("td", { class: "number" }, seconds(latest(way.service, "connectP50"))),
    ),
  );
  const heads = [...PARTS.map(([, , text]) => text), "#Opened/s", "#Unserved/s", "#Open flows", "#Connect, median of the Service"];
  return h(
    "table",
    { id: "ways", "data-key": "ways" },
    h("caption", { class: "hidden" }, "Ways from clients over Services to backends"),
    h("thead", {}, h("tr", {}, heads.map((text) => h("th", { scope: "col", class: text.startsWith("#") ? "number" : null }, text.replace("#", ""))))),
    h("tbody", {}, rows),
  );
}
