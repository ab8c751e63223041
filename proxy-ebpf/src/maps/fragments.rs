//! The ports of first fragments.

use proxy_common::fragment::{FragmentKey, Ports};

use super::copied;
use crate::net::Net;

#[inline(always)]
pub fn fragment_ports<A: Net>(key: &FragmentKey<A>) -> Option<Ports> {
    // Ports of another packet are a wrong guess, as they are where two packets have one
    // identification: the receiver finds out by the checksum.
    copied(A::MAPS.fragments, key).or_else(|| copied(A::MAPS.far_fragments, key))
}

/// Keeps the ports. Those of flows with `is_far` clients have a table of their own, which any host
/// can fill.
#[inline(always)]
pub fn remember_fragment<A: Net>(key: &FragmentKey<A>, ports: &Ports, is_far: bool) {
    let map = if is_far {
        A::MAPS.far_fragments
    } else {
        A::MAPS.fragments
    };
    // Without them the later fragments are left alone, and counted.
    let _full = map.insert(key, ports, 0);
}

#[inline(always)]
pub fn forget_fragment<A: Net>(key: &FragmentKey<A>) {
    // Most often there is nothing to forget.
    let _none = A::MAPS.fragments.remove(key);
    let _none = A::MAPS.far_fragments.remove(key);
}
