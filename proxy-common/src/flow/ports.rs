//! The source ports that kpx gives to flows.

/// Source ports that kpx gives to the host's flows start here: above Linux's default
/// `ip_local_port_range`, so that they are not those of the node's own connections. So do the ports
/// of flows that keep their client's address.
pub const SOURCE_PORT_FIRST: u16 = 61_000;

/// Source ports of masqueraded clients: below Linux's default `ip_local_port_range`, and below the
/// default range of node ports. The host has its ports to itself.
pub const CLIENT_PORT_FIRST: u16 = 1_024;
pub const CLIENT_PORT_LAST: u16 = 29_999;

/// Returns true if kpx may have drawn a port. Only such ports are those of a flow's source where an
/// ingress hook finds its replies: any other is the client's own.
#[inline(always)]
pub const fn may_be_drawn(port: u16) -> bool {
    port <= CLIENT_PORT_LAST || port >= SOURCE_PORT_FIRST
}
