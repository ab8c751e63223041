//! The ports of first fragments.

use proxy_common::fragment::{FragmentKey, Ports};

use super::copied;
use crate::net::Net;

#[inline(always)]
pub fn fragment_ports<A: Net>(key: &FragmentKey<A>) -> Option<Ports> {
    // Ports of another packet are a wrong guess, as they are where two packets have one identification: the receiver finds
    // out by the checksum.
    copied(A::MAPS.fragments, key)
}

#[inline(always)]
pub fn remember_fragment<A: Net>(key: &FragmentKey<A>, ports: &Ports) {
    // Without them the later fragments are left alone, and counted.
    let _full = A::MAPS.fragments.insert(key, ports, 0);
}

#[inline(always)]
pub fn forget_fragment<A: Net>(key: &FragmentKey<A>) {
    // Most often there is nothing to forget.
    let _none = A::MAPS.fragments.remove(key);
}
