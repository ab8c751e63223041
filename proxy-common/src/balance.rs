//! Session affinity, and the Maglev hash that all nodes share.

use crate::addr::{Addr, Addr4, Addr6, SockAddr};
use crate::assert_size;
use crate::frontend::{FrontendKey, MAGLEV_PLACES};

/// Key of `AFFINITY`: a client's original address at a service port.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AffinityKey<A: Addr> {
    pub service: FrontendKey<A>,
    pub client: A,
}
assert_size!(AffinityKey<Addr4> = 8 + 4);
assert_size!(AffinityKey<Addr6> = 20 + 16);

impl<A: Addr> AffinityKey<A> {
    #[inline(always)]
    pub const fn new(service: FrontendKey<A>, client: A) -> Self {
        Self { service, client }
    }
}

/// Value of `AFFINITY`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Affinity<A: Addr> {
    pub backend: SockAddr<A>,
    /// The time of the client's last new flow, in seconds since boot.
    pub last_secs: u32,
}
assert_size!(Affinity<Addr4> = 8 + 4);
assert_size!(Affinity<Addr6> = 20 + 4);

impl<A: Addr> Affinity<A> {
    #[inline(always)]
    pub const fn new(backend: SockAddr<A>, last_secs: u32) -> Self {
        Self { backend, last_secs }
    }
}

/// Returns the index of a client's entry in each Maglev table of a service port. All nodes compute
/// the same index.
#[inline(always)]
pub fn maglev_place<A: Addr>(client: SockAddr<A>, service: &FrontendKey<A>) -> usize {
    let ports = u32::from(client.port.wire()) << 16 | u32::from(service.port.wire());
    let mut hash = mix(u32::from(service.proto.0), ports);
    hash = service.addr.fold_words(hash, mix);
    hash = client.addr.fold_words(hash, mix);
    // The upper half of a 64-bit product: as uniform as a division, and cheaper.
    ((u64::from(finish(hash)) * MAGLEV_PLACES as u64) >> 32) as usize
}

/// Hashes an address. Each input bit affects each output bit.
#[inline(always)]
pub(crate) fn hash_addr<A: Addr>(addr: &A) -> u32 {
    finish(addr.fold_words(0, mix))
}

/// One round of MurmurHash3 (public domain, A. Appleby), x86 32 bit.
#[inline(always)]
fn mix(hash: u32, word: u32) -> u32 {
    let word = word
        .wrapping_mul(0xcc9e_2d51)
        .rotate_left(15)
        .wrapping_mul(0x1b87_3593);
    (hash ^ word)
        .rotate_left(13)
        .wrapping_mul(5)
        .wrapping_add(0xe654_6b64)
}

#[inline(always)]
fn finish(hash: u32) -> u32 {
    let hash = (hash ^ hash >> 16).wrapping_mul(0x85eb_ca6b);
    let hash = (hash ^ hash >> 13).wrapping_mul(0xc2b2_ae35);
    hash ^ hash >> 16
}

#[cfg(test)]
mod tests {
    use core::net::Ipv4Addr;

    use super::*;
    use crate::addr::{Port, Proto};

    #[test]
    fn clients_spread_over_all_places() {
        let service = FrontendKey::<Addr4>::new(
            Ipv4Addr::new(10, 96, 0, 1).into(),
            Port::new(80),
            Proto::TCP,
        );
        let mut hits = vec![0_u32; 16];
        for port in 0..16_000_u16 {
            let client = SockAddr::new(Ipv4Addr::new(10, 244, 0, 1).into(), Port::new(port));
            hits[maglev_place(client, &service) * 16 / MAGLEV_PLACES] += 1;
        }
        assert!(
            hits.iter().all(|hits| (850..1150).contains(hits)),
            "{hits:?}"
        );
    }

    #[test]
    fn a_place_never_changes() {
        let service = FrontendKey::<Addr4>::new(
            Ipv4Addr::new(10, 96, 0, 1).into(),
            Port::new(80),
            Proto::TCP,
        );
        let client = SockAddr::new(Ipv4Addr::new(10, 244, 0, 1).into(), Port::new(1000));
        assert_eq!(maglev_place(client, &service), PLACE);
        let other_port = SockAddr::new(client.addr, Port::new(1001));
        assert_ne!(maglev_place(other_port, &service), PLACE);
    }

    const PLACE: usize = 1237;
}
