//! Which packets may skip the stack now: the loader's choice, the agent's settings, and its lease.

use proxy_common::device::Node;

use crate::maps;
use crate::setting::FAST_PATH;

/// Returns true if packets of open connections may skip the stack.
#[inline(always)]
pub fn is_on() -> bool {
    is_built_in() && maps::node().is_some_and(|node| node.has(Node::OF_FAST_PATH))
}

/// Returns true if bypass flows may be opened. The agent grants only a short lease, because it has
/// to watch for new rules.
#[inline(always)]
pub fn opens_flows() -> bool {
    opens_flows_by(maps::about_now_secs)
}

/// Returns the same by another clock.
#[inline(always)]
pub fn opens_flows_by(now_secs: impl FnOnce() -> u32) -> bool {
    let is_in_time = || now_secs() <= maps::opens_until();
    is_built_in() && maps::node().is_some_and(|node| node.has(Node::FAST_OPEN) && is_in_time())
}

/// Returns true if flows that were opened through the stack may bypass it as well.
#[inline(always)]
pub fn is_on_for_all() -> bool {
    maps::node().is_some_and(|node| node.has(Node::FAST_PATH))
}

#[inline(always)]
fn is_built_in() -> bool {
    FAST_PATH.get() != 0
}
