//! Capabilities and user of a container.

use std::str::FromStr;

use anyhow::{Context, Result};
use caps::{Capability, CapsHashSet};
use k8s_openapi::api::core::v1::SecurityContext;

/// containerd's default capabilities.
const DEFAULT_CAPABILITIES: &str = "AUDIT_WRITE CHOWN DAC_OVERRIDE FOWNER FSETID KILL MKNOD NET_BIND_SERVICE NET_RAW \
                                    SETFCAP SETGID SETPCAP SETUID SYS_CHROOT";

pub(super) fn capabilities(security: &SecurityContext) -> Result<CapsHashSet> {
    if security.privileged == Some(true) {
        return Ok(caps::all());
    }
    let named = |name: &str| {
        Capability::from_str(&format!("CAP_{name}")).with_context(|| format!("capability {name}"))
    };
    let wanted = security.capabilities.clone().unwrap_or_default();
    let add = wanted.add.unwrap_or_default();
    let drop = wanted.drop.unwrap_or_default();
    let mut left = CapsHashSet::new();
    if !drop.iter().any(|name| name == "ALL") {
        left = DEFAULT_CAPABILITIES
            .split_whitespace()
            .map(named)
            .collect::<Result<_>>()?;
    }
    for name in drop.iter().filter(|name| *name != "ALL") {
        left.remove(&named(name)?);
    }
    left.extend(
        add.iter()
            .map(|name| named(name))
            .collect::<Result<Vec<_>>>()?,
    );
    Ok(left)
}

/// Returns the uid of a container; `None` for root.
pub(super) fn user(security: &SecurityContext) -> Result<Option<u32>> {
    let user = security.run_as_user.filter(|user| *user != 0);
    user.map(|user| u32::try_from(user).context("a user's number"))
        .transpose()
}
