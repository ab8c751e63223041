//! The capabilities that serving needs, and the missing capabilities of this process.

use std::fmt;

use anyhow::{Context, Result};
use caps::{CapSet, Capability, CapsHashSet};

/// A needed capability, with the operation that needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Need {
    pub capability: Capability,
    pub operation: &'static str,
}

/// The needed capabilities, measured with the kernel's tracepoint `cap_capable` in both modes, with
/// TCX and with clsact.
pub const NEEDED: [Need; 3] = [
    Need {
        capability: Capability::CAP_BPF,
        operation: "create maps and load programs",
    },
    Need {
        capability: Capability::CAP_NET_ADMIN,
        operation: "attach programs, and make kpx0, its routes and rules and the network's settings",
    },
    Need {
        capability: Capability::CAP_PERFMON,
        operation: "load programs that compute with pointers into packets",
    },
];

impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, to {}", self.capability, self.operation)
    }
}

/// Returns the needed capabilities that are missing in a set of this process.
pub fn missing(set: CapSet) -> Result<Vec<Need>> {
    Ok(missing_of(
        &caps::read(None, set).context("read this process's capabilities")?,
    ))
}

fn missing_of(permitted: &CapsHashSet) -> Vec<Need> {
    let has = |need: &Need| {
        let stands_for_it =
            is_part_of_sys_admin(need.capability) && permitted.contains(&Capability::CAP_SYS_ADMIN);
        permitted.contains(&need.capability) || stands_for_it
    };
    NEEDED.into_iter().filter(|need| !has(need)).collect()
}

/// Returns true for a capability that Linux 5.8 split from CAP_SYS_ADMIN, which still includes it.
pub fn is_part_of_sys_admin(capability: Capability) -> bool {
    matches!(capability, Capability::CAP_BPF | Capability::CAP_PERFMON)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BPF: Capability = Capability::CAP_BPF;
    const NET_ADMIN: Capability = Capability::CAP_NET_ADMIN;
    const PERFMON: Capability = Capability::CAP_PERFMON;
    const SYS_ADMIN: Capability = Capability::CAP_SYS_ADMIN;

    #[test]
    fn missing_capability_is_named_with_its_purpose() {
        let missing = |permitted: &[Capability]| {
            let missing = missing_of(&permitted.iter().copied().collect());
            missing
                .iter()
                .map(|need| need.capability)
                .collect::<Vec<_>>()
        };
        assert_eq!(missing(&[BPF, NET_ADMIN, PERFMON]), []);
        assert_eq!(
            missing(&[SYS_ADMIN, NET_ADMIN]),
            [],
            "on kernels before 5.8 there is nothing else"
        );
        assert_eq!(missing(&[SYS_ADMIN]), [NET_ADMIN]);
        assert_eq!(missing(&[NET_ADMIN]), [BPF, PERFMON]);
        assert_eq!(
            NEEDED[0].to_string(),
            "CAP_BPF, to create maps and load programs"
        );
    }
}
