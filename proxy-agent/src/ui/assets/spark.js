// Draws small charts.

import { svg } from "./dom.js";

/** The least number of readings for the full width; a few readings over it would look like a trend. */
const SPAN = 30;

/** Draws the line of a series, with time from left to right; its last number stands beside it as text. */
export function spark(series, colour, { width = 120, height = 28 } = {}) {
  const peak = Math.max(...series.filter((value) => value !== null), 1e-9);
  const step = width / (Math.max(series.length, SPAN) - 1);
  const points = series.flatMap((value, n) => {
    if (value === null) return [];
    return [[width - (series.length - 1 - n) * step, height - 1 - (value / peak) * (height - 4)]];
  });
  const line = points.map(([x, y], n) => `${n === 0 ? "M" : "L"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
  const attributes = { class: `spark ${colour}`, viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" };
  if (points.length < 2) return svg("svg", attributes);
  const area = `${line}L${width} ${height}L${points[0][0].toFixed(1)} ${height}Z`;
  return svg("svg", attributes, svg("path", { class: "area", d: area }), svg("path", { class: "line", d: line }));
}
