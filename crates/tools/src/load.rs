//! Load on a lab: new connections at a steady rate, and streams that notice every packet that comes
//! late or not at all.
//!
//! Both are cheap, so that a small machine can measure itself: one thread for all connections, one
//! for all streams.

mod dialer;
mod flood;
mod gaps;
mod results;
mod stream;
mod streams;

pub use self::dialer::{Dialer, Exchange, Plan};
pub use self::flood::{Flood, Pair};
pub use self::gaps::{Gap, Gaps};
pub use self::results::Results;
pub use self::stream::Seen;
pub use self::streams::{Kind, Route, StreamResults, Streams};
