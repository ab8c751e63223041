//! Lists the ids of the programs at a TCX hook (BPF_PROG_QUERY, linux/bpf.h). aya's list also opens
//! each program, which requires CAP_SYS_ADMIN.

use std::io::{Error, Result};

use proxy_net::filter::Hook;

const BPF_PROG_QUERY: libc::c_long = 16;
const BPF_TCX_INGRESS: u32 = 46;
const BPF_TCX_EGRESS: u32 = 47;
/// The maximum number of programs at a hook (`BPF_MPROG_MAX` of linux/bpf_mprog.h).
const PROGRAMS_MAX: usize = 64;

/// The part `query` of `union bpf_attr`.
#[repr(C)]
#[derive(Default)]
struct Query {
    ifindex: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    program_ids: u64,
    count: u32,
    pad: u32,
    program_attach_flags: u64,
    link_ids: u64,
    link_attach_flags: u64,
    revision: u64,
}

/// Returns the ids of the programs at a hook of a device; empty if there is no TCX or no such
/// device.
pub(crate) fn tcx_programs(ifindex: u32, hook: Hook) -> Result<Vec<u32>> {
    let mut ids = [0_u32; PROGRAMS_MAX];
    let attach_type = match hook {
        Hook::Ingress => BPF_TCX_INGRESS,
        Hook::Egress => BPF_TCX_EGRESS,
    };
    let program_ids = ids.as_mut_ptr().addr() as u64;
    let mut query = Query {
        ifindex,
        attach_type,
        program_ids,
        count: PROGRAMS_MAX as u32,
        ..Query::default()
    };
    // SAFETY: the kernel reads and writes `query` within its size, and writes at most `count` ids.
    // Both outlive the call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            BPF_PROG_QUERY,
            &raw mut query,
            size_of::<Query>(),
        )
    };
    if result == 0 {
        return Ok(ids.into_iter().take(query.count as usize).collect());
    }
    let error = Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EINVAL | libc::ENODEV | libc::ENOENT) => Ok(Vec::new()),
        _ => Err(error),
    }
}
