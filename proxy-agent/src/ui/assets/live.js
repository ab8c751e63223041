// The live view: what the programs decide and refuse, as `kpx monitor` shows it.

import { follow } from "./agent.js";
import { field, mapNamespace, namespaceField, reasonLink, select } from "./controls.js";
import { h } from "./dom.js";
import { state } from "./model.js";
import { IS_CLUSTER, chosen, hrefOf, protocolOf } from "./place.js";
import { plural } from "./text.js";

/** The number of events that are kept, and the number that are shown. */
const KEEP = 500;
const SHOW = 100;
/** The time over which the map counts. */
const WINDOW_MS = 30_000;

const HEADS = ["Time", IS_CLUSTER && "Node", "Fate", "Client", "Dialled", "Service", "Backend or reason", ""].filter((text) => text !== false);

/** The events so far, the latest first. */
export const live = { events: [], number: 0, lost: 0, isOpen: false, why: "", paused: null, since: 0 };

/** The stream that is open: what it asks for, and how to end it. */
let stream = { question: null, controller: null };

/** Opens the stream that a view needs, and ends another one. A page that is not looked at has none. */
export function watchFor(view, changed) {
  const question = document.hidden ? null : questionOf(view);
  if (question === stream.question) return;
  stream.controller?.abort();
  stream = { question, controller: null };
  if (question === null) {
    live.isOpen = false;
    return;
  }
  Object.assign(live, { events: [], number: 0, lost: 0, isOpen: false, why: "", paused: null, since: performance.now() });
  const controller = new AbortController();
  stream.controller = controller;
  const opened = (isOpen, why) => {
    Object.assign(live, { isOpen, why });
    changed();
  };
  follow(question, controller.signal, (event) => { take(event); changed(); }, opened);
}

function questionOf(view) {
  const names = { live: ["namespace", "service", "client", "reason", "kind"], map: ["namespace", "service"] }[view];
  const namespace = view === "map" ? mapNamespace() : chosen("namespace");
  if (!names || (view === "map" && !namespace)) return null;
  const set = names.map((name) => [name, name === "namespace" ? namespace : chosen(name).trim()]).filter(([, value]) => value !== "");
  return `events?${new URLSearchParams(set)}`;
}

function take(event) {
  live.lost += event.lost;
  if (event.lost > 0 && event.what === "lost") return;
  live.number += 1;
  live.events.unshift({ ...event, seq: live.number, at: performance.now() });
  if (live.events.length > KEEP) live.events.length = KEEP;
}

export function view() {
  const shown = (live.paused ?? live.events).slice(0, SHOW);
  return [
    h("h2", { "data-key": "title" }, "Live decisions and refusals"),
    h(
      "div",
      { class: "toolbar", "data-key": "toolbar", role: "search" },
      namespaceField(),
      field("service", "Service", { placeholder: "any", size: 14 }),
      field("client", "Client", { placeholder: "any address", size: 16 }),
      select("kind", "Packets", [["", "All that open or fail"], ["decisions", "Opened flows"], ["unserved", "Dropped or rejected"]]),
      select("reason", "Reason", [["", "Any"], ...[...state.reasons.values()].filter(({ verdict }) => verdict !== "pass").map(({ name }) => [name, name])]),
      h("button", { type: "button", class: "quiet", id: "pause", "data-key": "pause", "aria-pressed": String(live.paused !== null) }, live.paused ? "Go on" : "Pause"),
    ),
    h("p", { class: "faint", id: "heard", "data-key": "heard" }, heard()),
    h(
      "table",
      { id: "events", "data-key": "events" },
      h("caption", { class: "hidden" }, "Packets that opened a flow or were refused, the latest first"),
      h("thead", {}, h("tr", {}, HEADS.map((text) => h("th", { scope: "col" }, text || h("span", { class: "hidden" }, "Trace"))))),
      h("tbody", {}, shown.map(rowOf)),
    ),
    shown.length === 0 ? h("p", { class: "nothing", "data-key": "nothing" }, live.isOpen ? "No such packet since this view was opened." : "…") : null,
  ];
}

/** Stops and goes on showing: reading takes longer than a packet. */
export function pause() {
  live.paused = live.paused ? null : live.events.slice();
}

function heard() {
  if (!live.isOpen) return live.why ? `No stream: ${live.why}` : "Opening the stream …";
  const lost = live.lost > 0 ? `; ${plural(live.lost, "packet")} more than can be shown` : "";
  return `${plural(live.number, "packet")}${lost}. The programs record only while this is open.`;
}

function rowOf(event) {
  const { decision } = event;
  const service = decision?.name ? `${decision.namespace}/${decision.name}` : null;
  const port = decision?.portName ? `:${decision.portName}` : "";
  return h(
    "tr",
    { "data-key": `event ${event.seq}`, "data-event": event.what },
    h("td", { class: "mono", title: event.nodeTime ? `${event.nodeTime} on the node's clock` : null }, event.time.slice(11, 23)),
    IS_CLUSTER && h("td", {}, event.node),
    h("td", {}, h("span", { class: `verdict ${event.what}` }, event.what === "decision" ? "opened" : event.what)),
    h("td", { class: "mono" }, end(event.client, event.clientName)),
    h("td", { class: "mono" }, event.dialled ?? "–", h("span", { class: "faint" }, event.protocol ? ` ${event.protocol}` : "")),
    h("td", {}, service ? h("a", { href: hrefOf("services", service) }, service, port) : decision ? decision.service : "–", decision ? h("span", { class: "faint" }, ` ${decision.kind} from ${decision.origin}`) : null),
    h("td", {}, event.reason ? reasonLink(event.reason, hrefOf("drops", event.reason)) : h("span", { class: "mono" }, end(decision?.backend, event.backendName))),
    h("td", {}, event.client && event.dialled ? h("a", { href: traceOf(event), "aria-label": `Trace ${event.client} to ${event.dialled}` }, "Trace") : null),
  );
}

/** Shows whose an address was, where that is certain, and the address. */
function end(address, name) {
  if (!address) return "–";
  if (!name) return address;
  const text = name.pod ?? (name.node ? `node ${name.node}` : "outside");
  return h("span", { title: address }, h("b", { class: "whose" }, text), h("span", { class: "faint" }, ` ${address}`));
}

/** Links to the trace of such a packet. The port of the client is left out: the flow with this port may be open. */
function traceOf({ client, dialled, protocol, decision, node = "" }) {
  const [address, port] = cut(dialled);
  const ofNode = node ? `node/${node}` : "";
  const from = decision?.origin === "node" ? ofNode : cut(client)[0];
  return hrefOf("trace", "", { from, to: address, port, protocol: protocolOf(protocol), node });
}

/** Splits an address and its port. */
export function cut(at) {
  const index = at.lastIndexOf(":");
  return [at.slice(0, index).replace(/^\[|\]$/g, ""), at.slice(index + 1)];
}

/** Returns the events of the last half minute, and how many seconds that are so far. */
export function recent() {
  const from = Math.max(live.since, performance.now() - WINDOW_MS);
  const events = live.events.filter((event) => event.at >= from);
  // A full list may reach back less far than the window.
  const oldest = live.events.length === KEEP ? Math.max(from, live.events.at(-1).at) : from;
  return [events, Math.max(1, (performance.now() - oldest) / 1000)];
}

