// Asks the agent at intervals.

const SECONDS = Number(new URLSearchParams(location.search).get("every")) || 2;
const PERIOD_MS = 1_000 * Math.max(SECONDS, 0.1);
const TIMEOUT_MS = 15_000;

/** Returns JSON of the agent that served this page. */
export async function ask(what) {
  const response = await fetch(`api/${what}`, { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (!response.ok) throw new Error(`${what}: ${(await response.text()) || response.statusText}`);
  return response.json();
}

/** Calls `read` while the page is visible, and leaves the agent four fifths of the time to itself. */
export async function poll(read) {
  for (;;) {
    const started = performance.now();
    await read();
    const took = performance.now() - started;
    await pause(Math.max(PERIOD_MS - took, 4 * took));
    await visible();
  }
}

function pause(millis) {
  return new Promise((resolve) => setTimeout(resolve, millis));
}

function visible() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
}
