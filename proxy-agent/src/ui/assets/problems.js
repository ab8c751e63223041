// Says what is wrong with a Service, so that the worst comes first.

import { latest } from "./history.js";
import { IS_CLUSTER } from "./place.js";
import { plural, rate, seconds } from "./text.js";

/** The kinds of problems, the worst first. */
export const KINDS = [
  ["refusing", "Clients not served"],
  ["down", "No ready backend"],
  ["failing", "Failed connects"],
  ["slow", "Slow connects"],
  ["differs", "Nodes differ"],
  ["conflict", "Conflicts"],
];

/** A connect that takes the median client as long, or one in a hundred, is slow: in seconds. A SYN is sent again after one second. */
const SLOW_MEDIAN = 0.1;
const SLOW_TAIL = 1;

/** The rate from which on a counter counts as moving; below it shows as 0. */
const MOVES = 0.005;

/** Returns the worst problem of a row; null if it has none. A Service may rightly have no endpoints, as long as no client asks for it. */
export function findProblem(row) {
  if (row.refused > MOVES) {
    const why = row.total === 0 ? "there are no endpoints" : row.ready === 0 ? "no backend is ready" : "";
    const found = problem("refusing", row.refused, `${rate(row.refused)}/s not served`, why, from(row, "unserved"));
    // The list of the cluster's Services has room for the reason.
    if (IS_CLUSTER && why) found.text = `${row.total === 0 ? "no endpoints" : "no ready backend"}: ${rate(row.refused)}/s${from(row, "unserved")}`;
    return found;
  }
  if (row.total > 0 && row.ready === 0) return problem("down", 0, "no ready backend");
  const failed = (IS_CLUSTER ? null : latest(row.key, "failed")) ?? row.failed;
  const what = row.ports.some((port) => port.endsWith("/UDP")) ? "unanswered or refused" : "connects fail";
  if (failed > MOVES) return problem("failing", failed, `${rate(failed)}/s ${what}`, "", from(row, "failed"));
  const [median, tail] = [latest(row.key, "connectP50"), latest(row.key, "connectP99")];
  if (median >= SLOW_MEDIAN || tail >= SLOW_TAIL) return problem("slow", tail ?? median, `connects take ${seconds(tail ?? median)}`);
  if (row.differing > 0) {
    const [{ node, what }] = row.differ;
    const text = row.differing === 1 ? `${node}: ${what}` : `${node} and ${row.differing - 1} more differ`;
    return problem("differs", row.differing, text, row.differing === 1 ? "" : row.differ.map(({ node, what }) => `${node}: ${what}`).join("; "));
  }
  if (row.conflicts > 0) return problem("conflict", row.conflicts, "another Service has one of its addresses");
  return null;
}

/** Names the nodes whose clients fail; on the page of a node there is no other. */
function from({ failing, failingNodes }, kind) {
  const all = failingNodes?.[kind] ?? 0;
  if (all === 0) return "";
  const nodes = failing.filter((one) => one[kind] > MOVES).map(({ node }) => node);
  if (nodes.length === 0) return ` from ${plural(all, "node")}`;
  return all > 2 || nodes.length < all ? ` from ${nodes[0]} and ${all - 1} more` : ` from ${nodes.join(", ")}`;
}

/** Returns a number by which problems sort: the kind, then the size. */
function problem(kind, size, short, why = "", from = "") {
  const text = short + from;
  const rank = KINDS.length - KINDS.findIndex(([id]) => id === kind);
  return { kind, short, text, long: why ? `${text}: ${why}` : text, weight: rank + Math.min(0.99, Math.log10(1 + (size ?? 0)) / 10) };
}
