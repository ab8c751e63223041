// Asks the agent: at intervals, line by line, and as events come.

const SECONDS = Number(new URLSearchParams(location.search).get("every")) || 2;
const PERIOD_MS = 1_000 * Math.max(SECONDS, 0.1);
/** The longest wait for an answer. */
const TIMEOUT_MS = 15_000;
/** The longest silence of an agent that answers small questions. After it the page reports that the agent hangs. */
export const SOON_MS = 4_000;
/** The time that the page works on rows in a frame. The rest is for the browser, and for what the reader does meanwhile. */
const SLICE_MS = 3;
/** The most that it works where frames are late: a fifth of the time, so that a reading ends on a busy machine too. */
const LATE_SLICE_MS = 12;
/** The time that a turn takes from others: most of a frame. */
const TURN_MS = 12;
/** The time after which the page goes on without a frame: a hidden page has none. */
const FRAME_LATE_MS = 100;
const RETRY_MS = 3_000;

/** The header by which the agent knows its page: no other site can make a browser send it. */
const OF_PAGE = { "kpx-page": "1" };

/** Returns JSON of the agent that served this page. */
export async function ask(what, timeout = TIMEOUT_MS) {
  const response = await get(what, AbortSignal.timeout(timeout));
  let text = "";
  for await (const piece of piecesOf(response.body)) text += piece;
  return JSON.parse(text);
}

/** Returns the agent's status. Behind a slow connection it may wait for larger answers: silence counts, not time. */
export async function askStatus() {
  const abort = new AbortController();
  const asked = performance.now();
  const watch = setInterval(() => {
    if (performance.now() - Math.max(asked, heard) > SOON_MS) abort.abort(new DOMException("no answer", "TimeoutError"));
  }, SOON_MS / 8);
  try {
    const response = await get("status", abort.signal);
    return await response.json();
  } finally {
    clearInterval(watch);
  }
}

/** The time of the last piece of an answer to a question. */
let heard = -Infinity;

/** Hands each line to `take`, and lets the browser draw in between. */
export async function askLines(what, take) {
  const response = await get(what, AbortSignal.timeout(TIMEOUT_MS));
  const slice = new Slice();
  let number = 0;
  for await (const lines of linesOf(response.body)) {
    for (const line of lines) {
      take(line, number);
      number += 1;
      if (slice.isOver) await slice.next();
    }
  }
}

/** The work between two frames. */
export class Slice {
  #end = performance.now() + SLICE_MS;

  get isOver() {
    return performance.now() > this.#end;
  }

  async next() {
    const before = performance.now();
    await turn();
    const now = performance.now();
    this.#end = now + Math.min(LATE_SLICE_MS, Math.max(SLICE_MS, (now - before) / 5));
  }
}

let taken = 0;

/** Waits for a frame in which no other work has its turn. */
export async function turn() {
  do await breath();
  while (performance.now() < taken);
  taken = performance.now() + TURN_MS;
}

/** Hands events to `take` until `signal` aborts. `changed` learns whether the stream is open, and why not. */
export async function follow(what, signal, take, changed) {
  while (!signal.aborted) {
    try {
      const response = await get(what, signal);
      changed(true, "");
      for await (const lines of linesOf(response.body)) {
        for (const line of lines) if (line.startsWith("data: ")) take(JSON.parse(line.slice(6)));
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

async function* piecesOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    heard = performance.now();
    yield value;
  }
}

/** Yields the lines of each piece that arrives: of ten thousand lines, a promise for each would cost much. */
async function* linesOf(body) {
  let rest = "";
  for await (const piece of piecesOf(body)) {
    const lines = (rest + piece).split("\n");
    rest = lines.pop();
    yield lines;
  }
  if (rest) yield [rest];
}

/** Calls `read` while the page is visible, and leaves the agent four fifths of the time to itself. */
export async function poll(read) {
  for (;;) {
    const started = performance.now();
    // A fault in a view must not end the readings.
    await read().catch((error) => console.error(error));
    const took = performance.now() - started;
    await pause(Math.max(PERIOD_MS - took, 4 * took));
    await visible();
  }
}

function pause(millis) {
  return new Promise((resolve) => setTimeout(resolve, millis));
}

/** Waits until the browser has drawn a frame. A mere yield comes back before that: browsers run it ahead of frames. */
function breath() {
  return new Promise((resolve) => {
    const late = setTimeout(resolve, FRAME_LATE_MS);
    requestAnimationFrame(() => setTimeout(() => resolve(clearTimeout(late))));
  });
}

function visible() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
}
