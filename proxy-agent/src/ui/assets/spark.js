// Draws charts over time. The reader finds the values with the pointer, or with the arrow keys.

import { h, svg } from "./dom.js";
import { span } from "./history.js";
import { clock } from "./text.js";

/** The chart that the reader points at, and the time on the clock of `performance.now()`. */
const cursor = { chart: "", time: 0 };

/** What the drawn charts show, by id: for the cursor. */
const charts = new Map();

/** Draws the line of a series of pairs of time and value; gaps are unknown values. */
export function spark(series, colour, { width = 120, height = 28 } = {}) {
  const [from, to] = span();
  const shown = series.filter(([time]) => time >= from);
  const peak = Math.max(...shown.map(([, value]) => value ?? 0), 1e-9);
  const x = (time) => ((time - from) / (to - from)) * width;
  const y = (value) => height - 1 - (value / peak) * (height - 4);
  const attributes = { class: `spark ${colour}`, viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" };
  const [line, area] = [[], []];
  for (const piece of pieces(shown)) {
    const points = piece.map(([time, value]) => `${x(time).toFixed(1)} ${y(value).toFixed(1)}`);
    line.push(`M${points.join("L")}`);
    area.push(`M${points.join("L")}L${x(piece.at(-1)[0]).toFixed(1)} ${height}L${x(piece[0][0]).toFixed(1)} ${height}Z`);
  }
  const base = svg("path", { class: "base", d: `M0 ${height - 0.5}H${width}` });
  if (line.length === 0) return svg("svg", attributes, base);
  return svg("svg", attributes, base, svg("path", { class: "area", d: area.join("") }), svg("path", { class: "line", d: line.join("") }));
}

/** Cuts a series where values are unknown; a lone value is no line. */
function pieces(series) {
  const pieces = [];
  let piece = [];
  for (const point of [...series, [0, null]]) {
    if (point[1] !== null) piece.push(point);
    else {
      if (piece.length > 1) pieces.push(piece);
      piece = [];
    }
  }
  return pieces;
}

/** Draws a chart with a name and its last value, which tells each of its values. */
export function chart({ id, label, colour, series, text, unit = "", size }) {
  charts.set(id, { series, text, unit });
  const at = cursor.chart === id ? nearest(series, cursor.time) : null;
  const last = series.findLast(([, value]) => value !== null) ?? null;
  const [from, to] = span();
  const minutes = Math.max(1, Math.round((to - from) / 60_000));
  const shown = at ?? last;
  return h(
    "div",
    {
      class: "plot",
      "data-plot": id,
      tabindex: 0,
      role: "slider",
      "aria-label": `${label}, last ${minutes} min`,
      "aria-valuemin": -minutes * 60,
      "aria-valuemax": 0,
      "aria-valuenow": shown ? Math.max(-minutes * 60, Math.min(0, Math.round((shown[0] - to) / 1000))) : 0,
      "aria-valuetext": shown ? `${text(shown[1])}${unit} at ${timeOf(shown[0])}` : "no value yet",
    },
    spark(series, colour, size),
    at && at[0] >= from
      ? [
          h("span", { class: "needle", style: `--at: ${(at[0] - from) / (to - from)}` }),
          h("span", { class: "value", style: `--at: ${(at[0] - from) / (to - from)}` }, `${text(at[1])}${unit} · ${timeOf(at[0])}`),
        ]
      : null,
  );
}

function nearest(series, time) {
  const known = series.filter(([, value]) => value !== null);
  return known.reduce((best, point) => (!best || Math.abs(point[0] - time) < Math.abs(best[0] - time) ? point : best), null);
}

function timeOf(time) {
  return clock(performance.timeOrigin + time);
}

/** Moves the cursor to where the pointer is. Returns true if something changed. */
export function pointAt(event) {
  const plot = event.target.closest?.("[data-plot]");
  if (!plot) return leave();
  const { left, width } = plot.getBoundingClientRect();
  const [from, to] = span();
  Object.assign(cursor, { chart: plot.dataset.plot, time: from + ((event.clientX - left) / width) * (to - from) });
  return true;
}

/** Takes the cursor away. Returns true if there was one. */
export function leave() {
  const was = cursor.chart !== "";
  cursor.chart = "";
  return was;
}

/** Moves the cursor by keys: to the value before or after, to the first, to the last. Returns true if the key was one of them. */
export function step(event) {
  const id = event.target.dataset?.plot;
  const known = charts.get(id)?.series.filter(([time, value]) => value !== null && time >= span()[0]) ?? [];
  const last = known.length - 1;
  const at = cursor.chart === id ? known.indexOf(nearest(known, cursor.time)) : last;
  const to = { ArrowLeft: at - 1, ArrowDown: at - 1, ArrowRight: at + 1, ArrowUp: at + 1, Home: 0, End: last }[event.key];
  if (to === undefined || last < 0) return false;
  Object.assign(cursor, { chart: id, time: known[Math.min(last, Math.max(0, to))][0] });
  return true;
}
