//! The headers of a packet, in its control block.

use proxy_common::addr::{Port, Proto};
use proxy_common::flow::{Hook, Signals};

use super::LinkHeader;
use crate::tcp::{self, ACK};

/// The headers of a packet, without the addresses.
///
/// Stored in the packet's control block (`__sk_buff::cb`), which belongs to the program while it
/// runs, and which every function with the packet can read. The verifier treats a value from there
/// as unknown. So it checks the code behind the parser once, instead of once for each path through
/// the parser.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Found {
    /// Offset of the transport header in the packet, link header included.
    pub l4: u16,
    pub proto: Proto,
    /// The hook that read the headers.
    pub hook: Hook,
    pub sport: Port,
    pub dport: Port,
    /// The identification in a fragment's key.
    pub id: u32,
    pub signals: Signals,
    pub marks: u8,
    /// Offset of the Internet checksum in the transport header; 0 for SCTP and for later fragments.
    pub check: u8,
    /// The protocol in a fragment's key.
    pub split: Proto,
    /// Bytes of transport header and payload.
    pub len: u32,
}

impl Found {
    /// The packet may open a flow.
    pub const OPENS: u8 = 1 << 0;
    /// The packet is a first fragment.
    pub const FIRST: u8 = 1 << 1;
    /// The packet is a later fragment.
    pub const LATER: u8 = 1 << 2;
    /// The packet has the usual headers: see [`Head`](crate::header::Head).
    pub const USUAL: u8 = 1 << 3;
    /// The packet has TCP's ACK flag.
    pub const ACKS: u8 = 1 << 4;
    /// The packet starts with its IP header.
    pub const HEADERLESS: u8 = 1 << 6;

    #[inline(always)]
    pub fn is_fragment(&self) -> bool {
        self.marks & (Self::FIRST | Self::LATER) != 0
    }

    #[inline(always)]
    pub fn link(&self) -> LinkHeader {
        if self.marks & Self::HEADERLESS == 0 {
            LinkHeader::Ethernet
        } else {
            LinkHeader::None
        }
    }

    /// Takes over the signals of TCP's flags.
    #[inline(always)]
    pub fn take_flags(&mut self, flags: u8) {
        if tcp::opens(flags) {
            self.marks |= Self::OPENS;
        }
        if flags & ACK != 0 {
            self.marks |= Self::ACKS;
        }
        self.signals = tcp::signals(flags);
    }
}

/// The part of a packet that a fragment contains, as bits of [`Found::marks`].
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct FragmentPart(pub u8);

impl FragmentPart {
    pub const WHOLE: Self = Self(0);
    pub const FIRST: Self = Self(Found::FIRST);
    pub const LATER: Self = Self(Found::LATER);

    /// Takes the offset and the bit for more fragments. A fragment that is both first and last is a
    /// whole packet (RFC 6946).
    #[inline(always)]
    pub fn of(offset: u16, more: u16) -> Self {
        if offset != 0 {
            Self::LATER
        } else if more != 0 {
            Self::FIRST
        } else {
            Self::WHOLE
        }
    }
}
