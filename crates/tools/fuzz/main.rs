//! The programs against a plain model of what must become of single packets, whole or spoilt:
//! verdict, bytes, mark, counters, flows. Every other cluster has the fast path built in, and some
//! of it on: see [`fast::Fast`].
//!
//! `KPX_SEED` repeats a run: it is printed at the start, and with a difference that of its session
//! alone. `KPX_FUZZ_SECS` says how long it takes. What a difference comes down to is written to
//! `corpus/`, and all that is there is run again by every test. `KPX_FUZZ_KEEP`, a seed,
//! adds the beginning of its session.

mod corpus;
mod craft;
mod fast;
mod fixture;
mod floods;
mod kernel_log;
mod liberal;
mod model;
mod mutate;
mod run;
mod session;
mod steps;
mod stranger;
