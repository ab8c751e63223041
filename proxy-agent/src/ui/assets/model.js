// Computes the values that all views show of a reading.

import { Rates } from "./rates.js";

/** The counters of a service or of a service port, in this order. */
export const OPENED = 0;
export const PACKETS = 1;
export const BYTES = 2;
export const UNSERVED = 3;
const COUNTERS = 4;

/** The state as of the last readings. */
export const state = {
  status: null,
  reasons: new Map(),
  rows: [],
  services: new Rates(COUNTERS),
  node: new Rates(1),
  /** The reason why the last reading failed, and below it the time of the last success. */
  silence: null,
  lastAnswer: null,
};

export function takeStatus(status) {
  state.status = status;
  const of = (kind, counts) => Object.entries(counts).map(([name, count]) => [`${kind}/${name}`, [count]]);
  state.node.add(performance.now(), [...of("event", status.events), ...of("reason", status.reasons)]);
}

export function takeServices(services) {
  const reading = [];
  for (const service of services) {
    const ports = service.ports.map((port) => counters(port.counts));
    reading.push([serviceKey(service), ports.reduce((a, b) => a.map((value, n) => value + b[n]), [0, 0, 0, 0])]);
    service.ports.forEach((port, n) => reading.push([portKey(service, port), ports[n]]));
  }
  state.services.add(performance.now(), reading);
  state.rows = services.map(row);
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
  return [
    counts.flowsOpened,
    counts.packets + counts.packetsReturned,
    counts.bytes + counts.bytesReturned,
    counts.dropped + counts.rejected,
  ];
}

function row(service) {
  const key = serviceKey(service);
  const [ready, total] = readiness(service.ports.flatMap((port) => port.backends));
  const addresses = [...service.clusterIps, ...service.loadBalancerIps, ...service.externalIps];
  const ports = service.ports.map(portText);
  return {
    key,
    service,
    namespace: service.namespace,
    name: service.name,
    type: service.type,
    addresses,
    ports,
    ready,
    total,
    flows: service.ports.reduce((flows, port) => flows + port.counts.flows, 0),
    opened: state.services.now(key, OPENED),
    packets: state.services.now(key, PACKETS),
    bytes: state.services.now(key, BYTES),
    refused: state.services.now(key, UNSERVED),
    words: [key, service.type, ...addresses, ...ports, ...service.ports.map((port) => port.name)].join(" ").toLowerCase(),
  };
}

