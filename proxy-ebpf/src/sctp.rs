//! SCTP (RFC 9260): the signals of a packet's first chunk, and the rewrite of its ports.

use aya_ebpf::bindings::BPF_F_RECOMPUTE_CSUM;
use proxy_common::addr::Port;
use proxy_common::counter::Reason;
use proxy_common::crc32c;
use proxy_common::flow::Signals;
use proxy_macros::global_fn;

use crate::skb::Found;
use crate::skb::Skb;

/// The common header (§3) and the first chunk's (§3.2).
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Start {
    pub sport: u16,
    pub dport: u16,
    tag: u32,
    checksum: u32,
    kind: u8,
    flags: u8,
    chunk_len: u16,
}

const CHECKSUM_OFFSET: u32 = 8;

const INIT: u8 = 1;
const ABORT: u8 = 6;
const SHUTDOWN: u8 = 7;
const SHUTDOWN_ACK: u8 = 8;
const COOKIE_ACK: u8 = 11;
const SHUTDOWN_COMPLETE: u8 = 14;

impl Start {
    /// An INIT is never bundled (§6.10), so only the first chunk counts.
    #[inline(always)]
    pub fn opens(&self) -> bool {
        self.kind == INIT
    }

    #[inline(always)]
    pub fn signals(&self) -> Signals {
        match self.kind {
            INIT => Signals::OPENER,
            ABORT => Signals::RST,
            COOKIE_ACK => Signals::ACCEPTED,
            SHUTDOWN | SHUTDOWN_ACK | SHUTDOWN_COMPLETE => Signals::FIN,
            _ => Signals::PACKET,
        }
    }
}

/// Replaces the ports of an SCTP packet. Its checksum covers ports, but not addresses.
///
/// A checksum that the device or segmentation will compute is 0 here, and has to stay 0. (A
/// computed checksum is 0 in one of 2^32 packets; that packet is lost.)
#[inline(always)]
pub fn set_ports(skb: Skb, sport: Port, dport: Port) -> Result<(), Reason> {
    let found = skb.found();
    if sport == found.sport && dport == found.dport {
        return Ok(());
    }
    match rewrite(skb, u32::from(sport.wire()) << 16 | u32::from(dport.wire())) {
        0 => Ok(()),
        _ => Err(Reason::Rewrite),
    }
}

/// A separate function with its own stack. `ports` has the source port in its upper half.
#[inline(never)]
fn rewrite(skb: Skb, ports: u32) -> u32 {
    try_rewrite(skb, [(ports >> 16) as u16, ports as u16])
        .is_err()
        .into()
}

#[inline(always)]
fn try_rewrite(skb: Skb, ports: [u16; 2]) -> Result<(), Reason> {
    let found = skb.found();
    let l4 = u32::from(found.l4);
    // The checksum covers the whole packet, and its update needs the length, which a first fragment
    // does not have.
    if found.marks & Found::FIRST != 0 || found.len > u32::from(u16::MAX) {
        return Err(Reason::Rewrite);
    }
    let checksum: u32 = skb.load(l4 + CHECKSUM_OFFSET)?;
    if checksum == 0 {
        return skb.store(l4, &ports, BPF_F_RECOMPUTE_CSUM);
    }
    let diff = bytes([found.sport.wire() ^ ports[0], found.dport.wire() ^ ports[1]]);
    let checksum = updated(u32::from_le(checksum), u32::from_le(diff), found.len).to_le();
    // SCTP's checksum does not compensate for new ports in a device's sum over the whole packet, so
    // both stores update that sum.
    skb.store(l4, &ports, BPF_F_RECOMPUTE_CSUM)?;
    skb.store(l4 + CHECKSUM_OFFSET, &checksum, BPF_F_RECOMPUTE_CSUM)
}

/// Calls [`crc32c::updated`].
#[global_fn(kpx_crc32c)]
fn updated(crc: u32, diff: u32, len: u32) -> u32 {
    crc32c::updated(crc, diff, len as u16)
}

/// Joins two half-words to a word, in memory order.
#[inline(always)]
fn bytes(halves: [u16; 2]) -> u32 {
    let [a, b] = halves[0].to_ne_bytes();
    let [c, d] = halves[1].to_ne_bytes();
    u32::from_ne_bytes([a, b, c, d])
}
