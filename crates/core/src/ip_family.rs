//! The two IP families by name, for health responses and metrics.

use proxy_common::addr::{Addr, Addr4, Addr6};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum IpFamily {
    V4,
    V6,
}

impl IpFamily {
    pub const ALL: [Self; 2] = [Self::V4, Self::V6];

    /// Returns the API's spelling.
    pub const fn name(self) -> &'static str {
        match self {
            Self::V4 => Addr4::FAMILY,
            Self::V6 => Addr6::FAMILY,
        }
    }

    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|family| family.name() == name)
    }
}
