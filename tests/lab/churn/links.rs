//! Detaches BPF links of another process, like `bpftool link detach`.

use std::fs;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use anyhow::{Context, Result, ensure};
use nix::errno::Errno;
use nix::libc;
use nix::unistd::Pid;

/// A value of `enum bpf_cmd` (linux/bpf.h).
const LINK_GET_FD_BY_ID: i32 = 30;
const LINK_DETACH: i32 = 34;

/// Detaches the TCX links that a process holds on a device, from hooks with this suffix.
pub(crate) fn detach_all(pid: Pid, ifindex: u32, hook: &str) -> Result<()> {
    let mut detached = 0;
    for file in fs::read_dir(format!("/proc/{pid}/fdinfo"))? {
        // The process may have closed the descriptor.
        let Ok(text) = fs::read_to_string(file?.path()) else {
            continue;
        };
        let field = |name: &str| {
            text.lines()
                .find_map(|line| line.strip_prefix(name))
                .map(str::trim)
        };
        let is_it = field("attach_type:")
            .is_some_and(|attach_type| attach_type.ends_with(&format!("{hook})")))
            && field("ifindex:") == Some(&ifindex.to_string());
        if let Some(id) = field("link_id:").filter(|_| is_it) {
            detach(id.parse()?)?;
            detached += 1;
        }
    }
    ensure!(
        detached > 0,
        "no link on device {ifindex} is of process {pid}"
    );
    Ok(())
}

fn detach(id: u32) -> Result<()> {
    let fd = match bpf(LINK_GET_FD_BY_ID, id) {
        // The owner has closed the link first, after it noticed the loss of another link.
        Err(Errno::ENOENT) => return Ok(()),
        fd => fd.with_context(|| format!("open link {id}"))?,
    };
    // SAFETY: the kernel has just given us this file descriptor.
    let link = unsafe { OwnedFd::from_raw_fd(fd) };
    bpf(LINK_DETACH, link.as_raw_fd().cast_unsigned())
        .with_context(|| format!("detach link {id}"))?;
    Ok(())
}

/// Both commands read one number at the start of `union bpf_attr`.
fn bpf(command: i32, number: u32) -> Result<i32, Errno> {
    let attr = [number, 0, 0, 0];
    // SAFETY: the kernel reads `attr`, which lives that long, and no further than its size.
    let result =
        unsafe { libc::syscall(libc::SYS_bpf, command, attr.as_ptr(), size_of_val(&attr)) };
    // The result is a file descriptor or 0.
    Errno::result(result).map(|fd| fd as i32)
}
