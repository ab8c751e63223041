//! Restricts this process's privileges to those that serving needs.

use std::fmt;

use anyhow::{Context, Result, bail};
use caps::{CapSet, Capability, CapsHashSet};
use nix::sys::prctl::set_no_new_privs;
use nix::sys::resource::{RLIM_INFINITY, Resource, setrlimit};
use tracing::{debug, info};

/// A capability that serving needs, with the operation that needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Need {
    pub capability: Capability,
    pub operation: &'static str,
}

/// The needed capabilities, measured by the kernel's tracepoint `cap_capable` in both modes, with TCX and with clsact.
pub const NEEDED: [Need; 3] = [
    Need { capability: Capability::CAP_BPF, operation: "create maps and load programs" },
    Need {
        capability: Capability::CAP_NET_ADMIN,
        operation: "attach programs, and make kpx0, its routes and rules and the network's settings",
    },
    Need { capability: Capability::CAP_PERFMON, operation: "load programs that compute with pointers into packets" },
];

impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, to {}", self.capability, self.operation)
    }
}

/// Fails with the names of missing capabilities.
pub fn demand() -> Result<()> {
    let missing = missing(&caps::read(None, CapSet::Permitted).context("read this process's capabilities")?);
    if !missing.is_empty() {
        let missing: Vec<_> = missing.iter().map(Need::to_string).collect();
        bail!("lacks {}: run as root, or grant it", missing.join("; "));
    }
    Ok(())
}

/// Gives up all capabilities but the needed ones and `more`, and all ways to gain any, for this process and its
/// children. An error names the missing ones.
///
/// The process must have only one thread, because each thread has its own capabilities.
pub fn confine(more: &[Capability]) -> Result<()> {
    raise_memory_limit();
    demand()?;
    let permitted = caps::read(None, CapSet::Permitted).context("read this process's capabilities")?;
    let kept: CapsHashSet = kept(&permitted, more).intersection(&permitted).copied().collect();
    set_no_new_privs().context("forbid new privileges")?;
    // Without CAP_SETPCAP the bounding set stays as inherited, which has no effect any more.
    if caps::has_cap(None, CapSet::Effective, Capability::CAP_SETPCAP)? {
        let bounding = caps::read(None, CapSet::Bounding).context("read the bounding set")?;
        for capability in bounding.difference(&kept) {
            caps::drop(None, CapSet::Bounding, *capability).with_context(|| format!("give up {capability}"))?;
        }
    }
    if caps::runtime::ambient_set_supported().is_ok() {
        caps::clear(None, CapSet::Ambient).context("clear the ambient capabilities")?;
    }
    caps::clear(None, CapSet::Inheritable).context("clear the inheritable capabilities")?;
    for set in [CapSet::Effective, CapSet::Permitted] {
        caps::set(None, set, &kept).with_context(|| format!("set the {set:?} capabilities"))?;
    }
    let mut names: Vec<_> = kept.iter().map(ToString::to_string).collect();
    names.sort_unstable();
    info!(capabilities = names.join(" "), "confined");
    Ok(())
}

/// Returns the needed capabilities that this process lacks.
pub fn missing_here() -> Result<Vec<Need>> {
    Ok(missing(&caps::read(None, CapSet::Effective).context("read this process's capabilities")?))
}

fn missing(permitted: &CapsHashSet) -> Vec<Need> {
    let has = |need: &Need| {
        let stands_for_it = is_part_of_sys_admin(need.capability) && permitted.contains(&Capability::CAP_SYS_ADMIN);
        permitted.contains(&need.capability) || stands_for_it
    };
    NEEDED.into_iter().filter(|need| !has(need)).collect()
}

fn kept(permitted: &CapsHashSet, more: &[Capability]) -> CapsHashSet {
    let needed = NEEDED.into_iter().map(|need| match need.capability {
        capability if permitted.contains(&capability) || !is_part_of_sys_admin(capability) => capability,
        _ => Capability::CAP_SYS_ADMIN,
    });
    needed.chain(more.iter().copied()).collect()
}

/// Returns true for capabilities that Linux 5.8 split from CAP_SYS_ADMIN; CAP_SYS_ADMIN still includes them.
fn is_part_of_sys_admin(capability: Capability) -> bool {
    matches!(capability, Capability::CAP_BPF | Capability::CAP_PERFMON)
}

/// Raises the limit on locked memory: before Linux 5.11 the memory of maps is locked memory. Raising it needs
/// CAP_SYS_RESOURCE, which is given up later.
fn raise_memory_limit() {
    if let Err(error) = setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY) {
        debug!(%error, "the limit on locked memory stays, which matters before Linux 5.11");
    }
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
            let missing = missing(&permitted.iter().copied().collect());
            missing.iter().map(|need| need.capability).collect::<Vec<_>>()
        };
        assert_eq!(missing(&[BPF, NET_ADMIN, PERFMON]), []);
        assert_eq!(missing(&[SYS_ADMIN, NET_ADMIN]), [], "on kernels before 5.8 there is nothing else");
        assert_eq!(missing(&[SYS_ADMIN]), [NET_ADMIN]);
        assert_eq!(missing(&[NET_ADMIN]), [BPF, PERFMON]);
        assert_eq!(NEEDED[0].to_string(), "CAP_BPF, to create maps and load programs");
    }

    #[test]
    fn root_keeps_only_what_serving_needs() {
        let kept = |permitted: CapsHashSet, more: &[Capability]| kept(&permitted, more);
        assert_eq!(kept(caps::all(), &[]), [BPF, NET_ADMIN, PERFMON].into());
        assert_eq!(kept(caps::all(), &[SYS_ADMIN]), [BPF, NET_ADMIN, PERFMON, SYS_ADMIN].into());
        assert_eq!(kept([SYS_ADMIN, NET_ADMIN].into(), &[]), [SYS_ADMIN, NET_ADMIN].into());
    }
}
