//! The tuples of other programs' connections.

use proxy_common::flow::FlowKey;
use proxy_common::foreign_nat::ForeignNat;

use super::copied;
use crate::net::Net;

/// Returns what is known of another program's connection whose replies come in with this tuple.
#[inline(always)]
pub fn foreign_nat<A: Net>(key: &FlowKey<A>) -> ForeignNat {
    copied(A::MAPS.foreign_nat, key).unwrap_or(ForeignNat::NONE)
}

#[inline(always)]
pub fn set_foreign_nat<A: Net>(key: &FlowKey<A>, foreign_nat: &ForeignNat) {
    // Refused, it may cost that connection its replies, should kpx draw the same port.
    let _set = A::MAPS.foreign_nat.insert(key, foreign_nat, 0);
}

#[inline(always)]
pub fn remove_foreign_nat<A: Net>(key: &FlowKey<A>) {
    // It may be gone already.
    let _removed = A::MAPS.foreign_nat.remove(key);
}
