//! The programs' counters. Every packet is translated or has a [`Reason`], which decides its
//! verdict.

/// The reason why a packet was not translated.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// Neither IPv4 nor IPv6.
    NotIp,
    /// Has a VLAN tag. The hook of the VLAN's own device handles the packet.
    Vlan,
    /// Has passed another of kpx's ingress hooks, such as a bridge port before the bridge.
    SeenBefore,
    /// Shorter than its headers claim, or with impossible headers.
    Malformed,
    /// A fragment without a recorded first fragment.
    Fragment,
    /// A transport that kpx does not translate, or an ICMP message about an unknown flow.
    Protocol,
    /// Has a multicast, broadcast, loopback, unspecified or link-local (fe80::/10) address.
    NotUnicast,
    /// Has no flow, and its destination is not a frontend.
    NotOurs,
    /// Has no flow, and cannot open a flow.
    NoFlow,
    /// To a Service without endpoints.
    NoEndpoints,
    /// To a port that the Service at this address does not have.
    UnknownPort,
    /// The policy allows only local endpoints, and all endpoints are remote.
    NoLocalEndpoints,
    /// From outside the cluster to a ClusterIP that the operator restricts to the cluster.
    Outside,
    /// From outside the Service's `loadBalancerSourceRanges`.
    SourceRange,
    /// To an unallocated address of a ServiceCIDR.
    Unallocated,
    /// The slot was removed between the reads of the count and of the slot, twice.
    StaleSlot,
    /// The flow table is full.
    FlowsFull,
    /// The client, or the Service's namespace, has used up its share of the flow table: see
    /// [`share`](crate::share).
    ClientShare,
    /// Every source port tried for this backend is in use.
    NoSourcePort,
    /// The source address must change, but the node has no address of this family.
    NoNodeAddress,
    /// The host has no route to the backend.
    NoRoute,
    /// The host has lost its route to the backend of an open flow.
    RouteLost,
    /// The kernel refused to rewrite the packet.
    Rewrite,
    /// Could open a flow, but kpx is draining.
    Draining,
    /// Reached the anchor from a device that had no program when the packet passed it.
    Unhooked,
    /// Spoofed: the source is the node's own address, or the route to the source uses another
    /// device.
    Spoofed,
    /// A first fragment to a Service, without its complete transport header.
    CutHeader,
    /// Belongs to a connection whose backend is lost with its node, for a Service with
    /// `reset-on-node-loss`.
    BackendLost,
    /// May belong to a flow, and the hook could not call the program of the slow path: another
    /// program has emptied `SLOW`.
    SlowPathMissing,
    /// Came through the tunnel of nodes that hand over packets of external clients, and is none of
    /// them: the sender is no such node, the destination no frontend that it may hand over, the
    /// backend is on another node, or the packet is from the middle of a connection without a flow
    /// here.
    HandoverRefused,
    /// From the middle of an external client's TCP connection to a Service that hands clients over,
    /// and neither a flow here nor the table leads the packet to a node. The stack would reset the
    /// connection.
    NotHandedOver,
}

/// What happens to a packet that was not translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The packet continues unchanged to the next program.
    Pass,
    /// The packet is dropped silently.
    Drop,
    /// The packet is answered with a TCP RST or an ICMP port unreachable.
    Reject,
}

impl Verdict {
    /// Returns the name in metrics and on the web page.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Drop => "drop",
            Self::Reject => "reject",
        }
    }
}

impl Reason {
    pub const ALL: [Self; 31] = [
        Self::NotIp,
        Self::Vlan,
        Self::SeenBefore,
        Self::Malformed,
        Self::Fragment,
        Self::Protocol,
        Self::NotUnicast,
        Self::NotOurs,
        Self::NoFlow,
        Self::NoEndpoints,
        Self::UnknownPort,
        Self::NoLocalEndpoints,
        Self::Outside,
        Self::SourceRange,
        Self::Unallocated,
        Self::StaleSlot,
        Self::FlowsFull,
        Self::ClientShare,
        Self::NoSourcePort,
        Self::NoNodeAddress,
        Self::NoRoute,
        Self::RouteLost,
        Self::Rewrite,
        Self::Draining,
        Self::Unhooked,
        Self::Spoofed,
        Self::CutHeader,
        Self::BackendLost,
        Self::SlowPathMissing,
        Self::HandoverRefused,
        Self::NotHandedOver,
    ];

    /// Returns the reason at `index` of [`Self::ALL`].
    #[inline(always)]
    pub fn from_index(index: u32) -> Option<Self> {
        Self::ALL.get(index as usize).copied()
    }

    /// Returns the verdict on such a packet at a device hook. Only this function decides it.
    #[inline(always)]
    pub const fn verdict(self) -> Verdict {
        match self {
            Self::NotIp
            | Self::Vlan
            | Self::SeenBefore
            | Self::Malformed
            | Self::Fragment
            | Self::Protocol
            | Self::NotUnicast
            | Self::NotOurs
            | Self::NoFlow
            | Self::Draining => Verdict::Pass,
            Self::NoEndpoints | Self::UnknownPort | Self::BackendLost => Verdict::Reject,
            Self::NoLocalEndpoints
            | Self::Outside
            | Self::SourceRange
            | Self::Unallocated
            | Self::StaleSlot
            | Self::FlowsFull
            | Self::ClientShare
            | Self::NoSourcePort
            | Self::NoNodeAddress
            | Self::NoRoute
            | Self::RouteLost
            | Self::Rewrite
            | Self::Unhooked
            | Self::Spoofed
            | Self::CutHeader
            | Self::SlowPathMissing
            | Self::HandoverRefused
            | Self::NotHandedOver => Verdict::Drop,
        }
    }

    /// Returns the verdict on such a packet at the anchor. The kernel would route a passed packet
    /// into the anchor again, so only Draining passes, for another proxy; the anchor's peer does
    /// not forward it.
    #[inline(always)]
    pub const fn verdict_at_anchor(self) -> Verdict {
        match self {
            Self::Draining => Verdict::Pass,
            Self::NotOurs | Self::NoFlow | Self::NoRoute => Verdict::Reject,
            other => match other.verdict() {
                Verdict::Pass => Verdict::Drop,
                verdict => verdict,
            },
        }
    }

    /// Returns the name in `status`, logs and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::NotIp => "not_ip",
            Self::Vlan => "vlan",
            Self::SeenBefore => "seen_before",
            Self::Malformed => "malformed",
            Self::Fragment => "fragment",
            Self::Protocol => "protocol",
            Self::NotUnicast => "not_unicast",
            Self::NotOurs => "not_ours",
            Self::NoFlow => "no_flow",
            Self::NoEndpoints => "no_endpoints",
            Self::UnknownPort => "unknown_port",
            Self::NoLocalEndpoints => "no_local_endpoints",
            Self::Outside => "outside",
            Self::SourceRange => "source_range",
            Self::Unallocated => "unallocated",
            Self::StaleSlot => "stale_slot",
            Self::FlowsFull => "flows_full",
            Self::ClientShare => "client_share",
            Self::NoSourcePort => "no_source_port",
            Self::NoNodeAddress => "no_node_address",
            Self::NoRoute => "no_route",
            Self::RouteLost => "route_lost",
            Self::Rewrite => "rewrite",
            Self::Draining => "draining",
            Self::Unhooked => "unhooked",
            Self::Spoofed => "spoofed",
            Self::CutHeader => "cut_header",
            Self::BackendLost => "backend_lost",
            Self::SlowPathMissing => "slow_path_missing",
            Self::HandoverRefused => "handover_refused",
            Self::NotHandedOver => "not_handed_over",
        }
    }
}

/// Events of translated packets and flows.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Event {
    FlowOpened,
    /// The programs closed a flow so that its client reaches another backend: a UDP flow of a
    /// removed backend, or a half-open TCP flow of an unresponsive backend.
    FlowMoved,
    /// The programs evicted a half-open flow to free its entries.
    FlowForgotten,
    /// A packet was translated towards a backend.
    Forwarded,
    /// A packet was translated towards a client.
    Returned,
    /// The programs answered a rejected packet, which also counts under its reason.
    Rejected,
    /// The programs did not answer a rejected packet: the frame was for another host, or the limit
    /// per second was reached.
    Unanswered,
    /// Socket load balancing gave a socket a backend as its peer. None of its packets need
    /// translation.
    SocketLed,
    /// A packet bypassed the network stack, into the pod's veth (`FastLocal`) or to the neighbour
    /// on another device (`FastRemote`). Also counts as forwarded or returned.
    FastLocal,
    FastRemote,
    /// A client with an address in this node's podCIDRs was classified as outside the cluster.
    PodOutside,
    /// A connection of another program collided with a flow's tuple and got another source port.
    PortMoved,
    /// A FIN or RST had a sequence number that the other side does not expect. The packet passed,
    /// and the flow stayed open.
    EndIgnored,
    /// A backend refused a connection, or had sent nothing when the client's SYN was retransmitted
    /// or an ICMP error arrived.
    BackendFailed,
    /// A packet of an external client was sent to the node of its backend.
    HandedOver,
}

impl Event {
    pub const ALL: [Self; 15] = [
        Self::FlowOpened,
        Self::FlowMoved,
        Self::FlowForgotten,
        Self::Forwarded,
        Self::Returned,
        Self::Rejected,
        Self::Unanswered,
        Self::SocketLed,
        Self::FastLocal,
        Self::FastRemote,
        Self::PodOutside,
        Self::PortMoved,
        Self::EndIgnored,
        Self::BackendFailed,
        Self::HandedOver,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Self::FlowOpened => "flow_opened",
            Self::FlowMoved => "flow_moved",
            Self::FlowForgotten => "flow_forgotten",
            Self::Forwarded => "forwarded",
            Self::Returned => "returned",
            Self::Rejected => "rejected",
            Self::Unanswered => "unanswered",
            Self::SocketLed => "socket_translated",
            Self::FastLocal => "fast_local",
            Self::FastRemote => "fast_remote",
            Self::PodOutside => "pod_outside",
            Self::PortMoved => "port_moved",
            Self::EndIgnored => "end_ignored",
            Self::BackendFailed => "backend_failed",
            Self::HandedOver => "handed_over",
        }
    }
}

/// An index into `COUNTERS`: events first, then reasons.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counter(u32);

impl Counter {
    pub const COUNT: u32 = (Event::ALL.len() + Reason::ALL.len()) as u32;

    #[inline(always)]
    pub const fn index(self) -> u32 {
        self.0
    }
}

impl From<Event> for Counter {
    #[inline(always)]
    fn from(event: Event) -> Self {
        Self(event as u32)
    }
}

impl From<Reason> for Counter {
    #[inline(always)]
    fn from(reason: Reason) -> Self {
        Self(Event::ALL.len() as u32 + reason as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_counter_has_its_own_place_and_name() {
        let mut indexes: Vec<u32> = Event::ALL
            .map(|event| Counter::from(event).index())
            .to_vec();
        indexes.extend(Reason::ALL.map(|reason| Counter::from(reason).index()));
        assert_eq!(indexes, (0..Counter::COUNT).collect::<Vec<_>>());
        let mut names: Vec<_> = Reason::ALL.map(Reason::name).to_vec();
        names.extend(Event::ALL.map(Event::name));
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Counter::COUNT as usize);
    }

    #[test]
    fn nothing_passes_the_anchor_but_for_others_to_serve() {
        let passing = Reason::ALL
            .iter()
            .filter(|reason| reason.verdict_at_anchor() == Verdict::Pass);
        assert_eq!(Vec::from_iter(passing), [&Reason::Draining]);
    }
}
