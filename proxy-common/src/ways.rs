//! The agent's words to the fast path.

use crate::assert_size;

/// The only value of `WAYS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ways {
    /// The number of changes to routes, rules, neighbours and devices.
    pub epoch: u32,
    /// The last second since boot in which whole connections may be opened past the stack, unless the agent puts it off.
    pub opens_until: u32,
}
assert_size!(Ways = 4 + 4);
