//! The node and its devices, for the kernel programs.

use crate::addr::{Addr, Addr4, Addr6};
use crate::assert_size;

/// The only value of `NODE`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Node {
    /// The primary addresses, which a hairpin's backend sees as source. Unspecified while unknown.
    pub addr4: Addr4,
    pub addr6: Addr6,
    /// The interface index of the anchor. Replies to the host's own sockets are injected into its
    /// ingress.
    pub anchor_ifindex: u32,
    /// The anchor's MAC address, which these replies need as destination.
    pub anchor_mac: [u8; 6],
    pad: u16,
    flags: u32,
}
assert_size!(Node = 4 + 16 + 4 + 6 + 2 + 4);

impl Node {
    /// `--masquerade compat`: masquerade exactly where kube-proxy does. Otherwise kpx masquerades
    /// only where replies would not return.
    pub const COMPAT: u32 = 1 << 0;
    /// `--masquerade-all`: masquerade every client of a ClusterIP.
    pub const MASQUERADE_ALL: u32 = 1 << 1;
    /// Local pods are detectable by their IPv4 addresses.
    pub const DETECTS4: u32 = 1 << 2;
    /// Local pods are detectable by their IPv6 addresses.
    pub const DETECTS6: u32 = 1 << 3;
    /// `--cluster-ip-external`, the default: ClusterIPs serve clients outside the cluster, as
    /// kube-proxy's do.
    pub const CLUSTER_IP_EXTERNAL: u32 = 1 << 4;
    /// `--mode host`: this host is not a node. Packets that arrive at its devices open no flows,
    /// and neither do packets of its sockets to its own addresses.
    pub const HOST: u32 = 1 << 5;

    /// `kpx cleanup --drain`: packets that would open flows pass to the next program, and open
    /// flows continue.
    pub const DRAINING: u32 = 1 << 6;
    /// Packets of open connections bypass the stack, if the loaded programs support it.
    pub const FAST_PATH: u32 = 1 << 7;
    /// Devices are stacked: a packet may pass two egress hooks, of a bridge and its port, or a
    /// macvlan and its parent.
    pub const STACKED: u32 = 1 << 8;
    /// At least one device is [`Device::FILTERED`].
    pub const FILTERED: u32 = 1 << 9;
    /// Connections between pods of this node bypass the stack from their first packet, because the
    /// stack does not change them.
    pub const FAST_OPEN: u32 = 1 << 11;
    /// Open bypass connections continue, even if no new bypass connection is allowed. Some may have
    /// a liberal conntrack entry.
    pub const FAST_KEEP: u32 = 1 << 12;
    /// With FAST_OPEN and FAST_OPENED: only between addresses in [`pod_net::UNCHANGED`] networks.
    pub const FAST_OPEN_PODS: u32 = 1 << 13;
    /// With FAST_OPEN: also to pods of other nodes.
    pub const FAST_OPEN_FAR: u32 = 1 << 14;
    /// Packets of open connections between pods of this node bypass the stack once the agent has
    /// made their conntrack entries liberal.
    pub const FAST_OPENED: u32 = 1 << 15;
    /// At least one pod's device is [`Device::BARE`], so pods' connections may bypass the stack
    /// where rules permit.
    pub const BARE_PODS: u32 = 1 << 16;
    /// With FAST_OPENED: also UDP flows from clients outside to pods of this node.
    pub const FAST_OPENED_OUTSIDE: u32 = 1 << 17;
    /// Under `externalTrafficPolicy: Local`, node ports at a loopback address use local endpoints
    /// only (KEP-6032).
    pub const LOCALHOST_LOCAL: u32 = 1 << 18;
    /// All fast path flags.
    pub const OF_FAST_PATH: u32 = Self::FAST_PATH
        | Self::FAST_OPEN
        | Self::FAST_KEEP
        | Self::FAST_OPEN_PODS
        | Self::FAST_OPEN_FAR
        | Self::FAST_OPENED
        | Self::FAST_OPENED_OUTSIDE;
    /// Macvlans exist: a frame for another MAC address may be for a device stacked on this one.
    pub const MACVLANS: u32 = 1 << 10;

    pub const fn new(
        addr4: Addr4,
        addr6: Addr6,
        anchor_ifindex: u32,
        anchor_mac: [u8; 6],
        flags: u32,
    ) -> Self {
        Self {
            addr4,
            addr6,
            anchor_ifindex,
            anchor_mac,
            pad: 0,
            flags,
        }
    }

    pub const fn with_anchor(self, ifindex: u32, mac: [u8; 6]) -> Self {
        Self {
            anchor_ifindex: ifindex,
            anchor_mac: mac,
            ..self
        }
    }

    #[inline(always)]
    pub const fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }

    pub const fn with(self, flags: u32) -> Self {
        Self {
            flags: self.flags | flags,
            ..self
        }
    }

    pub const fn without(self, flags: u32) -> Self {
        Self {
            flags: self.flags & !flags,
            ..self
        }
    }
}

/// The mark of packets injected into the anchor's ingress for the host. With `src_valid_mark` the
/// kernel validates the source with the marked route, which is that of the host's own packets to
/// that address and port. The mark stands for the port, which the kernel's check does not have.
pub const INJECTED_MARK: u32 = (b'K' as u32) << 24;
/// The bits of the mark that kpx uses. Other programs may use the rest.
pub const INJECTED_MASK: u32 = 0xff << 24;

/// The mark, in the same bits, of packets that another node has handed over, from the tunnel's hook
/// to the uplink's. A device of another network namespace clears the mark.
pub const HANDED_OVER_MARK: u32 = (b'k' as u32) << 24;

/// Value of `ADDRS`, keyed by the node's own addresses.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnAddr {
    /// The device with the address.
    pub ifindex: u32,
    flags: u32,
}
assert_size!(OwnAddr = 4 + 4);

impl OwnAddr {
    /// The address serves node ports.
    pub const NODE_PORTS: u32 = 1 << 0;
    /// The address is one of the Node object, by which other nodes know this node.
    pub const OF_NODE_OBJECT: u32 = 1 << 1;

    pub const fn new(ifindex: u32, flags: u32) -> Self {
        Self { ifindex, flags }
    }

    #[inline(always)]
    pub const fn takes_node_ports(&self) -> bool {
        self.flags & Self::NODE_PORTS != 0
    }

    #[inline(always)]
    pub const fn is_of_node_object(&self) -> bool {
        self.flags & Self::OF_NODE_OBJECT != 0
    }
}

/// Bits in values of `PODS`, keyed by network.
pub mod pod_net {
    /// The operator declares these addresses local pods' (`--cluster-cidr`, or `podCIDRs` with that
    /// detection mode).
    pub const DETECTED: u32 = 1 << 0;
    /// The Node object's `spec.podCIDRs`.
    pub const NODE_CIDR: u32 = 1 << 1;
    /// The stack does not change packets between such networks: see `Node::FAST_OPEN_PODS`.
    pub const UNCHANGED: u32 = 1 << 2;
}

/// Value of `DEVICES`, keyed by interface index (`u32`).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    flags: u32,
    /// The host's source addresses on this device. Unspecified if the host has none.
    pub addr4: Addr4,
    pub addr6: Addr6,
    /// The interface index of the bridge of this port, which routes name instead. 0 if there is
    /// none.
    pub bridge: u32,
    /// The largest unfragmented IP packet in bytes. 0 if unknown.
    pub mtu: u32,
    /// The MAC address of frames for the host: the bridge's, or the device's own.
    pub mac: [u8; 6],
    pad: u16,
}
assert_size!(Device = 4 + 4 + 16 + 4 + 4 + 6 + 2);

impl Device {
    /// The peer is a pod: a packet that arrives here comes from the pod itself and has passed no
    /// other hook of kpx.
    pub const POD: u32 = 1 << 0;
    /// The operator declares every sender behind the device a local pod (`--detect-local-mode`).
    pub const DETECTED: u32 = 1 << 1;
    /// One end of a plain veth pair. The programs may put packets directly into its other end
    /// (`bpf_redirect_peer`).
    pub const PEER: u32 = 1 << 2;
    /// A packet that arrives here has passed no other hook of this host, so its mark comes from
    /// outside.
    pub const EDGE: u32 = 1 << 3;
    /// The kernel drops IPv4 packets whose source is routed to another device (`rp_filter` is 1),
    /// and each route names one device.
    pub const STRICT4: u32 = 1 << 4;
    /// A pod's device without routes (Open vSwitch). Its frames are addressed to the device with
    /// the routes.
    pub const LOOSE: u32 = 1 << 5;
    /// Packets start with the IP header, so the fast path does not deliver to this device.
    pub const HEADERLESS: u32 = 1 << 6;
    /// Only kpx's programs are attached, so that only the stack could change packets here. Among
    /// pods' devices only plain veths are bare.
    pub const BARE: u32 = 1 << 8;
    /// Another program's clsact filter may process packets before kpx and overwrite the packet
    /// mark: see `weigh` in proxy-ebpf.
    pub const FILTERED: u32 = 1 << 7;
    /// A bridge whose ports are all attached to pods of this node, without a router, so packets
    /// enter only through its ports.
    pub const POD_BRIDGE: u32 = 1 << 9;

    /// The key of the row with the tunnel devices. No device has this index.
    pub const TUNNELS: u32 = 0;

    /// Returns the value of the row [`Device::TUNNELS`]: the interface indexes of the tunnel devices
    /// for IPv4 and IPv6 packets, 0 if packets of the family are not handed over.
    pub const fn tunnels(v4: u32, v6: u32) -> Self {
        let row = Self::new(0, Addr4::UNSPECIFIED, Addr6::UNSPECIFIED);
        row.with_link(v4, v6, [0; 6])
    }

    /// Returns the tunnel device for packets of a family, from the row [`Device::TUNNELS`].
    #[inline(always)]
    pub const fn tunnel(&self, is_v4: bool) -> u32 {
        if is_v4 { self.bridge } else { self.mtu }
    }

    pub const fn new(flags: u32, addr4: Addr4, addr6: Addr6) -> Self {
        Self {
            flags,
            addr4,
            addr6,
            bridge: 0,
            mtu: 0,
            mac: [0; 6],
            pad: 0,
        }
    }

    pub const fn without(self, flags: u32) -> Self {
        Self {
            flags: self.flags & !flags,
            ..self
        }
    }

    /// Returns a copy with the bridge of this port, the MTU, and the MAC address of frames for the
    /// host.
    pub const fn with_link(self, bridge: u32, mtu: u32, mac: [u8; 6]) -> Self {
        Self {
            bridge,
            mtu,
            mac,
            ..self
        }
    }

    #[inline(always)]
    pub const fn is_pod(&self) -> bool {
        self.flags & Self::POD != 0
    }

    #[inline(always)]
    pub const fn is_detected(&self) -> bool {
        self.flags & Self::DETECTED != 0
    }

    #[inline(always)]
    pub const fn flags(&self) -> u32 {
        self.flags
    }

    #[inline(always)]
    pub const fn is_headerless(&self) -> bool {
        self.flags & Self::HEADERLESS != 0
    }

    #[inline(always)]
    pub const fn has_peer(&self) -> bool {
        self.flags & Self::PEER != 0
    }
}
