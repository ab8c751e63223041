// The trace: what the programs would do with a packet, and why.

import { ask } from "./agent.js";
import { copyButton, field, reasonLink, select } from "./controls.js";
import { h } from "./dom.js";
import { state } from "./model.js";
import { IS_CLUSTER, chosen, hrefOf } from "./place.js";
import { plural } from "./text.js";

/** The last answer: the question, and either the trace or the fault. */
const last = { question: null, busy: false, trace: null, fault: "" };

/** Two nodes load a copy of their programs, one after the other. */
const TIMEOUT_MS = 30_000;

/** The number of Services that the form offers. */
const OFFERED = 500;

export function view() {
  const offered = state.rows.slice(0, OFFERED).map((row) => h("option", { value: row.key }));
  return [
    h("h2", { "data-key": "title" }, "Trace a packet"),
    h("p", { class: "faint", "data-key": "about" }, `The packet runs through a copy of the kernel programs with ${IS_CLUSTER ? "the tables of the client's node, and then with those of the backend's" : "this node's tables"}. Nothing is sent, and no traffic is touched.`),
    h(
      "form",
      { class: "toolbar", id: "trace", "data-key": "form" },
      field("from", "From", { placeholder: IS_CLUSTER ? "pod/shop/cart-0" : "this node", size: 34, required: IS_CLUSTER, "aria-describedby": "from-help" }),
      field("to", "To", { placeholder: "shop/web or 10.96.0.10", size: 26, list: "offered", required: true, "aria-describedby": "to-help" }),
      field("port", "Port", { placeholder: "80", size: 6 }),
      IS_CLUSTER && field("node", "Node", { placeholder: "the client's", size: 12 }),
      select("protocol", "Protocol", [["", "TCP"], ["udp", "UDP"], ["sctp", "SCTP"]]),
      h("button", { type: "submit", class: "primary", disabled: last.busy }, last.busy ? "Tracing …" : "Trace"),
      h("datalist", { id: "offered" }, offered),
    ),
    h("p", { class: "faint help", "data-key": "from-help", id: "from-help" }, IS_CLUSTER
      ? "From: pod/NAMESPACE/NAME, deploy/NAMESPACE/NAME, node/NAME for a process of a node, or an address. Node: where the packets of an external client come to."
      : "From: an address, pod/NAMESPACE/NAME, deploy/NAMESPACE/NAME, or nothing for a process of this node."),
    h("p", { class: "faint help", "data-key": "to-help", id: "to-help" }, "To: an address, a Service as NAMESPACE/NAME or by its DNS name, or pod/NAMESPACE/NAME."),
    h("div", { "data-key": "answer", id: "answer", role: "status" }, last.busy ? null : answer()),
  ];
}

/** Runs the trace of the form. */
export async function run(changed) {
  if (last.busy) return;
  const question = asked();
  Object.assign(last, { question, busy: true, trace: null, fault: "" });
  changed();
  try {
    last.trace = await ask(`trace?${new URLSearchParams(question)}`, TIMEOUT_MS);
  } catch (error) {
    last.fault = error.message;
  }
  last.busy = false;
  changed();
}

/** Returns the ends as `kpx trace` takes them. */
function asked() {
  const [from, to, port, protocol, node] = ["from", "to", "port", "protocol", "node"].map((name) => chosen(name).trim());
  const isIpv6 = to.includes(":") && /^[0-9a-f:.]+$/i.test(to);
  const at = port ? `${isIpv6 ? `[${to}]` : to}:${port}` : to;
  // Behind a name without port, a slash is part of the name.
  const end = protocol && protocol !== "tcp" && at.includes(":") ? `${at}/${protocol}` : at;
  const ends = from ? { from, to: end } : { to: end };
  return IS_CLUSTER && node ? { ...ends, node } : ends;
}

function answer() {
  if (last.fault) return h("section", { class: "notice bad" }, h("h3", {}, "No trace"), h("p", {}, last.fault));
  if (!last.trace) return null;
  const { from, to, node } = last.question;
  const kpx = IS_CLUSTER ? `kubectl kpx${node ? ` --node ${node}` : ""}` : "kpx";
  const command = `${kpx} trace ${from ? `--from ${from}` : "--host"} --to ${to}`;
  const { onward } = last.trace;
  const then = `Then on ${onward?.node ?? "the backend's node"}`;
  return [
    shown(last.trace, "traced", `On ${last.trace.node}`, h("p", { class: "faint" }, "The same in a terminal: ", h("code", {}, command), copyButton(command))),
    onward ? shown(onward.trace, "onward", then, null, onward.error) : null,
  ];
}

/** Shows one node's half, or why it has none: the node may run another version of kpx. */
function shown(trace, id, where, end, error) {
  let why = error;
  try {
    if (!why) return half(trace, id, end);
  } catch (fault) {
    console.error(fault);
    why = "This node runs another version of kpx, whose answer this page cannot show.";
  }
  return h("section", { class: "notice bad", id }, h("h3", {}, `${where}: no trace`), h("p", {}, why), end);
}

/** Shows what one node does with the packet: the client's, or then the backend's. */
function half({ packet, hook, outcome, notes, warnings = [], node }, id, end) {
  const isPassedOn = id === "onward" && outcome.reason === "not_ours";
  const facts = [
    ["Packet", `${packet.from} → ${packet.to}/${packet.protocol}`],
    ["Met by", `${hook.program} at ${hook.device} of ${node}`],
    ["Frontend", outcome.frontend ? `${outcome.frontend.at}, ${outcome.frontend.kind}` : null],
    ["Service", serviceOf(outcome.service)],
    ["Client", outcome.origin],
    ["Affinity", outcome.set?.affinitySeconds ? `${outcome.set.affinitySeconds} s, ${outcome.affinityHit ? "this client is known" : "this client is new"}` : null],
    ["Backend sees", outcome.source ? `${outcome.source.at}: ${outcome.source.explanation}` : null],
  ];
  return h(
    "section",
    { class: "card", id, "data-verdict": outcome.verdict, "data-node": node },
    h("h3", {}, IS_CLUSTER ? `${id === "onward" ? "Then on" : "On"} ${node}: ` : null, h("span", { class: `verdict ${outcome.verdict}` }, outcome.verdict), " ", outcome.backend ? `to ${outcome.backend.at}` : "", outcome.reason && !isPassedOn ? reasonLink(outcome.reason, hrefOf("drops", outcome.reason)) : null),
    h("p", {}, isPassedOn ? "kpx passes the translated packet on unchanged" : outcome.explanation),
    outcome.remedy.length > 0 ? [h("h4", {}, "What to do"), h("ol", {}, outcome.remedy.map((step) => h("li", {}, step)))] : null,
    h("dl", { class: "facts" }, facts.filter(([, fact]) => fact).map(([name, fact]) => h("div", {}, h("dt", {}, name), h("dd", {}, fact)))),
    outcome.set ? [h("h4", {}, `${plural(outcome.set.backends.length, "backend")} in the ${outcome.set.name} set, chosen by ${outcome.set.algorithm}`), h("ul", { class: "frontends" }, outcome.set.backends.map(backend))] : null,
    notes.map((note) => h("p", { class: warnings.includes(note) ? "why" : "faint" }, `Note: ${note}`)),
    end,
  );
}

function serviceOf(service) {
  if (!service?.name) return null;
  const key = `${service.namespace}/${service.name}`;
  return h("a", { href: hrefOf("services", key) }, key, service.portName ? `:${service.portName}` : "");
}

function backend({ at, local }) {
  return h("li", {}, h("span", { class: "mono" }, at), local ? h("span", { class: "tag" }, "this node") : null);
}
