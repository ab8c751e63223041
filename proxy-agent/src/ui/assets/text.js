// Formats numbers and times for people.

const PREFIXES = ["", "k", "M", "G", "T", "P"];

/** Formats a number with three digits and a decimal prefix: 1.23k. */
export function number(value) {
  if (value === null || Number.isNaN(value)) return "–";
  let prefix = 0;
  while (Math.abs(value) >= 999.5 && prefix < PREFIXES.length - 1) {
    value /= 1000;
    prefix += 1;
  }
  const digits = prefix === 0 && Number.isInteger(value) ? 0 : value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  return trimmed(value.toFixed(digits)) + PREFIXES[prefix];
}

/** Formats a number of bytes: 1.23 kB. */
export function bytes(value) {
  return number(value).replace(/[a-zA-Z]?$/, (prefix) => ` ${prefix}B`);
}

/** Formats a rate; below 0.005 it counts as 0. */
export function rate(value) {
  return value === null ? "–" : number(value < 0.005 ? 0 : value);
}

/** Formats bytes per second. */
export function byteRate(value) {
  return value === null ? "–" : bytes(value < 0.005 ? 0 : value);
}

/** A format that is made once: making it costs more than a row of the table. */
const GROUPED = new Intl.NumberFormat("en");

/** Formats a number with every digit, in groups. */
export function count(value) {
  return GROUPED.format(value);
}

/** Formats a count with the singular or the plural. */
export function plural(value, one, several = `${one}s`) {
  return `${count(value)} ${value === 1 ? one : several}`;
}

/** Formats the time since `timestamp` in its largest unit. */
export function age(timestamp, now = Date.now()) {
  const seconds = Math.max(0, Math.round((now - Date.parse(timestamp)) / 1000));
  for (const [unit, length] of [["d", 86_400], ["h", 3_600], ["min", 60]]) {
    if (seconds >= 2 * length) return `${Math.floor(seconds / length)} ${unit}`;
  }
  return `${seconds} s`;
}

/** Formats a time span in its own unit: 250 µs, 12 ms, 1.2 s. */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1) return `${number(value)} s`;
  return value >= 0.001 ? `${number(value * 1e3)} ms` : `${number(Math.round(value * 1e6))} µs`;
}

/** Formats the time of day. */
export function clock(time) {
  return new Date(time).toLocaleTimeString("en-GB");
}

/** Formats an address and a port; an IPv6 address is in brackets. */
export function endpoint(address, port) {
  return address.includes(":") ? `[${address}]:${port}` : `${address}:${port}`;
}

function trimmed(text) {
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}
