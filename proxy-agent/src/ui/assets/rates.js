// Computes rates and their recent past from readings of counters.

/** The number of remembered readings. */
export const KEEP = 90;

/** The window of a rate. The agent counts the traffic of open flows when it sweeps them, so a shorter window would show bursts. */
export const WINDOW_MS = 12_000;

/** The history of counters by key; each key has several counters. */
export class Rates {
  #width;
  /** The number of readings so far; reading `n` is kept at `n % KEEP`. */
  #count = 0;
  #times = new Float64Array(KEEP);
  #histories = new Map();

  constructor(width) {
    this.#width = width;
  }

  /** Takes in a whole reading: pairs of a key and its counters. */
  add(time, reading) {
    this.begin(time);
    for (const [key, counters] of reading) this.put(key, counters);
    this.end();
  }

  /** Begins a reading. */
  begin(time) {
    this.#times[this.#count % KEEP] = time;
    this.#count += 1;
  }

  /** Takes in the counters of one key. Its rate is known at once. */
  put(key, counters) {
    const now = this.#count - 1;
    const history = this.#histories.get(key);
    // A counter that fell has restarted, for example with another agent.
    if (!history || history.seen !== now - 1 || counters.some((value, field) => value < history.last[field])) {
      this.#histories.set(key, { since: now, seen: now, last: counters, values: null });
      return;
    }
    // Most Services are idle, and need no memory for their past.
    if (!history.values && counters.some((value, field) => value !== history.last[field])) {
      history.values = new Float64Array(KEEP * this.#width);
      for (let at = 0; at < KEEP; at += 1) history.values.set(history.last, at * this.#width);
    }
    history.values?.set(counters, (now % KEEP) * this.#width);
    Object.assign(history, { seen: now, last: counters });
  }

  /** Ends a reading: keys that were not in it are forgotten. */
  end() {
    for (const [key, history] of this.#histories) {
      if (history.seen !== this.#count - 1) this.#histories.delete(key);
    }
  }

  /** Returns the current rate per second; null while it is unknown. */
  now(key, field = 0) {
    const history = this.#histories.get(key);
    return history ? this.#rate(history, field, this.#count - 1) : null;
  }

  /** Returns the rates at all remembered readings as pairs of time and rate, the latest one last; an unknown rate is null. */
  series(key, field = 0) {
    const history = this.#histories.get(key);
    const first = Math.max(0, this.#count - KEEP);
    return Array.from({ length: this.#count - first }, (_, n) => {
      const at = first + n;
      return [this.#time(at), history && at <= history.seen ? this.#rate(history, field, at) : null];
    });
  }

  #rate(history, field, at) {
    const oldest = Math.max(history.since, this.#count - KEEP);
    if (at <= oldest) return null;
    if (!history.values) return 0;
    let from = at - 1;
    while (from > oldest && this.#time(at) - this.#time(from - 1) <= WINDOW_MS) from -= 1;
    const elapsed = this.#time(at) - this.#time(from);
    return ((this.#value(history, field, at) - this.#value(history, field, from)) / elapsed) * 1000;
  }

  #time(reading) {
    return this.#times[reading % KEEP];
  }

  #value(history, field, reading) {
    return history.values[(reading % KEEP) * this.#width + field];
  }
}
