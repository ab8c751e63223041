// Computes rates and their recent past from readings of counters.

/** The number of remembered readings. */
export const KEEP = 90;

/** The window of a rate. The agent counts the traffic of open flows when it sweeps them, so a shorter window would show bursts. */
const WINDOW_MS = 12_000;

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

  /** Takes in a reading: pairs of a key and its counters. */
  add(time, reading) {
    const at = this.#count % KEEP;
    this.#times[at] = time;
    for (const [key, counters] of reading) {
      let history = this.#histories.get(key);
      // A counter that fell has restarted, for example with another agent.
      if (!history || counters.some((value, field) => value < this.#value(history, field, this.#count - 1))) {
        history = { since: this.#count, values: new Float64Array(KEEP * this.#width) };
        this.#histories.set(key, history);
      }
      history.values.set(counters, at * this.#width);
      history.seen = this.#count;
    }
    for (const [key, history] of this.#histories) {
      if (history.seen !== this.#count) this.#histories.delete(key);
    }
    this.#count += 1;
  }

  /** Returns the current rate per second; null while it is unknown. */
  now(key, field = 0) {
    const history = this.#histories.get(key);
    return history ? this.#rate(history, field, this.#count - 1) : null;
  }

  /** Returns the rates at all remembered readings, the latest one last; an unknown rate is null. */
  series(key, field = 0) {
    const history = this.#histories.get(key);
    const first = Math.max(0, this.#count - KEEP);
    return Array.from({ length: this.#count - first }, (_, n) => (history ? this.#rate(history, field, first + n) : null));
  }

  #rate(history, field, at) {
    const oldest = Math.max(history.since, this.#count - KEEP);
    if (at <= oldest) return null;
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

/** Adds series of equal length, reading by reading. */
export function sum(series) {
  return series.reduce((total, one) => total.map((value, n) => (value === null || one[n] === null ? value ?? one[n] : value + one[n])));
}
