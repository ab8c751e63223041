// Computes the values that all views show of a reading.

import { latest } from "./history.js";
import { findProblem } from "./problems.js";
import { Rates } from "./rates.js";

/** The counters of a service or of a service port, in this order. */
export const OPENED = 0;
export const PACKETS = 1;
export const BYTES = 2;
export const DROPPED = 3;
export const REJECTED = 4;
const COUNTERS = 5;

/** The key of the sum over all Services. */
export const ALL = "";

/** The state as of the last readings. */
export const state = {
  status: null,
  reasons: new Map(),
  /** The rows of the table, by namespace and name. */
  rows: [],
  /** The number of Services that the agent announced: more than `rows` while the first reading comes in. */
  announced: 0,
  /** The time of the first reading, on the clock of `performance.now()`. */
  firstReading: null,
  /** A number that changes with the rows. */
  version: 0,
  /** The whole view of the Service that is open; null while it is unknown, false if there is none. */
  open: null,
  services: new Rates(COUNTERS),
  ports: new Rates(COUNTERS),
  node: new Rates(1),
  /** The reason why the last reading failed, and below it the time of the last success. */
  silence: null,
  lastAnswer: null,
};

export function takeStatus(status) {
  state.status = status;
  state.firstReading ??= performance.now();
  const of = (kind, counts) => Object.entries(counts).map(([name, count]) => [`${kind}/${name}`, [count]]);
  const entries = [...of("event", status.events), ...of("reason", status.reasons)];
  const unserved = Object.entries(status.reasons).filter(([name]) => isUnserved(name));
  state.node.add(performance.now(), [...entries, ["unserved", [unserved.reduce((sum, [, count]) => sum + count, 0)]]]);
}

/** The Services by their lines in the last reading. Most lines are the same in the next one, and need not be parsed again. */
let known = new Map();

/** Takes in the table line by line. */
export class Reading {
  #rows = [];
  /** The number of rows that come ahead of their place, and these rows. */
  #ahead = 0;
  #first = [];
  #services = new Map();
  #sum = new Array(COUNTERS).fill(0);

  constructor() {
    state.services.begin(performance.now());
  }

  /** Takes in one line. The first one has the numbers of rows and of failing Services; the rows of the latter come twice, at first ahead of all. */
  take(line, number) {
    if (number === 0) {
      const head = JSON.parse(line);
      state.announced = head.services;
      this.#ahead = head.ahead;
      return;
    }
    const service = known.get(line) ?? serviceOf(JSON.parse(line));
    if (number <= this.#ahead) {
      this.#first.push(rowOf(service));
      return;
    }
    this.#services.set(line, service);
    state.services.put(service.key, service.counts);
    service.counts.forEach((count, field) => (this.#sum[field] += count));
    this.#rows.push(rowOf(service));
  }

  /** Returns the rows so far. */
  get rows() {
    return this.#rows;
  }

  /** Shows the rows so far. */
  showSoFar() {
    const first = new Set(this.#first.map(({ key }) => key));
    state.rows = [...this.#first, ...this.#rows.filter(({ key }) => !first.has(key))];
    state.version += 1;
  }

  end() {
    state.services.put(ALL, this.#sum);
    state.services.end();
    state.rows = this.#rows;
    state.version += 1;
    known = this.#services;
  }
}

/** Takes in the whole view of one Service, and the rates of its ports. */
export function takeService(service) {
  state.open = service;
  if (service) state.ports.add(performance.now(), service.ports.map((port) => [portKey(service, port), counters(port.counts)]));
}

export function serviceKey({ namespace, name }) {
  return `${namespace}/${name}`;
}

export function portKey(service, port) {
  return `${serviceKey(service)}:${port.protocol}/${port.port}`;
}

/** Formats a port: 80/TCP, or 80→30080/TCP with a node port. */
export function portText({ port, nodePort, protocol }) {
  return `${port}${nodePort ? `→${nodePort}` : ""}/${protocol}`;
}

/** Returns the numbers of `[ready, all]` pods; without pods' names it counts addresses. */
export function readiness(backends) {
  const pods = new Map();
  for (const backend of backends) {
    const pod = backend.pod ?? addressOf(backend);
    pods.set(pod, (pods.get(pod) ?? true) && backend.ready);
  }
  return [[...pods.values()].filter(Boolean).length, pods.size];
}

export function isUnserved(reason) {
  return state.reasons.get(reason)?.verdict !== "pass";
}

function addressOf(backend) {
  return backend.address.slice(0, backend.address.lastIndexOf(":"));
}

function counters(counts) {
  return [counts.flowsOpened, counts.packets + counts.packetsReturned, counts.bytes + counts.bytesReturned, counts.dropped, counts.rejected];
}

/** Returns what a line says, and the text that the filter searches. */
function serviceOf(line) {
  const [key, ports] = [serviceKey(line), line.ports.map(portText)];
  const words = [key, line.type, ...line.addresses, ...ports, ...line.ports.map((port) => port.name)];
  return { ...line, key, ports, words: words.join(" ").toLowerCase() };
}

/** Returns the last rate of unserved packets before the page was opened; null if unknown. */
function unservedBefore(key) {
  const [dropped, rejected] = [latest(key, "dropped"), latest(key, "rejected")];
  return dropped === null && rejected === null ? null : dropped + rejected;
}

/** Adds the current rates to a Service, and what is wrong with it. */
function rowOf(service) {
  const now = (field) => state.services.now(service.key, field);
  const [dropped, rejected] = [now(DROPPED), now(REJECTED)];
  const before = unservedBefore(service.key) ?? service.unserved ?? null;
  const row = {
    ...service,
    opened: now(OPENED),
    packets: now(PACKETS),
    bytes: now(BYTES),
    refused: dropped === null ? before : dropped + rejected,
  };
  row.problem = findProblem(row);
  return row;
}
