// The view of one service: its ports, its frontends and its backends.

import { h } from "./dom.js";
import { copyButton, rangeField } from "./controls.js";
import { historyOf, missingHistories, past, portShare, seriesOf, unansweredShare } from "./history.js";
import { BYTES, DROPPED, OPENED, PACKETS, REJECTED, portKey, portText, readiness, serviceKey, state } from "./model.js";
import { hasView, IS_CLUSTER, hrefOf, protocolOf } from "./place.js";
import { chart } from "./spark.js";
import { age, byteRate, count, endpoint, number, plural, rate, seconds } from "./text.js";

/** The charts: colour, label, the page's counters, the fields of the agent's history. */
const CHARTS = [
  ["connections", "Flows opened", [OPENED], ["opened"], rate],
  ["packets", "Packets", [PACKETS], ["packets"], rate],
  ["bytes", "Traffic", [BYTES], ["bytes"], byteRate],
  ["drops", "Unserved", [DROPPED, REJECTED], ["dropped", "rejected"], rate],
];

export function service(key) {
  const back = h("p", { class: "back", "data-key": "back" }, h("a", { href: hrefOf("services") }, "← Services"));
  const { open } = state;
  if (!open || serviceKey(open) !== key) {
    const text = open === false ? `There is no service ${key} on ${IS_CLUSTER ? "any node that answers" : "this node"}.` : "…";
    return [back, h("p", { class: "nothing", "data-key": "nothing" }, text)];
  }
  return [back, title(open), open.nodes ? nodesOf(open) : null, timeline(key, open.ports.some(({ udp }) => udp)), ...open.ports.map((port) => portSection(open, port))];
}

/** Shows the Service's last minutes. */
function timeline(key, hasUdp) {
  const charts = CHARTS.map(([colour, label, counters, fields, text]) =>
    figure(`service ${colour}`, label, colour, seriesOf(key, counters, fields), text, "/s"),
  );
  const history = historyOf(key);
  const has = (field) => history?.[field]?.some((value) => value !== null);
  const slowest = IS_CLUSTER ? " on the slowest node" : "";
  const connects = [["connectP50", `Connect, median${slowest}`], ["connectP99", `Connect, 99 of 100${slowest}`]].filter(([field]) => has(field));
  const udp = [["udpAnswered", "UDP answered", "connections"], ["udpUnanswered", "UDP unanswered", "drops"]].filter(([field]) => hasUdp && has(field));
  return h(
    "section",
    { class: "card", "data-key": "timeline", id: "timeline" },
    h("div", { class: "toolbar" }, h("h3", {}, "Traffic"), rangeField()),
    missingHistories() ? h("p", { class: "faint" }, missingHistories()) : null,
    h(
      "div",
      { class: "charts" },
      charts,
      connects.map(([field, label]) => figure(`service ${field}`, label, "connections", past(key, [field], []), seconds, "")),
      has("failed") ? figure("service failed", hasUdp ? "Failed" : "Failed connects", "drops", past(key, ["failed"], []), rate, "/s") : null,
      udp.map(([field, label, colour]) => figure(`service ${field}`, label, colour, past(key, [field], []), rate, "/s")),
    ),
  );
}

function figure(id, label, colour, series, text, unit) {
  const last = series.findLast(([, value]) => value !== null)?.[1] ?? null;
  return h(
    "div",
    { class: `chart ${colour}`, "data-chart": id },
    h("span", { class: "faint" }, label),
    h("b", {}, text(last), unit ? h("span", { class: "unit" }, unit) : null),
    chart({ id, label, colour, series, text, unit, size: { width: 220, height: 48 } }),
  );
}

function title(service) {
  const key = serviceKey(service);
  const [ready, total] = readiness(service.ports.flatMap((port) => port.backends));
  const addresses = [...service.clusterIps, ...service.loadBalancerIps, ...service.externalIps];
  const problem = state.rows.find((row) => row.key === key)?.problem;
  const facts = [
    ["Type", service.type],
    ["Addresses", addresses.length > 0 ? addresses.map((address) => h("span", { class: "copied" }, address, copyButton(address))) : "none"],
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
    h("h2", {}, h("span", { class: "faint" }, `${service.namespace} / `), service.name, " ", copyButton(key)),
    problem ? h("p", {}, h("span", { class: `mark ${problem.kind}` }, problem.long)) : null,
    h(
      "p",
      { class: "links" },
      h("a", { href: hrefOf("live", "", { namespace: service.namespace, service: service.name }) }, "Watch its packets"),
      hasView("map") && h("a", { href: hrefOf("map", "", { namespace: service.namespace, service: service.name }) }, "Who calls it"),
      h("a", { href: hrefOf("trace", "", { to: key, port: service.ports[0] ? String(service.ports[0].port) : "", protocol: protocolOf(service.ports[0]?.protocol) }) }, "Trace a packet to it"),
    ),
    h("dl", { class: "facts" }, facts.filter(([, fact]) => fact).map(([name, fact]) => h("div", {}, h("dt", {}, name), h("dd", {}, fact)))),
  );
}

/** Shows what the Service is on each node, those that differ or fail first. */
function nodesOf({ namespace, name, nodes, ports }) {
  const weight = ({ failures }) => failures.unserved + failures.failed;
  const said = ({ node, state: now, avoided, differs, failures }) => {
    const { problems = [] } = state.status?.nodes.find(({ name }) => name === node) ?? {};
    if (now === "silent") return ["down", problems[0] ? `${problems[0].what}: ${problems[0].why}` : "no answer"];
    const bare = problems.find(({ what }) => what === "no programs");
    if (bare) return ["down", bare.what];
    if (now === "absent") return [differs ? "down" : "draining", "does not have this Service"];
    if (differs) return ["draining", differs];
    if (avoided.length > 0) return ["draining", `avoids ${avoided.join(", ")}`];
    return weight({ failures }) > 0 ? ["down", "clients fail"] : ["up", "serves"];
  };
  const rank = { down: 0, draining: 1, up: 2 };
  const all = nodes.map((node) => ({ ...node, said: said(node), share: unansweredShare(`${namespace}/${name}`, node.node) }));
  const hasUdp = nodes.some(({ udp }) => udp);
  all.sort((a, b) => rank[a.said[0]] - rank[b.said[0]] || weight(b) - weight(a) || (b.share ?? 0) - (a.share ?? 0) || a.node.localeCompare(b.node, "en", { numeric: true }));
  const unanswered = ({ unanswered, udp }) => unanswered + (udp?.unanswered ?? 0);
  const expects = ports.some((port) => port.udp && port.expectsAnswers);
  const shareCell = ({ node, share, udp }) =>
    h("td", { class: `number ${share ? "" : "zero"}`, "data-share": node, title: udp ? `${outcome(udp)} since the agent started` : null }, share === null ? "–" : h("span", { class: share > 0 && expects ? "why" : null }, percent(share)));
  const numberCell = (text, value) => h("td", { class: `number ${value ? "" : "zero"}` }, text);
  const heads = ["Node", "State", "#Backends in use", "#Flows", "#Unserved/s", "#Failed/s", "#Refused", "#Unanswered", hasUdp && "#UDP unanswered, 15 min", "#Connect, median"].filter(Boolean);
  return h(
    "section",
    { class: "card", "data-key": "nodes", id: "of-nodes" },
    h("h3", {}, "From each node"),
    h("p", { class: "faint" }, "Rates are current. Refused, Unanswered and the median cover everything that the node has counted."),
    h(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": "From each node" },
      h(
        "table",
        {},
        h("caption", { class: "hidden" }, "The Service on each node, those that differ or fail first"),
        h("thead", {}, h("tr", {}, heads.map((text) => h("th", { scope: "col", class: text.startsWith("#") ? "number" : null }, text.replace("#", ""))))),
      h(
          "tbody",
          {},
          all.map((one) =>
            h(
              "tr",
              { "data-key": one.node, "data-node": one.node },
              h("th", { scope: "row" }, one.node),
              h("td", {}, h("span", { class: `state ${one.said[0]}` }, one.said[1])),
              numberCell(`${count(one.inUse)}/${count(one.total)}`, one.total),
              numberCell(number(one.counts.flows), one.counts.flows),
              numberCell(rate(one.failures.unserved), one.failures.unserved),
              numberCell(rate(one.failures.failed), one.failures.failed),
              numberCell(count(one.refused), one.refused),
              numberCell(count(unanswered(one)), unanswered(one)),
              hasUdp && shareCell(one),
              h("td", { class: "number" }, seconds(one.connectP50)),
            ),
          ),
        ),
      ),
    ),
  );
}

function portSection(service, port) {
  const key = portKey(service, port);
  const [ready, total] = readiness(port.backends);
  return h(
    "section",
    { class: "card port", "data-key": key, "data-port": port.port },
    h("h3", {}, h("span", { class: "mono" }, portText(port)), port.name ? h("span", { class: "faint" }, ` ${port.name}`) : null),
    service.ports.length > 1 ? h("div", { class: "charts" }, CHARTS.map((one) => chartOf(key, one))) : null,
    totals(port, shareOf(service, port)),
    h("h4", {}, "Offered at"),
    frontends(port.frontends),
    h("h4", {}, "Backends ", h("span", { class: "faint" }, `${count(ready)} of ${count(total)} ready`)),
    zones(port.backends, port.expectsAnswers),
  );
}

function chartOf(key, [colour, label, counters, , text]) {
  const series = counters.map((counter) => state.ports.series(key, counter));
  const sum = series[0].map(([time], n) => [time, series.some((one) => one[n][1] === null) ? null : series.reduce((sum, one) => sum + one[n][1], 0)]);
  return figure(`${key} ${colour}`, label, colour, sum, text, "/s");
}

/** Returns the share of the port's flows that stayed unanswered; null without flows, and for other protocols than UDP. */
function shareOf(service, { port, udp }) {
  const isOnly = service.ports.filter((one) => one.udp).length === 1;
  return udp ? portShare(serviceKey(service), port, isOnly) : null;
}

function totals({ counts, connect, udp, expectsAnswers }, share) {
  const facts = [
    ["Flows", counts.flows],
    ["Opened", counts.flowsOpened],
    ["Packets there", counts.packets],
    ["and back", counts.packetsReturned],
    ["Dropped", counts.dropped],
    ["Rejected", counts.rejected],
    ...(udp ? questions(udp, share, expectsAnswers) : connects(connect)),
  ];
  return h("dl", { class: "totals" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, typeof value === "number" ? number(value) : value))));
}

/** Lists what is known of connects, of a port or of a backend. */
function connects(connect) {
  if (!connect?.connects && !connect?.failed) return [];
  return [
    ["Connect, median", seconds(connect.connectP50)],
    ["99 of 100", seconds(connect.connectP99)],
    ["Refused", connect.refused],
    ["Unanswered", connect.unanswered],
  ];
}

/** Lists the outcomes of UDP flows: most DNS clients send one question in a flow. */
function questions(udp, share, expects) {
  return [
    ["Answered", udp.answered],
    ["Unanswered", udp.unanswered],
    ["Refused", udp.refused],
    ...(share === null ? [] : [["Unanswered, 15 min", h("span", { class: share > 0 && expects ? "why" : null }, percent(share))]]),
  ];
}

function outcome(udp) {
  return `${count(udp.answered)} of ${count(outcomes(udp))} answered`;
}

function outcomes({ answered, unanswered, refused }) {
  return answered + unanswered + refused;
}

function percent(share) {
  return share > 0 && share < 0.001 ? "< 0.1 %" : `${number(Math.round(1_000 * share) / 10)} %`;
}

/** Counts the failed connects to a backend, or its unanswered UDP flows, each kind with its likely cause. A protocol without answers, such as syslog, does not fail. */
function failures(connect, expects) {
  const kinds = [
    [connect?.refused, "refused", "Nothing listens at this port, or the pod rejects the client."],
    [expects && connect?.unanswered, "unanswered", "The pod or its node is away, or packets to it are dropped."],
  ];
  return kinds.filter(([number]) => number > 0).map(([number, kind, why]) => h("span", { class: "why", title: why }, ` · ${count(number)} ${kind}`));
}

function frontends(frontends) {
  if (frontends.length === 0) return h("p", { class: "nothing" }, "Nowhere: it is not in force.");
  const items = frontends.map((frontend) =>
    h(
      "li",
      { class: frontend.conflict ? "conflict" : null },
      h("span", { class: "mono" }, frontend.address ? endpoint(frontend.address, frontend.port) : `the node's addresses, port ${frontend.port}`),
      frontend.address ? copyButton(endpoint(frontend.address, frontend.port)) : null,
      h("span", { class: "faint" }, ` ${frontend.kind}`),
      frontend.conflict ? h("span", { class: "why" }, ` ${frontend.conflict}`) : null,
    ),
  );
  return h("ul", { class: "frontends" }, items);
}

/** Shows backends by zone, then by node; this node comes first, then the others by name. */
function zones(backends, expects) {
  if (backends.length === 0) return h("p", { class: "nothing" }, "No endpoints are listed for this port.");
  const zones = grouped(backends, (backend) => backend.zone ?? "");
  return h("div", { class: "zones" }, [...zones].map(([zone, backends]) => zoneOf(zone, backends, expects)));
}

function zoneOf(zone, backends, expects) {
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
    [...nodes].map(([node, backends]) => nodeOf(node, backends, expects)),
  );
}

function nodeOf(node, backends, expects) {
  const isLocal = backends.some((backend) => backend.local);
  return h(
    "section",
    { class: `node ${isLocal ? "local" : ""}`, "data-key": `node ${node}`, "data-node": node },
    h("h6", {}, node || "no node", isLocal ? h("span", { class: "tag" }, "this node") : null),
    h("ul", {}, backends.map((backend) => backendOf(backend, expects))),
  );
}

function backendOf(backend, expects) {
  const [kind, text] = stateOf(backend);
  return h(
    "li",
    { class: `backend ${kind}`, "data-key": backend.address, "data-backend": backend.address },
    h("span", { class: "mono" }, backend.address, copyButton(backend.address)),
    h("span", { class: `state ${kind}` }, text),
    h("span", { class: "pod faint", title: backend.pod }, backend.pod?.split("/").at(-1)),
    h("span", { class: "faint" }, takes(backend), backend.flows > 0 ? ` · ${plural(backend.flows, "flow")}` : null, backend.connect?.connects ? ` · connects in ${seconds(backend.connect.connectP50)}` : null, backend.udp && outcomes(backend.udp) > 0 ? ` · ${outcome(backend.udp)}` : null, failures(backend.udp ?? backend.connect, expects)),
  );
}

function stateOf({ ready, serving, terminating, silent, ejected }) {
  if (ejected) return ["down", "ejected"];
  if (silent) return ["draining", "silent"];
  if (terminating) return serving ? ["draining", "terminating, serving"] : ["down", "terminating"];
  if (ready) return ["up", "ready"];
  return serving ? ["draining", "serving, not ready"] : ["down", "not ready"];
}

/** Says which new flows the backend takes. */
function takes({ inClusterSet, inLocalSet, inRedirectSet }) {
  if (inRedirectSet) return `takes flows of ${IS_CLUSTER ? "its own" : "this"} node`;
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
