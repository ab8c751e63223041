// Asks the agent: at intervals, line by line, and as events come.

const SECONDS = Number(new URLSearchParams(location.search).get("every")) || 2;
const PERIOD_MS = 1_000 * Math.max(SECONDS, 0.1);
const TIMEOUT_MS = 15_000;
/** The time that the page works before the browser may draw: half of a frame. */
const SLICE_MS = 6;
const RETRY_MS = 3_000;

/** The header by which the agent knows its page: no other site can make a browser send it. */
const OF_PAGE = { "kpx-page": "1" };

/** Returns JSON of the agent that served this page. */
export async function ask(what) {
  const response = await get(what, AbortSignal.timeout(TIMEOUT_MS));
  return response.json();
}

/** Hands each line's JSON to `take`, and lets the browser draw in between. Returns the number of lines. */
export async function askLines(what, take) {
  const response = await get(what, AbortSignal.timeout(TIMEOUT_MS));
  let started = performance.now();
  let number = 0;
  for await (const line of linesOf(response.body)) {
    take(JSON.parse(line), number);
    number += 1;
    if (performance.now() - started > SLICE_MS) {
      await breath();
      started = performance.now();
    }
  }
  return number;
}

/** Hands events to `take` until `signal` aborts. `changed` learns whether the stream is open, and why not. */
export async function follow(what, signal, take, changed) {
  while (!signal.aborted) {
    try {
      const response = await get(what, signal);
      changed(true, "");
      for await (const line of linesOf(response.body)) {
        if (line.startsWith("data: ")) take(JSON.parse(line.slice(6)));
      }
      changed(false, "");
    } catch (error) {
      if (signal.aborted) return;
      changed(false, error.message);
      await pause(RETRY_MS);
    }
  }
}

async function get(what, signal) {
  const response = await fetch(`api/${what}`, { cache: "no-store", headers: OF_PAGE, signal });
  if (response.ok) return response;
  const error = new Error(`${(await response.text()).trim() || response.statusText}`);
  throw Object.assign(error, { status: response.status });
}

async function* linesOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    yield* lines;
  }
  if (rest) yield rest;
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

/** Lets the browser draw and take input. */
export function breath() {
  return globalThis.scheduler?.yield ? scheduler.yield() : pause(0);
}

function visible() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
}
