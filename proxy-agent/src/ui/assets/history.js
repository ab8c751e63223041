// The last minutes, which the agent keeps: charts have a past from the first second.

import { ask } from "./agent.js";
import { IS_CLUSTER, chosen } from "./place.js";
import { state } from "./model.js";
import { WINDOW_MS } from "./rates.js";

/** The time between two readings of all histories: the agent adds a point every ten seconds. */
const PERIOD_MS = 30_000;
/** The time before the next attempt while no node of the cluster answers. */
const RETRY_MS = 2_000;

/** The page of a cluster reads the history of one Service, whose `key` is open, beside the total. */
const kept = { total: null, services: new Map(), nodes: new Map(), missing: [], times: [], asked: -Infinity, key: "", isServed: true };

/** The difference between the node's clock and this one's, in milliseconds. */
let ahead = 0;

/** Reads the histories again when it is time to, or when another Service of a cluster is open. An agent without them leaves the page with its own readings. */
export async function readHistory(key = "") {
  const isOther = IS_CLUSTER && kept.key !== key;
  if (!kept.isServed || (!isOther && performance.now() - kept.asked < PERIOD_MS)) return;
  Object.assign(kept, { asked: performance.now(), key });
  try {
    const found = await ask(IS_CLUSTER && key ? `history?${new URLSearchParams({ service: key })}` : "history");
    if (kept.key === key) take(found);
  } catch (error) {
    kept.isServed = error.status !== 404;
  }
}

function take({ stepSecs, end, points, total, services, nodes = [], missing = [] }) {
  if (!end) {
    if (IS_CLUSTER) kept.asked += RETRY_MS - PERIOD_MS;
    return;
  }
  ahead = Math.min(Math.max(ahead, Date.parse(end) - Date.now()), 3_600_000);
  const last = performance.now() - Math.max(0, Date.now() + ahead - Date.parse(end));
  kept.times = Array.from({ length: points }, (_, n) => last - (points - 1 - n) * stepSecs * 1_000);
  kept.total = total;
  kept.services = new Map(services.map((service) => [`${service.namespace}/${service.name}`, service]));
  kept.nodes = new Map(nodes.map((one) => [one.node, one]));
  kept.missing = missing;
}

/** Returns the share of UDP flows of a node's clients that stayed unanswered in the history's time; null without flows. */
export function unansweredShare(key, node) {
  return shareOf(historyOf(key) && kept.nodes.get(node));
}

/** Returns the share of a UDP port's flows that stayed unanswered in the history's time; null without flows. A Service with one UDP port has that port's. */
export function portShare(key, port, isOnly) {
  const history = historyOf(key);
  const values = (field) => (history?.[field] ?? []).reduce((sum, value) => sum + value, 0);
  const whole = isOnly ? { answered: values("udpAnswered"), unanswered: values("udpUnanswered") } : null;
  return shareOf(history?.udpPorts?.find((one) => one.port === port) ?? whole);
}

function shareOf(flows) {
  const all = flows ? flows.answered + flows.unanswered : 0;
  return all > 0 ? flows.unanswered / all : null;
}

/** Returns the history of a Service, or of all for the empty key; undefined if there is none. */
export function historyOf(key) {
  return key === "" ? kept.total : kept.services.get(key);
}

/** Returns a sentence that names the cluster's nodes without a history; empty if there is none. */
export function missingHistories() {
  return kept.missing.length > 0 ? `The time before this page was opened lacks ${kept.missing.join(", ")}.` : "";
}

/** Returns the last known value of a field; null if there is none. */
export function latest(key, field) {
  const values = historyOf(key)?.[field];
  return values?.findLast((value) => value !== null) ?? null;
}

/** Joins the agent's history of fields, which are added up, and the page's own later readings: pairs of time and rate. */
export function past(key, fields, readings) {
  const history = historyOf(key);
  const first = readings.find(([, value]) => value !== null)?.[0] ?? Infinity;
  if (!history) return readings.filter(([time]) => time >= first);
  const older = kept.times.map((time, n) => [time, total(fields.map((field) => history[field]?.[n]))]);
  // The first rates are means of a short time, and the agent counts in bursts.
  const from = Math.max(first + WINDOW_MS, kept.times.at(-1) + 1);
  return [...older, ...readings.filter(([time]) => time >= from)];
}

function total(values) {
  return values.some((value) => typeof value !== "number") ? null : values.reduce((sum, value) => sum + value, 0);
}

/** The least time that a chart shows, so that a few readings look like no trend. */
const LEAST_MS = 60_000;

/** Returns the beginning and the end of what charts show, on the clock of `performance.now()`: no more than is known. */
export function span() {
  const end = performance.now();
  const known = kept.total ? kept.times[kept.total.opened.findIndex((value) => value !== null)] : undefined;
  const first = Math.min(known ?? end, state.firstReading ?? end, end - LEAST_MS);
  return [Math.max(first, end - Number(chosen("range")) * 60_000), end];
}

/** Returns the readings of a Service, as pairs of time and rate, with its history in front. */
export function seriesOf(key, counters, fields) {
  const series = counters.map((counter) => state.services.series(key, counter));
  const readings = series[0].map(([time], n) => [time, total(series.map((one) => one[n][1]))]);
  return past(key, fields, readings);
}
