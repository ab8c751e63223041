// Rates and their recent past, from readings of counters.

/** Readings that are remembered. */
export const KEEP = 90;

/** The agent learns what open flows have passed when it sweeps them: a shorter window would see bursts. */
const WINDOW_MS = 12_000;

/** Counters by key, several of them under each key. */
export class Rates {
  #width;
  /** Readings so far; reading `n` is kept at `n % KEEP`. */
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
      // A counter that fell began anew, as with another agent.
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

  /** A second, now; null while it is not known. */
  now(key, field = 0) {
    const history = this.#histories.get(key);
    return history ? this.#rate(history, field, this.#count - 1) : null;
  }

  /** The rates at all readings that are remembered, the last one last; null where it was not known. */
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
