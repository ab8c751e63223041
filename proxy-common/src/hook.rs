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

    pub const fn name(self) -> &'static str {
        match self.known() {
            Some(hook) => hook.name(),
            None => "unknown",
        }
    }
}

closed! {
    /// A hook of packets, which owns its program's name, its place and its direction.
    HookId => PacketHook { INGRESS => Ingress, EGRESS => Egress, ANCHOR => Anchor, LO => Lo }
}

/// The side of a device on which a program is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    Ingress,
    Egress,
}

impl PacketHook {
    pub const ALL: [Self; 4] = [Self::Ingress, Self::Egress, Self::Anchor, Self::Lo];

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
        }
    }

    /// The place of the hook: every device, the anchor, or lo.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ingress => "ingress",
            Self::Egress => "egress",
            Self::Anchor => "anchor",
            Self::Lo => "lo",
        }
    }

    pub const fn direction(self) -> Direction {
        match self {
            Self::Ingress => Direction::Ingress,
            Self::Egress | Self::Anchor | Self::Lo => Direction::Egress,
        }
    }

    /// The programs of one direction.
    pub fn programs_at(direction: Direction) -> impl Iterator<Item = &'static str> {
        Self::ALL.into_iter().filter(move |hook| hook.direction() == direction).map(Self::program)
    }
}
