//! The source ports that kpx assigns to flows.

/// The first source port for the host's flows, and for flows that keep their client's address:
/// above Linux's default `ip_local_port_range`, so that they do not collide with the node's own
/// connections.
pub const SOURCE_PORT_FIRST: u16 = 61_000;

/// The source ports for masqueraded clients: below the defaults of `ip_local_port_range` and of the
/// node port range, so that the host's ports stay its own.
pub const CLIENT_PORT_FIRST: u16 = 1_024;
pub const CLIENT_PORT_LAST: u16 = 29_999;

/// Returns true if kpx may have assigned the port. Replies to any other port carry the client's own
/// port.
#[inline(always)]
pub const fn may_be_drawn(port: u16) -> bool {
    port <= CLIENT_PORT_LAST || port >= SOURCE_PORT_FIRST
}
