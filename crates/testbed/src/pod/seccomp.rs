//! The default seccomp profile of container runtimes, as of Docker 23 and containerd 1.7.

use anyhow::{Context, Result};
use caps::{Capability, CapsHashSet};
use nix::libc::{AF_VSOCK, ENOSYS, EPERM};
use seccompiler::{apply_filter, compile_from_json};
use serde_json::{Value, json};

/// The system calls that are allowed regardless of capabilities and arguments.
const ALWAYS: &str = include_str!("seccomp.txt");
/// The additional calls of a capability.
const BY_CAPABILITY: [(Capability, &str); 3] = [
    (Capability::CAP_BPF, "bpf"),
    (Capability::CAP_PERFMON, "perf_event_open"),
    (
        Capability::CAP_SYS_ADMIN,
        "bpf fsconfig fsmount fsopen mount move_mount open_tree perf_event_open setns umount2 unshare",
    ),
];
/// The flags of clone(2) that create a namespace.
const NAMESPACES: u32 = 0x7E02_0000;

/// Restricts the calling thread and its children to the profile.
pub(super) fn apply_default_profile(capabilities: &CapsHashSet) -> Result<()> {
    let granted = BY_CAPABILITY
        .into_iter()
        .filter(|(capability, _)| capabilities.contains(capability));
    let names = granted
        .flat_map(|(_, names)| names.split_whitespace())
        .chain(ALWAYS.split_whitespace());
    let mut allowed: Vec<Value> = names.map(|name| json!({ "syscall": name })).collect();
    let masked = json!({ "masked_eq": NAMESPACES });
    allowed.push(json!({ "syscall": "clone", "args": [{ "index": 0, "type": "qword", "op": masked, "val": 0 }] }));
    allowed
        .push(json!({ "syscall": "socket", "args": [{ "index": 0, "type": "dword", "op": "ne", "val": AF_VSOCK }] }));
    // The strictest of several filters wins. This call fails as unknown, so libraries fall back.
    allowed.push(json!({ "syscall": "clone3" }));
    let unknown = json!([{ "syscall": "clone3" }]);
    filter("allow", json!({ "errno": ENOSYS }), &unknown)?;
    filter(json!({ "errno": EPERM }), "allow", &json!(allowed))
}

fn filter(otherwise: impl Into<Value>, listed: impl Into<Value>, calls: &Value) -> Result<()> {
    let filter = json!({ "all": {
        "mismatch_action": otherwise.into(), "match_action": listed.into(), "filter": calls,
    } });
    let arch = std::env::consts::ARCH
        .try_into()
        .context("an architecture that seccompiler knows")?;
    let programs =
        compile_from_json(filter.to_string().as_bytes(), arch).context("compile the filter")?;
    apply_filter(&programs["all"]).context("apply the filter")
}
