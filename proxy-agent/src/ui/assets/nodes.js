// The nodes of a cluster: which answer, what is wrong with them, and what they send.

import { h } from "./dom.js";
import { state } from "./model.js";
import { age, byteRate, count, number, plural, rate, seconds } from "./text.js";

/** The number of nodes that a sentence names. */
const NAMED = 3;

/** Lists a few nodes by name: n1, n2 and 5 more. */
export function namesOf(nodes, all = nodes.length) {
  const shown = nodes.slice(0, NAMED);
  const more = all - shown.length;
  return more > 0 ? `${shown.join(", ")} and ${count(more)} more` : shown.join(", ");
}

export function nodesText({ nodes }) {
  const answering = nodes.filter(({ state }) => state === "answers").length;
  return `${count(answering)} of ${plural(nodes.length, "node")} ${answering === 1 ? "answers" : "answer"}`;
}

/** Lists the problems of all nodes; nodes with the same problem share a line. */
export function nodeNotices({ nodes, namesMissing }) {
  const shared = new Map();
  for (const node of nodes) {
    for (const problem of node.problems) {
      const key = `${problem.what} ${problem.why}`;
      if (!shared.has(key)) shared.set(key, { ...problem, nodes: [] });
      shared.get(key).nodes.push(node.name);
    }
  }
  const items = [...shared.values()].map(({ what, why, since, nodes }) =>
    h("li", { "data-problem": what }, h("b", { title: nodes.join(", ") }, namesOf(nodes), ": ", what), " ", why, h("span", { class: "faint" }, ` for ${age(since)}`)),
  );
  const bad = nodes.filter(({ problems }) => problems.length > 0).length;
  return [
    items.length > 0 ? h("section", { class: "notice bad", id: "node-problems" }, h("h2", {}, `${plural(bad, "node")} of ${count(nodes.length)} ${bad === 1 ? "has" : "have"} problems`), h("ul", {}, items)) : null,
    namesMissing ? h("section", { class: "notice" }, h("h2", {}, "Pods have no names here"), h("p", {}, namesMissing)) : null,
  ];
}

const STATES = { answers: ["good", "answers"], connecting: ["waiting", "connecting"], silent: ["unknown", "no answer"] };
const HEADS = ["Node", "State", "Problem", "Version", "#Services", "#Flows", "#Unserved/s", "#Clock", "#Sends"];

export function nodes() {
  const { status } = state;
  if (!status) return [];
  const sorted = [...status.nodes].sort((a, b) => b.problems.length - a.problems.length || a.name.localeCompare(b.name, "en", { numeric: true }));
  return [
    h("h2", { "data-key": "title" }, "Nodes"),
    h("p", { class: "faint", "data-key": "about" }, "Clock: how far the node's clock is ahead of this machine's, and the greatest error of that. Live shows times of this machine's clock."),
    h(
      "div",
      { class: "scroll", "data-key": "nodes", tabindex: 0, role: "region", "aria-label": "Nodes" },
      h(
        "table",
        { id: "nodes" },
        h("caption", { class: "hidden" }, "Nodes, those with problems first"),
        h("thead", {}, h("tr", {}, HEADS.map((text) => h("th", { scope: "col", class: text.startsWith("#") ? "number" : null }, text.replace("#", ""))))),
        h("tbody", {}, sorted.map(rowOf)),
      ),
    ),
  ];
}

function rowOf(node) {
  const [kind, text] = node.state === "answers" && !node.healthy ? ["bad", "problem"] : STATES[node.state];
  const numberCell = (text, value) => h("td", { class: `number ${value ? "" : "zero"}` }, text);
  const problems = node.problems.map(({ what, why }) => h("div", {}, h("b", {}, what), ` ${why}`));
  return h(
    "tr",
    { "data-key": node.name, "data-node": node.name },
    h("th", { scope: "row" }, node.name),
    h("td", {}, h("span", { class: `pill ${kind}` }, text)),
    h("td", { class: problems.length > 0 ? "what" : "what faint" }, problems.length > 0 ? problems : "–"),
    h("td", {}, node.version ?? "–"),
    numberCell(count(node.services), node.services),
    numberCell(number(node.flows), node.flows),
    numberCell(rate(node.unservedPerSec), node.unservedPerSec),
    h("td", { class: "number clock" }, clockText(node.skew)),
    numberCell(`${byteRate(node.bytesPerSec)}/s`, node.bytesPerSec),
  );
}

function clockText(skew) {
  if (!skew) return "–";
  const sign = skew.secs < 0 ? "−" : "+";
  return `${sign}${seconds(Math.abs(skew.secs))} ± ${seconds(skew.error)}`;
}
