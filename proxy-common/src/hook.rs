//! The packet hooks: their programs and attachment points.

use crate::closed::closed;

/// The hook at which a program processed a packet, in records.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HookId(pub u8);

impl HookId {
    pub const INGRESS: Self = Self(0);
    pub const EGRESS: Self = Self(1);
    pub const ANCHOR: Self = Self(2);
    pub const LO: Self = Self(3);
    pub const HEADERLESS_INGRESS: Self = Self(4);
    pub const HEADERLESS_EGRESS: Self = Self(5);
    pub const TUNNEL: Self = Self(6);

    pub const fn name(self) -> &'static str {
        match self.known() {
            Some(hook) => hook.name(),
            None => "unknown",
        }
    }
}

closed! {
    /// A packet hook, with its program's name, attachment point and direction.
    HookId => PacketHook {
        INGRESS => Ingress,
        EGRESS => Egress,
        ANCHOR => Anchor,
        LO => Lo,
        HEADERLESS_INGRESS => HeaderlessIngress,
        HEADERLESS_EGRESS => HeaderlessEgress,
        TUNNEL => Tunnel,
    }
}

/// A program of the slow path, which the hooks' programs call by its place in `SLOW`: for packets of
/// one family, with or without Ethernet header.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlowProgram {
    Ipv4,
    Ipv6,
    HeaderlessIpv4,
    HeaderlessIpv6,
}

impl SlowProgram {
    pub const ALL: [Self; 4] = [
        Self::Ipv4,
        Self::Ipv6,
        Self::HeaderlessIpv4,
        Self::HeaderlessIpv6,
    ];

    pub const fn index(self) -> u32 {
        self as u32
    }

    /// Returns the program's name in the BPF object.
    pub const fn program(self) -> &'static str {
        match self {
            Self::Ipv4 => "kpx_slow4",
            Self::Ipv6 => "kpx_slow6",
            Self::HeaderlessIpv4 => "kpx_slow4_l3",
            Self::HeaderlessIpv6 => "kpx_slow6_l3",
        }
    }
}

/// The side of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    Ingress,
    Egress,
}

/// A kind of device, by its attached programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// A device for packets of other hosts and pods, with programs in both directions.
    Device,
    /// A device for packets of other hosts and pods, without Ethernet headers.
    Headerless,
    /// A device of kpx for packets that other nodes hand over, with a program on its ingress.
    Tunnel,
    /// The anchor, with a program on its egress.
    Anchor,
    /// The loopback device, with a program on its egress. Packets that arrive at lo are already
    /// translated.
    Lo,
}

impl PacketHook {
    pub const fn id(self) -> HookId {
        HookId(self as u8)
    }

    /// Returns the program's name in the BPF object. The kernel keeps 15 characters.
    pub const fn program(self) -> &'static str {
        match self {
            Self::Ingress => "kpx_ingress",
            Self::Egress => "kpx_egress",
            Self::Anchor => "kpx_anchor",
            Self::Lo => "kpx_lo",
            Self::HeaderlessIngress => "kpx_ingress_l3",
            Self::HeaderlessEgress => "kpx_egress_l3",
            Self::Tunnel => "kpx_tunnel",
        }
    }

    /// Returns the name in the BPF object of this hook's other program, which contains the slow
    /// path instead of calling it. The loader gives it the name of [`program`](Self::program).
    pub const fn program_with_slow_path(self) -> Option<&'static str> {
        match self {
            Self::Ingress => Some("kpx_ingress_whole"),
            Self::Egress => Some("kpx_egress_whole"),
            Self::Anchor => Some("kpx_anchor_whole"),
            Self::Lo => Some("kpx_lo_whole"),
            Self::HeaderlessIngress => Some("kpx_ingress_l3_whole"),
            Self::HeaderlessEgress => Some("kpx_egress_l3_whole"),
            Self::Tunnel => None,
        }
    }

    /// Returns the hook's name in events.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ingress | Self::HeaderlessIngress => "ingress",
            Self::Egress | Self::HeaderlessEgress => "egress",
            Self::Anchor => "anchor",
            Self::Lo => "lo",
            Self::Tunnel => "tunnel",
        }
    }

    pub const fn direction(self) -> Direction {
        match self {
            Self::Ingress | Self::HeaderlessIngress | Self::Tunnel => Direction::Ingress,
            Self::Egress | Self::HeaderlessEgress | Self::Anchor | Self::Lo => Direction::Egress,
        }
    }

    pub const fn place(self) -> Place {
        match self {
            Self::Ingress | Self::Egress => Place::Device,
            Self::HeaderlessIngress | Self::HeaderlessEgress => Place::Headerless,
            Self::Anchor => Place::Anchor,
            Self::Lo => Place::Lo,
            Self::Tunnel => Place::Tunnel,
        }
    }

    /// Returns the programs that have the slow path of this hook, for IPv4 and for IPv6. The
    /// tunnel's hook never calls them.
    pub const fn slow(self) -> [SlowProgram; 2] {
        match self {
            Self::Ingress | Self::Egress | Self::Anchor | Self::Lo => {
                [SlowProgram::Ipv4, SlowProgram::Ipv6]
            }
            Self::HeaderlessIngress | Self::HeaderlessEgress | Self::Tunnel => {
                [SlowProgram::HeaderlessIpv4, SlowProgram::HeaderlessIpv6]
            }
        }
    }

    /// Returns the programs that every node loads at the start.
    pub fn common_programs() -> impl Iterator<Item = &'static str> {
        Self::ALL
            .into_iter()
            .filter(|hook| !matches!(hook.place(), Place::Headerless | Place::Tunnel))
            .map(Self::program)
    }

    /// Returns the hook of a place. `None` if the place has no program in this direction.
    pub fn at(place: Place, direction: Direction) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|hook| hook.place() == place && hook.direction() == direction)
    }

    pub fn programs_at(direction: Direction) -> impl Iterator<Item = &'static str> {
        Self::ALL
            .into_iter()
            .filter(move |hook| hook.direction() == direction)
            .map(Self::program)
    }
}
