//! Checksums (RFC 1071, RFC 1624).

use core::ptr::{from_ref, null_mut};

use aya_ebpf::bindings::{BPF_F_MARK_MANGLED_0, BPF_F_PSEUDO_HDR};
use aya_ebpf::helpers::generated::bpf_csum_diff;
use proxy_common::addr::{Port, Proto, SockAddr};
use proxy_common::counter::Reason;

use crate::header::Head;
use crate::net::IpVersion;
use crate::skb::{ETH_LEN, Skb};

/// The checksums of an address family that cover addresses, and the rewrites that change them.
pub trait Checksums: IpVersion {
    /// Replaces the addresses and ports of a packet with the usual headers, and updates its
    /// checksums.
    fn rewrite(
        skb: Skb,
        head: &Head<Self>,
        src: &SockAddr<Self>,
        dst: &SockAddr<Self>,
    ) -> Result<(), Reason>;
    /// Replaces an address in the packet that an ICMP error quotes. `at` is the offset of the
    /// quoted header, `place` that of the address in it, `check` that of the ICMP checksum.
    fn store_quoted_addr(
        skb: Skb,
        at: u32,
        place: u32,
        check: u32,
        from: Self,
        to: Self,
    ) -> Result<(), Reason>;
    /// Replaces the address at offset `place` of the IP header at `at`, both in bytes, and updates the
    /// header's checksum, if it has one.
    fn store_addr(skb: Skb, at: u32, place: u32, from: Self, to: Self) -> Result<(), Reason>;
    /// Updates the transport checksum at `offset`, in bytes, for a changed address.
    fn replace_pseudo_checksum(
        skb: Skb,
        offset: u32,
        flags: u32,
        from: Self,
        to: Self,
    ) -> Result<(), Reason>;
    /// Returns the unfolded sum of the pseudo header (RFC 9293 §3.1, RFC 8200 §8.1). `len` is in
    /// bytes, in host order.
    fn pseudo_sum(src: Self, dst: Self, proto: Proto, len: u16) -> u32;

    /// The same for ICMP: 0 for IPv4, where ICMP has no pseudo header.
    #[inline(always)]
    fn icmp_pseudo_sum(src: Self, dst: Self, len: u16) -> u32 {
        if Self::ICMP_HAS_PSEUDO {
            Self::pseudo_sum(src, dst, Self::ICMP, len)
        } else {
            0
        }
    }
}

/// Returns the one's complement sum (RFC 1071) of a value, added to `seed`. The size is a multiple
/// of four.
#[inline(always)]
pub fn sum<T: Copy>(value: &T, seed: u32) -> u32 {
    replaced(None, value, seed)
}

/// Returns the change of a sum if `to` replaces `from`. The size is a multiple of four.
#[inline(always)]
pub fn diff<T: Copy>(from: &T, to: &T) -> u32 {
    replaced(Some(from), to, 0)
}

#[inline(always)]
fn replaced<T: Copy>(from: Option<&T>, to: &T, seed: u32) -> u32 {
    let size = size_of::<T>() as u32;
    let (from, from_size) = from.map_or((null_mut(), 0), |from| {
        (from_ref(from).cast_mut().cast(), size)
    });
    // SAFETY: the helper reads as many bytes as the values have, and writes none.
    unsafe { bpf_csum_diff(from, from_size, from_ref(to).cast_mut().cast(), size, seed) as u32 }
}

/// The result of [`diff_words`] for equal words: the negative zero of one's complement.
pub const NO_DIFF: u32 = u32::MAX;

/// Computes the same as [`diff`], word by word and without a helper.
#[inline(always)]
pub fn diff_words(from: &[u32], to: &[u32]) -> u32 {
    let sum: u64 = from
        .iter()
        .zip(to)
        .map(|(from, to)| u64::from(!from) + u64::from(*to))
        .sum();
    let sum = (sum & 0xffff_ffff) + (sum >> 32);
    (sum + (sum >> 32)) as u32
}

/// Returns true if a transport checksum that the kernel has updated by `diff` was a seed, which the
/// device completes (CHECKSUM_PARTIAL). The kernel adds `diff` to a seed, and subtracts it from a
/// complete checksum. Returns false if the result is ambiguous.
#[inline(always)]
pub fn is_seed(before: u32, after: u32, diff: u32) -> bool {
    let diff = fold(diff);
    // Both zeros of one's complement leave the checksum unchanged, so the result is ambiguous.
    let tells = diff != 0 && diff != 0xffff && before < UNREAD;
    tells && u32::from(fold(before + u32::from(diff))) == after
}

/// Stands for a checksum that cannot be read in place. (Linux 5.10 requires that a value kept
/// across a call is initialised.)
pub const UNREAD: u32 = 1 << 16;

/// Folds a sum to the 16 bits of a checksum field, not yet inverted.
#[inline(always)]
pub fn fold(sum: u32) -> u16 {
    let sum = (sum & 0xffff) + (sum >> 16);
    (sum + (sum >> 16)) as u16
}

/// Updates the transport's checksum for other ports (see [`word`]), and for addresses that change a
/// sum by `diff`, unfolded, or not by [`NO_DIFF`].
///
/// Works in two steps: only addresses are part of the seed from which the hardware starts a
/// checksum. If the first step finds such a seed, the second step would change nothing.
#[inline(always)]
pub fn replace_checksum<A: IpVersion>(
    skb: Skb,
    head: &Head<A>,
    ports: u32,
    diff: u32,
) -> Result<(), Reason> {
    let at = ETH_LEN + A::IP_LEN + checksum_offset(head.proto);
    let flags = if head.proto == Proto::UDP {
        BPF_F_MARK_MANGLED_0
    } else {
        0
    };
    let ports_before = word(head.src.port, head.dst.port);
    let mut is_seed = false;
    if diff != NO_DIFF {
        let sum = || skb.peek::<u16>(at).map_or(UNREAD, u32::from);
        let before = sum();
        skb.replace_l4_checksum(at, 0, diff, flags | BPF_F_PSEUDO_HDR)?;
        is_seed = self::is_seed(before, sum(), diff);
    }
    if is_seed || ports_before == ports {
        return Ok(());
    }
    skb.replace_l4_checksum(at, ports_before, ports, flags | size_of::<u32>() as u32)
}

/// Returns two ports as they lie in a packet.
#[inline(always)]
pub fn word(sport: Port, dport: Port) -> u32 {
    let (first, second) = if cfg!(target_endian = "little") {
        (sport, dport)
    } else {
        (dport, sport)
    };
    u32::from(first.wire()) | u32::from(second.wire()) << 16
}

/// Returns the offset of the checksum in a transport header.
#[inline(always)]
pub fn checksum_offset(proto: Proto) -> u32 {
    match proto {
        Proto::TCP => 16,
        Proto::SCTP => 8,
        _ => 6,
    }
}
