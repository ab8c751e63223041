//! The hooks of packets: their programs, and where those are attached.

use crate::closed::closed;

/// The hook at which a program met a packet, as a record names it.
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

    pub const fn name(self) -> &'static str {
        match self.known() {
            Some(hook) => hook.name(),
            None => "unknown",
        }
    }
}

closed! {
    /// A hook of packets, which owns its program's name, its place and its direction.
    HookId => PacketHook {
        INGRESS => Ingress,
        EGRESS => Egress,
        ANCHOR => Anchor,
        LO => Lo,
        HEADERLESS_INGRESS => HeaderlessIngress,
        HEADERLESS_EGRESS => HeaderlessEgress,
    }
}

/// The side of a device on which a program is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    Ingress,
    Egress,
}

/// A kind of device, by the programs that are attached to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Any device of packets from and to other hosts and pods: it carries programs in both
    /// directions.
    Device,
    /// The same, of a device without Ethernet headers: packets start with their IP header.
    Headerless,
    /// The anchor, with a program on its egress.
    Anchor,
    /// The loopback device, with a program on its egress. A packet that arrives at lo has been
    /// translated already.
    Lo,
}

impl PacketHook {
    pub const fn id(self) -> HookId {
        HookId(self as u8)
    }

    /// The program's name in the BPF object. The kernel keeps 15 characters.
    pub const fn program(self) -> &'static str {
        match self {
            Self::Ingress => "kpx_ingress",
            Self::Egress => "kpx_egress",
            Self::Anchor => "kpx_anchor",
            Self::Lo => "kpx_lo",
            Self::HeaderlessIngress => "kpx_ingress_l3",
            Self::HeaderlessEgress => "kpx_egress_l3",
        }
    }

    /// The hook's name in events.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ingress | Self::HeaderlessIngress => "ingress",
            Self::Egress | Self::HeaderlessEgress => "egress",
            Self::Anchor => "anchor",
            Self::Lo => "lo",
        }
    }

    pub const fn direction(self) -> Direction {
        match self {
            Self::Ingress | Self::HeaderlessIngress => Direction::Ingress,
            Self::Egress | Self::HeaderlessEgress | Self::Anchor | Self::Lo => Direction::Egress,
        }
    }

    pub const fn place(self) -> Place {
        match self {
            Self::Ingress | Self::Egress => Place::Device,
            Self::HeaderlessIngress | Self::HeaderlessEgress => Place::Headerless,
            Self::Anchor => Place::Anchor,
            Self::Lo => Place::Lo,
        }
    }

    /// The programs that are loaded at the start: those of the hooks that every node has.
    pub fn common_programs() -> impl Iterator<Item = &'static str> {
        Self::ALL
            .into_iter()
            .filter(|hook| hook.place() != Place::Headerless)
            .map(Self::program)
    }

    /// Finds the hook of a place; None if the place carries no program in this direction.
    pub fn at(place: Place, direction: Direction) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|hook| hook.place() == place && hook.direction() == direction)
    }

    /// The programs of one direction.
    pub fn programs_at(direction: Direction) -> impl Iterator<Item = &'static str> {
        Self::ALL
            .into_iter()
            .filter(move |hook| hook.direction() == direction)
            .map(Self::program)
    }
}
