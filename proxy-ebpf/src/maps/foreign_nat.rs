//! The tuples of other programs' connections.

use proxy_common::flow::FlowKey;
use proxy_common::foreign_nat::ForeignNat;

use super::Maps;
use super::copied;

/// Returns the row of the foreign NAT connection with this tuple of replies.
#[inline(always)]
pub fn foreign_nat<A: Maps>(key: &FlowKey<A>) -> ForeignNat {
    copied(A::MAPS.foreign_nat, key).unwrap_or(ForeignNat::NONE)
}

#[inline(always)]
pub fn set_foreign_nat<A: Maps>(key: &FlowKey<A>, foreign_nat: &ForeignNat) {
    // If this fails and kpx draws the same port, that connection may lose its replies.
    let _set = A::MAPS.foreign_nat.insert(key, foreign_nat, 0);
}

#[inline(always)]
pub fn remove_foreign_nat<A: Maps>(key: &FlowKey<A>) {
    // It may be gone already.
    let _removed = A::MAPS.foreign_nat.remove(key);
}
