// The views of the node as a whole: unserved packets, devices, options, tables.

import { SOON_MS, ask } from "./agent.js";
import { copyButton, reasonLink } from "./controls.js";
import { h } from "./dom.js";
import { state } from "./model.js";
import { IS_CLUSTER, hrefOf } from "./place.js";
import { chart } from "./spark.js";
import { age, count, number, plural, rate } from "./text.js";

const ROLES = {
  pod: "leads to a pod",
  device: "leads elsewhere",
  loopback: "the host's own traffic",
  anchor: "where the host's own packets to services go",
};

export function drops(key) {
  const { status, node, reasons } = state;
  if (!status) return [];
  if (key) return reason(key);
  const rows = Object.entries(status.reasons).map(([name, total]) => ({
    name,
    total,
    meaning: "",
    verdict: "drop",
    ...reasons.get(name),
    now: node.now(`reason/${name}`),
    series: node.series(`reason/${name}`),
  }));
  rows.sort((a, b) => (b.now ?? 0) - (a.now ?? 0) || b.total - a.total || a.name.localeCompare(b.name));
  const unserved = rows.filter((row) => row.verdict !== "pass");
  const seen = unserved.filter((row) => row.total > 0);
  const left = rows.filter((row) => row.verdict === "pass");
  return [
    h("h2", { "data-key": "title" }, "Packets dropped or rejected"),
    seen.length > 0
      ? reasonTable("drops", "Packets dropped or rejected, by reason", seen)
      : h("p", { class: "nothing", "data-key": "nothing" }, IS_CLUSTER ? "None since kubectl kpx ui was started." : "None so far."),
    IS_CLUSTER && seen.length > 0 ? h("p", { class: "faint", "data-key": "since" }, "Counts are sums over all nodes since kubectl kpx ui was started.") : null,
    fold("other", "Reasons that did not occur", reasonTable("others", "Reasons that did not occur", unserved.filter((row) => row.total === 0))),
    fold("left", "Packets left to the host as they are", reasonTable("left", "Packets left to the host, by reason", left)),
  ];
}

/** What became of a packet, by the verdict. */
const FATES = {
  drop: "The packet is dropped without an answer.",
  reject: "The packet is answered with a TCP RST or an ICMP port unreachable.",
  pass: "The packet is left to the host as it is.",
};

/** Explains one reason, as `kpx explain` does. */
function reason(name) {
  const { status, node, reasons } = state;
  const back = h("p", { class: "back", "data-key": "back" }, h("a", { href: hrefOf("drops") }, "← Unserved"));
  const found = reasons.get(name);
  if (!found) return [back, h("p", { class: "nothing", "data-key": "nothing" }, `There is no reason ${name}.`)];
  const command = `kpx explain ${name}`;
  return [
    back,
    h("header", { class: "title", "data-key": "title" }, h("h2", { class: "mono" }, name, " ", h("span", { class: `verdict ${found.verdict}` }, found.verdict))),
    h(
      "section",
      { class: "card", "data-key": "explanation", id: "explanation" },
      h("p", {}, `${FATES[found.verdict] ?? ""} ${found.meaning[0].toUpperCase()}${found.meaning.slice(1)}.`),
      found.remedy.length > 0 ? [h("h3", {}, "What to do"), h("ol", {}, found.remedy.map((step) => h("li", {}, step)))] : null,
      h("p", {}, h("a", { href: hrefOf("live", "", { reason: name }) }, "Watch such packets"), h("span", { class: "faint" }, " · the same in a terminal: "), h("code", {}, command), copyButton(command)),
    ),
    h(
      "section",
      { class: "card", "data-key": "numbers" },
      h("h3", {}, `${count(status.reasons[name] ?? 0)} packets, ${rate(node.now(`reason/${name}`))}/s now`),
      chart({ id: `reason ${name}`, label: `${name}, packets`, colour: "drops", series: node.series(`reason/${name}`), text: rate, unit: "/s", size: { width: 600, height: 80 } }),
    ),
  ];
}

export function devices() {
  const { status } = state;
  if (!status) return [];
  const rows = status.devices.map((device) =>
    h(
      "tr",
      { "data-key": device.ifindex, "data-device": device.name },
      h("th", { scope: "row", class: "mono" }, device.name),
      h("td", { class: "number" }, device.ifindex),
      h("td", {}, h("span", { class: `role ${device.role}` }, device.role), h("span", { class: "faint wide" }, ` ${ROLES[device.role] ?? ""}`)),
      h("td", { class: "mono" }, device.attachedBy),
    ),
  );
  return [
    h("h2", { "data-key": "title" }, "Devices"),
    h("p", { class: "faint", "data-key": "count" }, `${plural(rows.length, "device")} with programs of kpx`),
    table("devices", "Devices with programs of kpx", ["Name", "#Index", "Role", "Attached by"], rows),
  ];
}

/** The node's options, as pairs of name and value in the words of `kpx status`. */
let options = [];

export async function readOptions() {
  options = await ask("options", SOON_MS).catch((error) => {
    // An older agent has none for its page.
    if (error.status === 404) return [];
    throw error;
  });
}

export function node() {
  const { status } = state;
  if (!status) return [];
  return [
    h("h2", { "data-key": "title" }, "Node"),
    skipped(status.skipped),
    card("options", "Options", options),
    card("agent", "Agent", [
      ["Version", status.version],
      ["Mode", status.mode],
      ["Runs for", age(status.started)],
      ["Addresses", status.nodeAddresses.join(", ") || "none"],
      ["Last sync", status.lastSync ? `${age(status.lastSync)} ago` : "none yet"],
      ["Syncs that changed a map", count(status.syncs)],
    ]),
    h("h3", { "data-key": "tables heading" }, "Tables"),
    table("tables", "What the maps hold", ["Family", "#Services", "#Ports", "#Frontends", "#Slots", "#Flows"], families(status)),
    h("h3", { "data-key": "maps heading" }, "Maps"),
    table("maps", "How full the maps are", ["Map", "#Entries", "#Room", "#Full"], maps(status.mapFill)),
    fold("programs", "Programs", programs(status)),
  ];
}

function families(status) {
  return Object.entries(status.tables).map(([family, t]) => {
    const numbers = [t.services, t.servicePorts, t.frontends, t.slots, status.flows[family]?.flows ?? 0];
    return h("tr", { "data-key": family }, h("th", { scope: "row" }, family), numbers.map((n) => h("td", { class: "number" }, count(n))));
  });
}

/** Lists the maps that have a count, the fullest first. */
function maps(fill) {
  const counted = Object.entries(fill).filter(([, { entries }]) => entries !== null);
  const part = ({ entries, maxEntries }) => (maxEntries > 0 ? entries / maxEntries : 0);
  counted.sort(([a, as], [b, bs]) => part(bs) - part(as) || a.localeCompare(b));
  return counted.map(([name, map]) =>
    h(
      "tr",
      { "data-key": name, "data-map": name },
      h("th", { scope: "row", class: "mono" }, name),
      h("td", { class: "number" }, count(map.entries)),
      h("td", { class: "number" }, count(map.maxEntries)),
      h(
        "td",
        { class: "number" },
        h("span", { class: `meter ${part(map) > 0.9 ? "high" : ""}`, style: `--ready: ${part(map)}`, "aria-hidden": "true" }),
        `${number(100 * part(map))} %`,
      ),
    ),
  );
}

function programs({ programs }) {
  const items = Object.entries(programs).map(([name, { tag }]) => h("li", {}, h("span", { class: "mono" }, name), " ", h("span", { class: "faint" }, tag)));
  return h("ul", { class: "columns" }, items);
}

function skipped(objects) {
  if (objects.length === 0) return null;
  return h(
    "section",
    { class: "notice", "data-key": "skipped", id: "skipped" },
    h("h3", {}, "Skipped, because they cannot be used"),
    h("ul", {}, objects.map((object) => h("li", {}, object))),
  );
}

function reasonTable(id, caption, reasons) {
  const rows = reasons.map((reason) =>
    h(
      "tr",
      { "data-key": reason.name, "data-reason": reason.name },
      h("th", { scope: "row" }, reasonLink(reason.name, hrefOf("drops", reason.name)), h("span", { class: "faint narrow" }, reason.meaning)),
      h("td", { class: "meaning" }, reason.meaning),
      h("td", {}, h("span", { class: `verdict ${reason.verdict}` }, reason.verdict)),
      h("td", { class: "number" }, count(reason.total)),
      h("td", { class: `number ${reason.now ? "" : "zero"}` }, rate(reason.now)),
      h(
        "td",
        { class: "trend" },
        chart({ id: `trend ${reason.name}`, label: `${reason.name}, packets`, colour: reason.verdict === "pass" ? "packets" : "drops", series: reason.series, text: rate, unit: "/s", size: { width: 120, height: 24 } }),
      ),
    ),
  );
  return table(id, caption, ["Reason", "Meaning", "Fate", "#Packets", "#Packets/s", "Trend"], rows);
}

/** Makes a table; a `#` before a heading marks a column of numbers. */
function table(id, caption, headings, rows) {
  const columns = headings.map((heading) => h("th", { scope: "col", class: heading.startsWith("#") ? "number" : null }, heading.replace("#", "")));
  return h(
    "table",
    { id, "data-key": id },
    h("caption", { class: "hidden" }, caption),
    h("thead", {}, h("tr", {}, columns)),
    h("tbody", {}, rows),
  );
}

function card(id, heading, facts) {
  const items = facts.filter(([, fact]) => fact).map(([name, fact]) => h("div", {}, h("dt", {}, name), h("dd", {}, fact)));
  return h("section", { class: "card", "data-key": id, id }, h("h3", {}, heading), h("dl", { class: "facts" }, items));
}

function fold(id, summary, content) {
  return h("details", { "data-key": id, id: `fold-${id}` }, h("summary", {}, summary), content);
}
