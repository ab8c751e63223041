//! The tuples of other programs' connections.

use proxy_common::flow::FlowKey;
use proxy_common::guest::Guest;

use super::copied;
use crate::net::Net;

/// Returns what is known of another program's connection whose replies come in with this tuple.
#[inline(always)]
pub fn guest<A: Net>(key: &FlowKey<A>) -> Guest {
    copied(A::MAPS.guests, key).unwrap_or(Guest::NONE)
}

#[inline(always)]
pub fn set_guest<A: Net>(key: &FlowKey<A>, guest: &Guest) {
    // Refused, it may cost that connection its replies, should kpx draw the same port.
    let _set = A::MAPS.guests.insert(key, guest, 0);
}

#[inline(always)]
pub fn remove_guest<A: Net>(key: &FlowKey<A>) {
    // It may be gone already.
    let _removed = A::MAPS.guests.remove(key);
}
