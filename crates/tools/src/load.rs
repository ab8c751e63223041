//! Load on a lab: new connections at a constant rate, and streams that detect every late or lost
//! packet.
//!
//! Both are cheap, so that a small machine can measure itself: one thread for all connections, one
//! thread for all streams.

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
