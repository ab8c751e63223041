//! Restricts this process to the privileges that serving needs.

use anyhow::{Context, Result, bail};
use caps::{CapSet, Capability, CapsHashSet};
use nix::sys::prctl::set_no_new_privs;
use nix::sys::resource::{RLIM_INFINITY, Resource, setrlimit};
use proxy_check::{Need, is_part_of_sys_admin, missing};
use tracing::{debug, info};

pub use proxy_check::NEEDED;

/// Fails with the names of missing capabilities.
pub fn demand() -> Result<()> {
    let missing = missing(CapSet::Permitted)?;
    if !missing.is_empty() {
        let missing: Vec<_> = missing.iter().map(Need::to_string).collect();
        bail!("lacks {}: run as root, or grant it", missing.join("; "));
    }
    Ok(())
}

/// Drops all capabilities except the needed ones and `more`, for this process and its children, so
/// that none can regain them. An error names the missing capabilities.
///
/// The process must have only one thread, because each thread has its own capabilities.
pub fn confine(more: &[Capability]) -> Result<()> {
    raise_memory_limit();
    demand()?;
    let permitted =
        caps::read(None, CapSet::Permitted).context("read this process's capabilities")?;
    let kept: CapsHashSet = kept(&permitted, more)
        .intersection(&permitted)
        .copied()
        .collect();
    set_no_new_privs().context("forbid new privileges")?;
    // Without CAP_SETPCAP the inherited bounding set stays, and has no effect any more.
    if caps::has_cap(None, CapSet::Effective, Capability::CAP_SETPCAP)? {
        let bounding = caps::read(None, CapSet::Bounding).context("read the bounding set")?;
        for capability in bounding.difference(&kept) {
            caps::drop(None, CapSet::Bounding, *capability)
                .with_context(|| format!("give up {capability}"))?;
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

fn kept(permitted: &CapsHashSet, more: &[Capability]) -> CapsHashSet {
    let needed = NEEDED.into_iter().map(|need| match need.capability {
        capability if permitted.contains(&capability) || !is_part_of_sys_admin(capability) => {
            capability
        }
        _ => Capability::CAP_SYS_ADMIN,
    });
    needed.chain(more.iter().copied()).collect()
}

/// Raises the limit on locked memory, which maps use before Linux 5.11. This needs
/// CAP_SYS_RESOURCE, which is dropped later.
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
    fn root_keeps_only_what_serving_needs() {
        let kept = |permitted: CapsHashSet, more: &[Capability]| kept(&permitted, more);
        assert_eq!(kept(caps::all(), &[]), [BPF, NET_ADMIN, PERFMON].into());
        assert_eq!(
            kept(caps::all(), &[SYS_ADMIN]),
            [BPF, NET_ADMIN, PERFMON, SYS_ADMIN].into()
        );
        assert_eq!(
            kept([SYS_ADMIN, NET_ADMIN].into(), &[]),
            [SYS_ADMIN, NET_ADMIN].into()
        );
    }
}
