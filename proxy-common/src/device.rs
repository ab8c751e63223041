//! The node and its devices, as the kernel programs know them.

use crate::addr::{Addr4, Addr6};
use crate::assert_size;

/// The only value of `NODE`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Node {
    /// Primary addresses, the source of what a hairpin's backend sees; unspecified while unknown.
    pub addr4: Addr4,
    pub addr6: Addr6,
    /// Interface index of the anchor, into whose ingress replies to the host's own sockets are
    /// injected.
    pub anchor_ifindex: u32,
    /// The anchor's MAC address, which those replies must carry to be taken for the host's.
    pub anchor_mac: [u8; 6],
    pad: u16,
    flags: u32,
}
assert_size!(Node = 4 + 16 + 4 + 6 + 2 + 4);

impl Node {
    /// `--masquerade compat`: the client's address is replaced where kube-proxy replaces it, not
    /// only where replies would not come back otherwise.
    pub const COMPAT: u32 = 1 << 0;
    /// `--masquerade-all`: every client of a ClusterIP is masqueraded.
    pub const MASQUERADE_ALL: u32 = 1 << 1;
    /// There is a way to tell local pods by IPv4 ...
    pub const DETECTS4: u32 = 1 << 2;
    /// ... and by IPv6.
    pub const DETECTS6: u32 = 1 << 3;
    /// `--cluster-ip-external`, the default: ClusterIPs serve clients outside, too, as kube-proxy's
    /// do.
    pub const CLUSTER_IP_EXTERNAL: u32 = 1 << 4;
    /// `--mode host`: no node. What arrives at its devices opens no flows, and what its sockets
    /// send to its own addresses does not either.
    pub const HOST: u32 = 1 << 5;

    /// `kpx cleanup --drain`: openers are left to the next program, and open flows are followed to
    /// their end.
    pub const DRAINING: u32 = 1 << 6;
    /// Packets of open connections skip the stack, if the programs were loaded with what that
    /// takes.
    pub const FAST_PATH: u32 = 1 << 7;
    /// Devices lie on each other: a packet may pass two egress hooks, a bridge's and its port's, or
    /// a macvlan's and its card's.
    pub const STACKED: u32 = 1 << 8;
    /// Some device is [`Device::FILTERED`].
    pub const FILTERED: u32 = 1 << 9;
    /// Whole connections between pods of this node skip the stack, because it does nothing to them.
    pub const FAST_OPEN: u32 = 1 << 11;
    /// Connections that were opened past the stack go on past it, whether or not others do.
    /// Conntrack may tolerate some.
    pub const FAST_KEEP: u32 = 1 << 12;
    /// With FAST_OPEN and FAST_OPENED: only between addresses of networks that are
    /// [`pod_net::UNCHANGED`].
    pub const FAST_OPEN_PODS: u32 = 1 << 13;
    /// With FAST_OPEN: also to pods of other nodes.
    pub const FAST_OPEN_FAR: u32 = 1 << 14;
    /// Packets of open connections between pods of this node skip the stack where the agent has
    /// made conntrack tolerate that.
    pub const FAST_OPENED: u32 = 1 << 15;
    /// Some pod's device is [`Device::BARE`], so whole connections of pods can skip the stack where
    /// rules let them.
    pub const BARE_PODS: u32 = 1 << 16;
    /// With FAST_OPENED: also UDP flows of clients outside to pods of this node.
    pub const FAST_OPENED_OUTSIDE: u32 = 1 << 17;
    /// Under `externalTrafficPolicy: Local`, node ports at a loopback address lead to endpoints of
    /// this node alone (KEP-6032).
    pub const LOCALHOST_LOCAL: u32 = 1 << 18;
    /// All that the fast path does.
    pub const OF_FAST_PATH: u32 = Self::FAST_PATH
        | Self::FAST_OPEN
        | Self::FAST_KEEP
        | Self::FAST_OPEN_PODS
        | Self::FAST_OPEN_FAR
        | Self::FAST_OPENED
        | Self::FAST_OPENED_OUTSIDE;
    /// There are macvlans: frames for another link address than a device's own may be for one above
    /// it.
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

    /// The same, of another anchor.
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

    /// The same with flags more.
    pub const fn with(self, flags: u32) -> Self {
        Self {
            flags: self.flags | flags,
            ..self
        }
    }

    /// The same without some flags.
    pub const fn without(self, flags: u32) -> Self {
        Self {
            flags: self.flags & !flags,
            ..self
        }
    }
}

/// The mark of a packet that is put into the anchor's ingress for the host. By it, the kernel looks
/// for the way back to the packet's source where the host's own packets to that address and port go
/// (`src_valid_mark`). The kernel knows no ports at that point.
pub const INJECTED_MARK: u32 = (b'K' as u32) << 24;
/// The bits that tell: others may use the rest.
pub const INJECTED_MASK: u32 = 0xff << 24;

/// Value of `ADDRS`, keyed by an address of the node's own.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnAddr {
    /// The device that carries it.
    pub ifindex: u32,
    flags: u32,
}
assert_size!(OwnAddr = 4 + 4);

impl OwnAddr {
    /// Node ports are served at it.
    pub const NODE_PORTS: u32 = 1 << 0;

    pub const fn new(ifindex: u32, flags: u32) -> Self {
        Self { ifindex, flags }
    }

    #[inline(always)]
    pub const fn takes_node_ports(&self) -> bool {
        self.flags & Self::NODE_PORTS != 0
    }
}

/// Bits of the values of `PODS`, keyed by network.
pub mod pod_net {
    /// The operator says that local pods have such addresses (`--cluster-cidr`, or `podCIDRs` where
    /// detection goes by them).
    pub const DETECTED: u32 = 1 << 0;
    /// The Node object's `spec.podCIDRs`.
    pub const NODE_CIDR: u32 = 1 << 1;
    /// The stack changes no packet from one such network to another: see `Node::FAST_OPEN_PODS`.
    pub const UNCHANGED: u32 = 1 << 2;
}

/// Value of `DEVICES`, keyed by interface index (`u32`).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    flags: u32,
    /// The addresses with which the host speaks through this device; unspecified if it has none.
    pub addr4: Addr4,
    pub addr6: Addr6,
    /// Interface index of the bridge that this device is a port of, which routes name in its place;
    /// else 0.
    pub bridge: u32,
    /// The longest IP packet that leaves here whole, in bytes; 0 if unknown.
    pub mtu: u32,
    /// The address of frames that the host takes in here: the bridge's, else the device's own.
    pub mac: [u8; 6],
    pad: u16,
}
assert_size!(Device = 4 + 4 + 16 + 4 + 4 + 6 + 2);

impl Device {
    /// The far end is a pod: what arrives here was sent by the pod itself and passed no other of
    /// our hooks before.
    pub const POD: u32 = 1 << 0;
    /// The operator calls every sender behind it a local pod (`--detect-local-mode`).
    pub const DETECTED: u32 = 1 << 1;
    /// It is one end of a pair, and packets may get to the other end in another way than through
    /// it.
    pub const PEER: u32 = 1 << 2;
    /// A packet that arrives here has passed no other hook of this host, so a note on it is a
    /// stranger's.
    pub const EDGE: u32 = 1 << 3;
    /// The kernel drops IPv4 packets whose source it would answer through another device
    /// (`rp_filter` is 1), and routes name one device each.
    pub const STRICT4: u32 = 1 << 4;
    /// A pod's device that no route names (Open vSwitch): its frames are for the address of the
    /// device that routes name.
    pub const LOOSE: u32 = 1 << 5;
    /// Its packets start with their IP header, so no packet is delivered to it past the stack.
    pub const HEADERLESS: u32 = 1 << 6;
    /// No program but ours is at its hooks: the stack alone could do anything to its packets. Of
    /// pods' devices only plain veths are.
    pub const BARE: u32 = 1 << 8;
    /// A clsact filter of another program may meet what comes in here, and write over the packet
    /// mark: see `weigh` of proxy-ebpf.
    pub const FILTERED: u32 = 1 << 7;
    /// A bridge with pods of this node on it, and neither other ports nor a router: their packets
    /// come in by its ports alone.
    pub const POD_BRIDGE: u32 = 1 << 9;

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

    /// The same without some flags.
    pub const fn without(self, flags: u32) -> Self {
        Self {
            flags: self.flags & !flags,
            ..self
        }
    }

    /// The same, as a link of this MTU that is a port of this bridge and takes frames for this
    /// address.
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
