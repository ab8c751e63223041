//! The ports of first fragments.

use proxy_common::fragment::{FragmentKey, Ports};

use super::Maps;
use super::copied_here;

#[inline(always)]
pub fn fragment_ports<A: Maps>(key: &FragmentKey<A>) -> Option<Ports> {
    // The copy may have another packet's ports, as two packets with the same identification do: the
    // receiver detects that by the checksum.
    copied_here(A::MAPS.fragments, key).or_else(|| copied_here(A::MAPS.far_fragments, key))
}

/// Stores the ports. Flows with `is_far` clients have a separate table, because any host can fill
/// it.
#[inline(always)]
pub fn remember_fragment<A: Maps>(key: &FragmentKey<A>, ports: &Ports, is_far: bool) {
    let map = if is_far {
        A::MAPS.far_fragments
    } else {
        A::MAPS.fragments
    };
    // Without the ports, hooks pass the later fragments unchanged, and count them.
    let _full = map.insert(key, ports, 0);
}

#[inline(always)]
pub fn forget_fragment<A: Maps>(key: &FragmentKey<A>) {
    // Most often there is nothing to forget.
    let _none = A::MAPS.fragments.remove(key);
    let _none = A::MAPS.far_fragments.remove(key);
}
