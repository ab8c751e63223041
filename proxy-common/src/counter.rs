//! The programs' counters: every packet is translated, or has a reason why it was not.

/// Why a packet was not translated.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// Neither IPv4 nor IPv6.
    NotIp,
    /// Carries a VLAN tag: the VLAN's own device handles it.
    Vlan,
    /// Has passed another of our ingress hooks on its way here: a bridge's port before the bridge.
    SeenBefore,
    /// Shorter than its headers say, or headers that cannot be.
    Malformed,
    /// A fragment, and the first one of its packet was not seen.
    Fragment,
    /// A transport that kpx does not translate, or an ICMP message about none of our flows.
    Protocol,
    /// To or from a multicast, broadcast, loopback or unspecified address, or one of fe80::/10.
    NotUnicast,
    /// No flow, and its destination is no frontend.
    NotOurs,
    /// Belongs to no flow and cannot open one.
    NoFlow,
    /// To a service without endpoints.
    NoEndpoints,
    /// To a port that the service at this address does not offer.
    UnknownPort,
    /// The service has endpoints, but its policy allows only local ones and none is here.
    NoLocalEndpoints,
    /// From outside the cluster to a ClusterIP, which the operator has restricted to the cluster.
    Outside,
    /// From outside the service's `loadBalancerSourceRanges`.
    SourceRange,
    /// To an address of a ServiceCIDR that no service has.
    Unallocated,
    /// A slot vanished twice between counting and reading it.
    StaleSlot,
    /// The flow table is full.
    FlowsFull,
    /// The client, or the namespace of the service, holds its share of the flow table: see
    /// [`share`](crate::share).
    ClientShare,
    /// Every source port tried towards this backend is taken.
    NoSourcePort,
    /// The source address must change and the node has no address of this family.
    NoNodeAddress,
    /// The host has no route to the backend.
    NoRoute,
    /// The host has lost its route to the backend of a flow.
    RouteLost,
    /// The kernel refused to change the packet.
    Rewrite,
    /// Might open a flow, wherever it goes, but kpx is about to leave this node.
    Draining,
    /// At the anchor, but it came in through a device: that device had no program when the packet
    /// passed.
    Unhooked,
    /// In another's name: its source is the node's own, or the route back to it leads through
    /// another device.
    Forged,
    /// A first fragment to a service lacks a part of its transport header.
    CutHeader,
    /// Of a connection whose backend has gone with its node, for a service that wants such
    /// connections ended.
    BackendLost,
}

/// The fate of a packet that was not translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Left as it is, for the next program.
    Pass,
    /// The packet was dropped without an answer.
    Drop,
    /// The packet was answered with a TCP RST or an ICMP port unreachable.
    Reject,
}

impl Verdict {
    /// The name in metrics and on the web page.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Drop => "drop",
            Self::Reject => "reject",
        }
    }
}

impl Reason {
    pub const ALL: [Self; 28] = [
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
        Self::Forged,
        Self::CutHeader,
        Self::BackendLost,
    ];

    /// The reason whose place in [`Self::ALL`] is `index`.
    #[inline(always)]
    pub fn from_index(index: u32) -> Option<Self> {
        Self::ALL.get(index as usize).copied()
    }

    /// Returns what a device hook does with such a packet. Nothing else decides this.
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
            | Self::Forged
            | Self::CutHeader => Verdict::Drop,
        }
    }

    /// Returns what the anchor does with it. Nothing may pass there, for behind it the kernel would
    /// route the packet in again. But a packet that another proxy serves is not ours to refuse.
    /// (The anchor's other end does not forward it.)
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

    /// The name in `status`, logs and metrics.
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
            Self::Forged => "forged",
            Self::CutHeader => "cut_header",
            Self::BackendLost => "backend_lost",
        }
    }
}

/// Packets that were translated, and flows opened.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Event {
    FlowOpened,
    /// A UDP flow whose backend serves no longer was closed, or a half-open TCP flow whose backend
    /// is silent, for its client to be led to another one.
    FlowMoved,
    /// A half-open flow was closed, to make room for another one.
    FlowForgotten,
    /// Towards a backend.
    Forwarded,
    /// Back to a client.
    Returned,
    /// A reject was answered: its packet is counted under its reason as well.
    Rejected,
    /// A reject was not answered, because its frame was not for this host, or there were too many
    /// in this second.
    Unanswered,
    /// A socket that dialled a service was given a backend as its peer: no packet of it is
    /// translated.
    SocketLed,
    /// Past the stack, into the pod's end of its veth, or to the neighbour through another device:
    /// counted as forwarded or returned as well.
    FastLocal,
    FastRemote,
    /// A client whose address is in this node's podCIDRs was taken for one outside the cluster.
    PodOutside,
    /// Another program's connection left with a tuple that a flow of kpx has, and got another
    /// source port.
    PortMoved,
    /// A FIN or RST had a number that its flow's other side did not expect: it was passed on, and
    /// ended nothing here.
    EndIgnored,
    /// A backend has refused a connection, or sent nothing until the client's SYN came again or an
    /// ICMP error came.
    BackendFailed,
    /// A client's SYN came for a prompt backend that owes another SYN its answer for 0.3 s.
    BackendOwes,
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
        Self::BackendOwes,
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
            Self::BackendOwes => "backend_owes",
        }
    }
}

/// An index into `COUNTERS`: the events first, then the reasons.
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
