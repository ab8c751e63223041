//! The look-up tables from entry to slot. A backend has entries in proportion to its weight.
//!
//! Maglev tables give consistent hashing: every node sends a client to the same backend (Eisenbud
//! et al., "Maglev", NSDI 2016, section 3.4).

use std::cmp::Reverse;
use std::net::IpAddr;

use proxy_common::addr::Addr;
use proxy_common::frontend::{Algorithm, Backend, MAGLEV_PLACES, Maglev};

/// Returns the look-up table: evenly spread turns for round-robin, a Maglev table otherwise. `None`
/// if there are no backends, or more backends than entries.
pub(super) fn table<A: Addr>(algorithm: Algorithm, backends: &[Backend<A>]) -> Option<Maglev> {
    if backends.is_empty() || backends.len() > MAGLEV_PLACES {
        return None;
    }
    if algorithm == Algorithm::ROUND_ROBIN {
        turns(backends)
    } else {
        populate(backends)
    }
}

/// Divides the entries among the backends, which must have the same order on every node. A new,
/// removed or reweighted backend moves only a few entries of other backends.
fn populate<A: Addr>(backends: &[Backend<A>]) -> Option<Maglev> {
    let quotas = quotas(backends);
    let rounds = *quotas.iter().max()?;
    let mut slots = [FREE; MAGLEV_PLACES];
    let mut preferences: Vec<_> = backends
        .iter()
        .map(|backend| (Preference::of(backend), 0))
        .collect();
    for round in 1..=rounds {
        for (index, ((preference, taken), quota)) in preferences.iter_mut().zip(&quotas).enumerate()
        {
            // The heaviest backends take an entry in each round, all others in a fraction of the
            // rounds.
            if *taken * rounds < round * quota {
                let place = preference.find(|place| slots[*place] == FREE)?;
                slots[place] = u16::try_from(index).ok()?;
                *taken += 1;
            }
        }
    }
    Some(Maglev::new(slots))
}

/// Spreads each backend's entries evenly, so that a heavy backend's turns are not consecutive.
fn turns<A: Addr>(backends: &[Backend<A>]) -> Option<Maglev> {
    let count = backends.len() as u64;
    let mut turns = Vec::with_capacity(MAGLEV_PLACES);
    for (index, quota) in (0_u16..).zip(quotas(backends)) {
        // In units of 2^-32 of the table. Each backend has its own offset, so that light backends
        // do not cluster.
        let part = 2 * u64::from(index) + 1;
        turns.extend((0..quota).map(|turn| {
            (
                ((2 * turn * count + part) << 32) / (2 * quota * count),
                index,
            )
        }));
    }
    turns.sort_unstable();
    let slots: Vec<u16> = turns.into_iter().map(|(_, index)| index).collect();
    Some(Maglev::new(slots.try_into().ok()?))
}

const PLACES: u64 = MAGLEV_PLACES as u64;

/// Divides the number of entries by weight. Each backend gets at least one entry.
fn quotas<A: Addr>(backends: &[Backend<A>]) -> Vec<u64> {
    let weights: Vec<_> = backends
        .iter()
        .map(|backend| u64::from(backend.weight()))
        .collect();
    let mut places = PLACES;
    let mut sum = weights.iter().sum::<u64>();
    let mut quotas = vec![0; weights.len()];
    loop {
        let is_light = |index: &usize| quotas[*index] == 0 && weights[*index] * places < sum;
        let light: Vec<_> = (0..weights.len()).filter(is_light).collect();
        if light.is_empty() {
            break;
        }
        for index in light {
            (quotas[index], places, sum) = (1, places - 1, sum - weights[index]);
        }
    }
    let mut others: Vec<_> = (0..weights.len())
        .filter(|index| quotas[*index] == 0)
        .collect();
    for index in &others {
        quotas[*index] = weights[*index] * places / sum;
    }
    let left = others
        .iter()
        .fold(places, |left, index| left - quotas[*index]);
    others.sort_by_key(|index| Reverse(weights[*index] * places % sum));
    others
        .iter()
        .zip(0..left)
        .for_each(|(index, _)| quotas[*index] += 1);
    quotas
}

/// Marks a free entry. It is not a slot index, because there are fewer slots than entries.
const FREE: u16 = u16::MAX;

/// A backend's permutation of the entries: steps of `skip`. The number of entries is prime, so the
/// steps reach all of them.
struct Preference {
    next: usize,
    skip: usize,
}

impl Preference {
    fn of<A: Addr>(backend: &Backend<A>) -> Self {
        let hash = hash(backend.addr.ip(), backend.port.get());
        let high = (hash >> 32) as usize;
        let low = (hash & 0xffff_ffff) as usize;
        Self {
            next: high % MAGLEV_PLACES,
            skip: low % (MAGLEV_PLACES - 1) + 1,
        }
    }
}

impl Iterator for Preference {
    type Item = usize;

    /// Returns the next entry. The iterator is endless.
    fn next(&mut self) -> Option<usize> {
        let place = self.next;
        self.next = (place + self.skip) % MAGLEV_PLACES;
        Some(place)
    }
}

/// Hashes an address and a port: FNV-1a over the bytes, then MurmurHash3's finalizer. All nodes
/// must agree on the result, so this function may never change.
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

    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::sample::Index;
    use proxy_common::addr::{Addr4, Addr6, Port};

    use super::*;
    use crate::model::WEIGHT_MAX;

    fn backends(count: u16) -> Vec<Backend<Addr4>> {
        let addr =
            |index: u16| Ipv4Addr::new(10, 244, index.to_be_bytes()[0], index.to_be_bytes()[1]);
        (0..count)
            .map(|index| Backend::new(addr(index).into(), Port::new(8080), 0))
            .collect()
    }

    fn owners<A: Addr>(backends: &[Backend<A>]) -> Vec<Backend<A>> {
        populate(backends)
            .unwrap()
            .slots
            .iter()
            .map(|slot| backends[usize::from(*slot)])
            .collect()
    }

    #[test]
    fn shares_differ_by_one_place_at_most() {
        for count in [1, 2, 3, 7, 40, 1_000, 4_092, 4_093] {
            let maglev = populate(&backends(count)).unwrap();
            let mut shares = vec![0; usize::from(count)];
            for slot in maglev.slots {
                shares[usize::from(slot)] += 1;
            }
            let least = shares.iter().min().unwrap();
            let most = shares.iter().max().unwrap();
            assert!(
                most - least <= 1 && *least > 0,
                "{count} backends have {least} to {most} places"
            );
        }
    }

    #[test]
    fn too_few_or_too_many_backends_have_no_table() {
        for algorithm in [Algorithm::MAGLEV, Algorithm::ROUND_ROBIN] {
            assert_eq!(table(algorithm, &backends(0)), None);
            assert_eq!(table(algorithm, &backends(4_094)), None);
        }
    }

    /// The backend's own entries must move, and only a few others do.
    #[test]
    fn an_added_or_removed_backend_moves_few_places() {
        for count in [2, 3, 10, 40, 100] {
            let with = backends(count);
            for gone in [0, with.len() / 2, with.len() - 1] {
                let mut without = with.clone();
                without.remove(gone);
                let places = owners(&with).into_iter().zip(owners(&without));
                let moved = places
                    .filter(|(before, after)| *before != with[gone] && before != after)
                    .count();
                assert!(
                    moved * 100 < MAGLEV_PLACES * 5,
                    "{moved} places moved for one of {count} backends"
                );
            }
        }
    }

    /// Nodes may differ in architecture and version.
    #[test]
    fn a_table_never_changes() {
        let three = populate(&backends(3)).unwrap();
        assert_eq!(
            [0, 1, 2, 1_000, 2_000, 4_092].map(|place| three.slots[place]),
            [2, 0, 2, 1, 0, 1]
        );
        let six = Backend::<Addr6>::new(
            "fd00:244::1".parse::<Ipv6Addr>().unwrap().into(),
            Port::new(80),
            0,
        );
        assert_eq!(hash(six.addr.ip(), six.port.get()), 0x6fe6_78fe_2317_1d5d);
    }

    #[test]
    fn a_table_does_not_depend_on_local_backends() {
        let local: Vec<_> = backends(5)
            .iter()
            .map(|b| Backend::new(b.addr, b.port, Backend::<Addr4>::LOCAL))
            .collect();
        assert_eq!(populate(&local), populate(&backends(5)));
    }

    #[test]
    fn each_backend_of_the_largest_set_has_a_place() {
        for spread in [1, 1_000_u16] {
            let backends = weighted((0..4_093).map(|index| index % spread + 1));
            for algorithm in [Algorithm::MAGLEV, Algorithm::ROUND_ROBIN] {
                assert!(
                    shares(algorithm, &backends).iter().all(|share| *share == 1),
                    "{algorithm:?}, {spread}"
                );
            }
        }
    }

    fn weighted(weights: impl IntoIterator<Item = u16>) -> Vec<Backend<Addr4>> {
        let weights: Vec<_> = weights.into_iter().collect();
        let backends = backends(u16::try_from(weights.len()).unwrap());
        backends
            .into_iter()
            .zip(weights)
            .map(|(backend, weight)| backend.with_weight(weight))
            .collect()
    }

    /// Returns the number of entries of each backend.
    fn shares(algorithm: Algorithm, backends: &[Backend<Addr4>]) -> Vec<usize> {
        let mut shares = vec![0; backends.len()];
        table(algorithm, backends)
            .unwrap()
            .slots
            .iter()
            .for_each(|slot| shares[usize::from(*slot)] += 1);
        shares
    }

    #[test]
    fn turns_of_a_heavy_backend_do_not_follow_each_other() {
        let slots = turns(&weighted([5, 1, 1])).unwrap().slots;
        for seven in slots.chunks_exact(7) {
            let heavy = seven.iter().filter(|slot| **slot == 0).count();
            assert!((4..=6).contains(&heavy), "{seven:?}");
        }
        assert!(
            !slots.windows(5).any(|five| five == [0; 5]),
            "five turns of seven follow each other"
        );
        let alike = turns(&weighted([1, 1, 1])).unwrap().slots;
        assert_eq!(alike[..6], [0, 1, 2, 0, 1, 2]);
    }

    proptest! {
        #[test]
        fn shares_are_in_proportion_to_weights(weights in vec(1..=WEIGHT_MAX, 1..200)) {
            let sum: f64 = weights.iter().map(|weight| f64::from(*weight)).sum();
            let fair = |weight: u16| MAGLEV_PLACES as f64 * f64::from(weight) / sum;
            // The minimum of one entry gives light backends more than their share, at the cost of
            // the others.
            let beyond: f64 = weights.iter().map(|weight| (1.0 - fair(*weight)).max(0.0)).sum();
            for algorithm in [Algorithm::RANDOM, Algorithm::MAGLEV, Algorithm::ROUND_ROBIN, Algorithm::LEAST_CONNECTIONS] {
                for (share, weight) in shares(algorithm, &weighted(weights.clone())).into_iter().zip(&weights) {
                    let off = (share as f64 - fair(*weight)).abs();
                    let most = 1.0 + beyond * f64::from(*weight) / sum * 1.1;
                    prop_assert!(share > 0 && off <= most, "{algorithm:?}: {share} for {}", fair(*weight));
                }
            }
        }

        /// Besides the entries that the backend gains or loses, only a few others move.
        #[test]
        fn another_weight_moves_few_places(weights in vec(1..=20_u16, 2..50), at in any::<Index>(), new in 1..=20_u16) {
            let before = weighted(weights);
            let at = at.index(before.len());
            let mut after = before.clone();
            after[at] = after[at].with_weight(new);
            let old = shares(Algorithm::MAGLEV, &before)[at];
            let new = shares(Algorithm::MAGLEV, &after)[at];
            let addrs = |backends: &[Backend<Addr4>]| owners(backends).into_iter().map(|backend| backend.addr).collect::<Vec<_>>();
            let moved = addrs(&before).iter().zip(&addrs(&after)).filter(|(before, after)| before != after).count();
            prop_assert!(moved <= old.abs_diff(new) + MAGLEV_PLACES / 5, "{moved} places moved, {old} became {new}");
        }
    }
}
