//! Builds consistent hashing tables, which lead a client to the same backend on every node (Eisenbud et al., "Maglev",
//! NSDI 2016, section 3.4).

use std::net::IpAddr;

use proxy_common::addr::Addr;
use proxy_common::frontend::{Backend, MAGLEV_PLACES, Maglev};

/// Divides the places evenly among the backends, which must be in the same order on every node. An added or removed
/// backend costs the others only few of their places. Returns `None` if there are no backends, or more than places.
pub(super) fn populate<A: Addr>(backends: &[Backend<A>]) -> Option<Maglev> {
    if backends.is_empty() || backends.len() > MAGLEV_PLACES {
        return None;
    }
    let mut slots = [FREE; MAGLEV_PLACES];
    let mut preferences: Vec<_> = backends.iter().map(Preference::of).collect();
    for turn in 0..MAGLEV_PLACES {
        let index = turn % backends.len();
        let place = preferences[index].find(|place| slots[*place] == FREE)?;
        slots[place] = u16::try_from(index).ok()?;
    }
    Some(Maglev::new(slots))
}

/// The mark of a free place. No slot has this index: there are fewer slots than places.
const FREE: u16 = u16::MAX;

/// The order in which a backend wants the places: in steps of `skip`. The steps reach all places because their number
/// is prime.
struct Preference {
    next: usize,
    skip: usize,
}

impl Preference {
    fn of<A: Addr>(backend: &Backend<A>) -> Self {
        let hash = hash(backend.addr.ip(), backend.port.get());
        let (high, low) = ((hash >> 32) as usize, (hash & 0xffff_ffff) as usize);
        Self { next: high % MAGLEV_PLACES, skip: low % (MAGLEV_PLACES - 1) + 1 }
    }
}

impl Iterator for Preference {
    type Item = usize;

    /// Returns the next place. The iterator is endless.
    fn next(&mut self) -> Option<usize> {
        let place = self.next;
        self.next = (place + self.skip) % MAGLEV_PLACES;
        Some(place)
    }
}

/// Hashes an address and a port: FNV-1a over the bytes, and then the last steps of MurmurHash3 to spread the bits.
/// Nodes must agree on the result, so this function may never change.
fn hash(addr: IpAddr, port: u16) -> u64 {
    let fold = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
    let hash = match addr {
        IpAddr::V4(addr) => addr.octets().iter().fold(0xcbf2_9ce4_8422_2325, fold),
        IpAddr::V6(addr) => addr.octets().iter().fold(0xcbf2_9ce4_8422_2325, fold),
    };
    let hash = port.to_be_bytes().iter().fold(hash, fold);
    let hash = (hash ^ hash >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd);
    let hash = (hash ^ hash >> 33).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    hash ^ hash >> 33
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};
    use std::time::{Duration, Instant};

    use proxy_common::addr::{Addr4, Addr6, Port};

    use super::*;

    fn backends(count: u16) -> Vec<Backend<Addr4>> {
        let addr = |index: u16| Ipv4Addr::new(10, 244, index.to_be_bytes()[0], index.to_be_bytes()[1]);
        (0..count).map(|index| Backend::new(addr(index).into(), Port::new(8080), 0)).collect()
    }

    /// Returns the owner of each place.
    fn owners<A: Addr>(backends: &[Backend<A>]) -> Vec<Backend<A>> {
        populate(backends).unwrap().slots.iter().map(|slot| backends[usize::from(*slot)]).collect()
    }

    #[test]
    fn shares_differ_by_one_place_at_most() {
        for count in [1, 2, 3, 7, 40, 1_000, 4_092, 4_093] {
            let maglev = populate(&backends(count)).unwrap();
            let mut shares = vec![0; usize::from(count)];
            for slot in maglev.slots {
                shares[usize::from(slot)] += 1;
            }
            let (least, most) = (shares.iter().min().unwrap(), shares.iter().max().unwrap());
            assert!(most - least <= 1 && *least > 0, "{count} backends have {least} to {most} places");
        }
    }

    #[test]
    fn too_few_or_too_many_backends_have_no_table() {
        assert_eq!(populate(&backends(0)), None);
        assert_eq!(populate(&backends(4_094)), None);
    }

    /// Beside the backend's own places, which must change hands, only a few others do.
    #[test]
    fn an_added_or_removed_backend_moves_few_places() {
        for count in [2, 3, 10, 40, 100] {
            let with = backends(count);
            for gone in [0, with.len() / 2, with.len() - 1] {
                let mut without = with.clone();
                without.remove(gone);
                let places = owners(&with).into_iter().zip(owners(&without));
                let moved = places.filter(|(before, after)| *before != with[gone] && before != after).count();
                assert!(moved * 100 < MAGLEV_PLACES * 5, "{moved} places moved for one of {count} backends");
            }
        }
    }

    /// The nodes of a cluster are of different makes and versions.
    #[test]
    fn a_table_never_changes() {
        let three = populate(&backends(3)).unwrap();
        assert_eq!([0, 1, 2, 1_000, 2_000, 4_092].map(|place| three.slots[place]), [2, 0, 2, 1, 0, 1]);
        let six = Backend::<Addr6>::new("fd00:244::1".parse::<Ipv6Addr>().unwrap().into(), Port::new(80), 0);
        assert_eq!(hash(six.addr.ip(), six.port.get()), 0x6fe6_78fe_2317_1d5d);
    }

    /// A table does not depend on which backends are local to this node.
    #[test]
    fn a_table_does_not_depend_on_local_backends() {
        let local: Vec<_> = backends(5).iter().map(|b| Backend::new(b.addr, b.port, Backend::<Addr4>::LOCAL)).collect();
        assert_eq!(populate(&local), populate(&backends(5)));
    }

    #[test]
    fn the_largest_table_is_built_within_a_second() {
        let backends = backends(4_093);
        let start = Instant::now();
        assert!(populate(&backends).is_some());
        let took = start.elapsed();
        assert!(took < Duration::from_secs(1), "{took:?}");
    }
}
